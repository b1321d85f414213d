"""The rules of the house that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coterie.config.fields import recipe_fields

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "coterie").rglob("*.py"))
PYTHON_FILES = [*SOURCES, *(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "shared", "helpers", "helper", "manager", "misc"}
HEAVY = ("torch", "transformers", "safetensors", "peft", "numpy", "matplotlib", "rich", "aiohttp", "cryptography")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def texts():
    """What is written in each Python file, by path."""
    return {path: path.read_text(encoding="utf-8") for path in PYTHON_FILES}


@pytest.fixture(scope="module")
def trees(texts):
    """The same, parsed."""
    return {path: ast.parse(text) for path, text in texts.items()}


def test_every_file_has_a_docstring_and_at_most_400_lines(texts, trees):
    assert len(SOURCES) > 200
    assert [name(path) for path in PYTHON_FILES if not ast.get_docstring(trees[path])] == []
    assert {name(path): text.count("\n") for path, text in texts.items() if text.count("\n") > 400} == {}


def test_no_function_is_longer_than_50_lines(trees):
    long = {}
    for path in SOURCES:
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > 50:
                    long[f"{name(path)}: {node.name}"] = lines
    assert long == {}


def test_every_file_is_named_after_a_concept():
    parts = {path: set(path.relative_to(ROOT / "src").with_suffix("").parts) for path in SOURCES}
    assert [name(path) for path in SOURCES if FORBIDDEN_NAMES & parts[path]] == []


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(pickle|dill|cloudpickle|marshal)\.(loads?|dumps?|Unpickler|Pickler)\b|import shelve",
        r"weights_only\s*=\s*False",
        r"#\s*(TODO|FIXME|XXX)\b(?!.*#\d+)",
    ],
    ids=["unpickles", "lets torch unpickle", "is left undone without an issue's number"],
)
def test_nothing(pattern, texts):
    assert [name(path) for path in SOURCES if re.search(pattern, texts[path])] == []


LINT_EXCEPTION = re.compile(r"# noqa: (?P<codes>[A-Z0-9, ]*?)(?:\s+--?\s+(?P<reason>.*))?$")


def unjustified_lines(text):
    """Numbers of lines with an exception that names no rule, or gives no reason near it."""
    justified, bare, nameless = set(), [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if found := LINT_EXCEPTION.search(line):
            if found["reason"]:
                justified |= {(found["codes"], number + offset) for offset in range(-5, 6)}
            else:
                bare.append((found["codes"], number))
        elif re.search(r"# (noqa|type: ignore)\s*$", line):
            nameless.append(number)
    return nameless + [number for codes, number in bare if (codes, number) not in justified]


def test_every_lint_exception_is_justified(texts):
    """By words after a dash; one reason serves for exceptions of the same rule within five lines."""
    assert {name(path): lines for path, text in texts.items() if (lines := unjustified_lines(text))} == {}


def imported_modules(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_heavy():
    statement = "from coterie.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not {module.partition(".")[0] for module in imported_modules(statement)} & set(HEAVY)


@pytest.mark.parametrize(
    "package", ["cluster", "planner", "schedules", "profiles", "metrics", "transport", "jobs", "config"]
)
def test_deciding_needs_no_torch(package):
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in SOURCES
        if package in path.relative_to(ROOT / "src" / "coterie").parts and path.name != "__init__.py"
    ]
    imported = imported_modules("\n".join(f"import {module}" for module in modules))
    assert not {module.partition(".")[0] for module in imported} & {"torch", "transformers", "safetensors", "peft"}


def test_the_reference_pages_are_up_to_date():
    script = ROOT / "scripts" / "make_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_every_recipe_key_is_used_by_a_program():
    """A key that nothing reads would be a promise without effect."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES if "config" not in path.parts)
    # What the recipe's own properties pass on is read under the property's name.
    passed_on = {
        "train.learning_rate": "train.highest_learning_rate",
        "cluster.local_workers": "cluster.effective_local_workers",
        "cluster.host": "cluster.listen_host",
        "side.gate_temperature": "side.temperature",  # `SideSpec`'s word for it
        "side.cache_quota": "side.quota_bytes",
    }
    read_as = {field.key: passed_on.get(field.key, field.key) for field in recipe_fields()}
    assert [key for key, read in read_as.items() if not re.search(re.escape(read) + r"\b", code)] == []


@pytest.mark.parametrize("target", ["check", "test"])
def test_make_runs_the_linters_and_the_import_contracts(target):
    make = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in ("ruff check", "ruff format --check", "mypy", "lint-imports"):
        assert f"/{command}" in make.stdout
    assert ("/pytest" in make.stdout) is (target == "test")


def test_continuous_integration_is_make_test():
    assert "exec make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_folder_is_on_a_floor():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    floors = {part.strip() for layer in contracts[0]["layers"] for part in layer.split("|")}
    package = ROOT / "src" / "coterie"
    parts = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} <= floors
