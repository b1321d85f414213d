"""What the documentation names exists, and the commands it shows are commands."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.cli.main import build_parser
from coterie.config import load_recipe
from coterie.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Where a path in prose may start.
TOP_FOLDERS = ("src/", "docs/", "recipes/", "tests/", "scripts/", "benchmarks/", ".ci/", ".github/")
# What a run or a build makes, and so does not stand in the tree.
MADE = re.compile(r"^(runs|build|dist|\.venv)/")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_blocks(text: str, *languages: str) -> Iterator[str]:
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if found[1] in languages:
            yield found[2]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_named_in_prose_exist(page):
    absent = []
    for word in re.findall(r"`([^`\s]+)`", prose(page.read_text(encoding="utf-8"))):
        path = word.rstrip("/").partition("::")[0]
        names_a_path = (
            word.startswith(TOP_FOLDERS) and not MADE.match(word) and not any(sign in word for sign in "*<>{…")
        )
        if names_a_path and not (ROOT / path).exists():
            absent.append(word)
    assert not absent


def commands() -> list[tuple[str, str]]:
    """Every `coterie …` line in a shell block, with the page it stands on."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in code_blocks(text, "sh", "bash", "shell", "console"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                command = line.strip().removeprefix("$ ").partition(" #")[0]
                found += [(name(page), part.strip()) for part in command.split("&&") if "coterie " in part]
    return [(page, command) for page, command in found if re.match(r"(\S*/)?coterie ", command)]


@pytest.mark.parametrize(("page", "command"), commands() or [("none", "coterie --help")])
def test_commands_parse(page, command):
    words = shlex.split(command)[1:]
    try:
        build_parser().parse(words)
    except UsageError as error:
        pytest.fail(f"{page}: {command}: {error.message}")
    except SystemExit:  # --help and --version
        assert {"--help", "--version"} & set(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_named_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    for block in code_blocks(text, "sh", "bash", "shell", "console"):
        named |= set(re.findall(r"^\s*(?:\$ )?make ([a-z-]+)", block, flags=re.MULTILINE))
    assert named <= targets


def recipes() -> list[object]:
    return [
        pytest.param(block, id=f"{name(page)}-{number}")
        for page in PAGES
        for number, block in enumerate(code_blocks(page.read_text(encoding="utf-8"), "toml"))
        if "[model]" in block
    ]


@pytest.mark.parametrize("text", recipes())
def test_whole_recipes_in_the_docs_are_right(text, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    load_recipe(path)


def test_other_toml_blocks_are_toml():
    for page in PAGES:
        for block in code_blocks(page.read_text(encoding="utf-8"), "toml"):
            tomllib.loads(block)


def test_every_page_of_the_docs_is_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    seen, pending = set(), [index]
    while pending:
        page = pending.pop()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        pending += [(page.parent / target).resolve() for target in targets if not re.match(r"[a-z]+:", target)]
    assert set((ROOT / "docs").rglob("*.md")) <= seen


def test_the_script_for_system_packages_succeeds_without_rights(tmp_path):
    """As any user, with or without the packages: it never fails a test run."""
    script = ROOT / "scripts" / "install-test-packages"
    bare = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(["bash", str(script)], env=bare, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
