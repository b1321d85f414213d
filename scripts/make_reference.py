"""Writes the reference pages in docs/reference/ from the code: errors, recipe, command line, events.

`--check` writes nothing and fails if a page on disk differs from what the code says.
"""

import argparse
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from coterie.cli.failures import INTERNAL_EXIT_CODE, INTERNAL_SLUG
from coterie.cli.main import build_parser
from coterie.cli.parser import Parser
from coterie.config.fields import RecipeField, choices, plain_type, section_structs, struct_fields
from coterie.config.recipe import LocalWorker
from coterie.errors import CoterieError
from coterie.metrics.records import AnyRecord

FOLDER = Path(__file__).parent.parent / "docs" / "reference"

ERRORS_HEAD = """\
# Reference: errors

A command that fails prints two lines on the standard error, what happened and what to do, and ends with the exit code
of the error's kind:

```text
error [recipe]: recipe.toml has 1 mistake:
  line 12: there is no key 'epoch' in [train]; did you mean 'epochs'?
try: …
```

With `--json` it prints `{"error": {"slug": …, "message": …, "hint": …, "exit_code": …}}` on the standard output
instead.

"""

INTERNAL_TEXT = """\
An exception that nobody foresaw: a mistake in coterie, not in what you asked.

Run the command again with `--verbose` and report what it prints.
"""

RECIPE_HEAD = """\
# Reference: the recipe

A recipe is a TOML file. Every key is also a flag of `coterie train`: the key's name with dashes (`batch_rows` is
`--batch-rows`), without its section, since names are unique. A flag overrides the file. Lists are flags given once per
value, or with commas between values; switches have a `--no-` form. All mistakes are reported at once. The recipe in
effect, with every default written out, is kept in the run folder.

```toml
[model]
name = "sentence-transformers/all-MiniLM-L6-v2"

[data]
train = "train.conll"
dev = "dev.conll"

[train]
epochs = 3
batch_rows = 16
learning_rate = 1e-4

[cluster]
workers = 3
```
"""

EVENTS_HEAD = """\
# Reference: events.jsonl

The record of a run: one JSON object per line, told apart by `type`. `at_s` is the date in seconds since 1970. A number
that is not finite is `null`. A last line without its newline was cut off by a kill; ignore it. After a `start` record
with `first_step` n, steps recorded earlier from n on are void: the resumed run does them again. A `step` record counts
steps and epochs from 0; screens and messages count from 1. A new run in a folder without a checkpoint renames the file
of the attempt before to `events.jsonl.old`.
"""

NOTE = "<!-- Made by `make docs` from the code; changes here are lost. -->\n\n"


def main() -> int:
    """Write or check all pages; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date, write nothing")
    check_only = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not check_only:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale and check_only:
        print(f"out of date: {', '.join(stale)}; run `make docs` and commit the result", file=sys.stderr)
        return 1
    return 0


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "errors.md": NOTE + errors_page(),
        "recipe.md": NOTE + recipe_page(),
        "cli.md": NOTE + cli_page(),
        "events.md": NOTE + events_page(),
    }


def error_classes() -> list[type[CoterieError]]:
    """All errors, by exit code."""
    found: list[type[CoterieError]] = []
    pending: list[type[CoterieError]] = [CoterieError]
    while pending:
        kind = pending.pop()
        if "slug" in vars(kind):
            found.append(kind)
        pending.extend(kind.__subclasses__())
    return sorted(found, key=lambda kind: kind.exit_code)


def errors_page() -> str:
    """The errors with their slugs and exit codes."""
    parts = [ERRORS_HEAD]
    kinds = error_classes()
    rows = [(f"[`{kind.slug}`](#{kind.slug})", str(kind.exit_code), summary_of(kind)) for kind in kinds]
    rows.append((f"[`{INTERNAL_SLUG}`](#{INTERNAL_SLUG})", str(INTERNAL_EXIT_CODE), "A mistake in coterie itself."))
    rows.sort(key=lambda row: int(row[1]))
    parts.append(table(("slug", "exit code", "what it means"), rows))
    for kind in kinds:
        what, _, advice = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        parts.append(f"\n## {kind.slug}\n\nExit code {kind.exit_code}. {flowed(what)}\n\n{flowed(advice)}\n")
    parts.append(f"\n## {INTERNAL_SLUG}\n\nExit code {INTERNAL_EXIT_CODE}. {INTERNAL_TEXT}")
    return "".join(parts)


def recipe_page() -> str:
    """The recipe's sections and keys."""
    parts = [RECIPE_HEAD]
    for name, struct in section_structs().items():
        parts.append(f"\n## [{name}]\n\n{flowed(inspect.cleandoc(struct.__doc__ or ''))}\n\n")
        parts.append(fields_table(struct_fields(struct, name), flags=True))
    parts.append(f"\n## [[cluster.local_workers]]\n\n{flowed(inspect.cleandoc(LocalWorker.__doc__ or ''))}\n\n")
    parts.append(fields_table(struct_fields(LocalWorker, "cluster.local_workers"), flags=False))
    return "".join(parts)


def fields_table(fields: Iterator[RecipeField], *, flags: bool) -> str:
    """One row per key."""
    heads = ("key", *(("flag",) if flags else ()), "value", "default", "what it does")
    rows = []
    for field in fields:
        flag = (f"`{field.flag}`",) if flags else ()
        rows.append((f"`{field.name}`", *flag, value_text(field.type), default_cell(field), field.description))
    return table(heads, rows)


def default_cell(field: RecipeField) -> str:
    """The default as TOML writes it."""
    if field.required:
        return "required"
    if field.default is None or field.default == ():
        return ""
    return f"`{msgspec.json.encode(field.default).decode()}`"


def value_text(annotation: object) -> str:
    """What may be written, in words: `flush`, `gpipe` …, `number ≥ 1`, `text`."""
    words = choices(annotation)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    plain = plain_type(annotation)
    if typing.get_origin(plain) is tuple:
        inner = typing.get_args(plain)[0]
        return "tables" if inner is LocalWorker else f"list of: {value_text(inner)}"
    parts = [part for part in typing.get_args(plain) if part is not type(None)]
    if parts:
        return " or ".join(value_text(part) for part in parts)
    names = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
    return names[typing.cast("type", plain)] + limits(annotation)


def limits(annotation: object) -> str:
    """The range of a number: ` ≥ 1`, ` > 0, < 1`; empty if there is none."""
    found = []
    for meta in getattr(annotation, "__metadata__", ()):
        bounds = {"≥": meta.ge, ">": meta.gt, "≤": meta.le, "<": meta.lt}
        found += [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None and bound < 2**62]
    # The range of an optional number stands one level further in.
    inner = [limits(part) for part in typing.get_args(annotation) if typing.get_args(part)]
    return " " + ", ".join(found) if found else "".join(inner)


def cli_page() -> str:
    """The verbs and their flags; the recipe's own flags are on the recipe's page."""
    parser = build_parser()
    parts = [f"# Reference: the command line\n\n{parser.description}\n\n"]
    parts.append(
        table(("verb", "what it does"), [(f"[`{n}`](#coterie-{n})", help_of(parser, n)) for n in parser.verbs])
    )
    for name, verb in parser.verbs.items():
        parts.append(f"\n## coterie {name}\n\n{verb.description or ''}\n\n")
        rows = []
        recipe_flags = False
        for action in verb._actions:  # noqa: SLF001 - argparse has no public list of its arguments
            if action.dest.startswith("recipe:"):
                recipe_flags = True
            elif action.dest != "help":
                names = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
                rows.append((names, help_text(action)))
        parts.append(table(("argument", "what it does"), rows))
        if recipe_flags:
            parts.append("\nEvery key of the recipe is a flag too: see [the recipe](recipe.md).\n")
    return "".join(parts)


def help_of(parser: Parser, name: str) -> str:
    """The one-line help of a verb."""
    for action in parser._actions:  # noqa: SLF001 - as above
        for choice in getattr(action, "_choices_actions", ()):
            if choice.dest == name:
                return choice.help or ""
    return ""


def help_text(action: argparse.Action) -> str:
    """An argument's help with its choices."""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    words = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
    return text + words


def events_page() -> str:
    """The records of `events.jsonl`."""
    parts = [EVENTS_HEAD]
    for record in typing.get_args(AnyRecord):
        tag = msgspec.structs.fields(record) and record.__struct_config__.tag
        doc, _, attributes = inspect.cleandoc(record.__doc__ or "").partition("\n\nAttributes:\n")
        names = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(record) if field.name != "at_s")
        parts.append(f"\n## {tag}\n\n{flowed(doc)}\n\nFields: {names}.\n{attribute_list(attributes)}")
    return "".join(parts)


def attribute_list(attributes: str) -> str:
    """A docstring's attributes as a Markdown list; nothing for none."""
    lines: list[str] = []
    for line in attributes.splitlines():
        if line.startswith(" " * 5):  # the rest of the line before
            lines[-1] += f" {line.strip()}"
        elif line.strip():
            name, _, text = line.strip().partition(": ")
            lines.append(f"- `{name.replace(', ', '`, `')}`: {text}")
    return "".join(f"{line}\n" for line in (["", *lines] if lines else []))


def summary_of(kind: type) -> str:
    """The first paragraph of a docstring."""
    return flowed(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])


def flowed(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
