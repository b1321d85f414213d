"""Reads a recipe from a TOML file and overrides, and reports every mistake in it at once."""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coterie.config.checks import contradictions
from coterie.config.fields import (
    LOCAL_WORKERS,
    RecipeField,
    choices,
    plain_type,
    recipe_fields,
    section_structs,
    struct_fields,
)
from coterie.config.lines import key_lines
from coterie.config.recipe import LocalWorker, Recipe
from coterie.errors import RecipeError
from coterie.units import counted

_NAME_OR_NUMBER = {"data.text_column", "data.pair_column", "data.label_column"}
_UNQUOTED: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "true or false"}
_INTEGER = re.compile(r"[+-]?\d+")
_HINT = "`coterie train --help` and docs/reference/recipe.md list every key"


class _Mistakes:
    """Collects what is wrong and where it stands."""

    def __init__(self, lines: Mapping[str, int], overridden: Mapping[str, str]) -> None:
        self._lines = lines
        self._overridden = overridden
        self._found: list[tuple[int, str]] = []
        self.keys: set[str] = set()

    def add(self, key: str, text: str, *, plain: bool = False) -> None:
        """Note that the value at `key` is wrong; `plain` leaves the key out, where the text names it."""
        self.keys.add(key)
        flag = self._overridden.get(key.partition("[")[0])
        line = 0 if flag else self._lines.get(key, 0)
        where = flag or (f"line {line}" if line else "")
        body = text if plain or (flag and not key.startswith(LOCAL_WORKERS)) else f"{key} {text}"
        self._found.append((line or 1_000_000, f"{where}: {body}" if where else body))

    def error(self, source: str) -> RecipeError | None:
        """One error with all mistakes in the file's order, or None."""
        if not self._found:
            return None
        lines = [text for _, text in sorted(self._found, key=lambda found: found[0])]
        return RecipeError(f"{source} has {counted(len(lines), 'mistake')}:\n  " + "\n  ".join(lines), hint=_HINT)


def load_recipe(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> Recipe:
    """The recipe in the file at `path`, changed by `overrides`.

    Args:
        path: A TOML file; None starts from the defaults.
        overrides: Values by dotted key (`train.epochs`), field name (`epochs`) or flag (`batch-rows`). Text is read
            as the field's type, as on a command line; None means "not given".

    Raises:
        RecipeError: Anything is wrong; the message lists all mistakes, each with its line or flag.
    """
    text = "" if path is None else _read(path)
    tables = _parse(text, path)
    mistakes: dict[str, str] = {}
    given, overridden = _override(tables, overrides or {}, mistakes)
    report = _Mistakes(key_lines(text), overridden)
    for key, mistake in mistakes.items():
        report.add(key, mistake, plain=True)
    sections = _check_sections(given, overridden, report)
    _add_missing(given, sections, report, no_file=path is None)
    recipe = msgspec.convert(sections, Recipe)
    for found in contradictions(recipe):
        if report.keys.isdisjoint((found.key, *found.others)):
            report.add(found.key, found.text)
    error = report.error(str(path) if path is not None else "the recipe")
    if error is not None:
        raise error
    train = msgspec.structs.replace(recipe.train, learning_rate=recipe.train.highest_learning_rate)
    return msgspec.structs.replace(recipe, train=train)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        hint = _perhaps_data(path) or "give the path of a TOML file"
        raise RecipeError(f"cannot read the recipe {path}: {reason}", hint=hint) from error
    except UnicodeDecodeError as error:
        hint = _perhaps_data(path) or "a recipe is a TOML text file; save it as UTF-8"
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start})", hint=hint) from error


def _perhaps_data(path: Path | None) -> str:
    """A hint for who gave the data where the recipe stands; empty if the name is that of a recipe."""
    if path is None or path.suffix.lower() == ".toml":
        return ""
    return f"did you mean --train {path}? A recipe is a TOML file, and flags can say all that it says"


def _parse(text: str, path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = _perhaps_data(path) or "see https://toml.io for the format"
        raise RecipeError(f"{path} is not TOML: {error}", hint=hint) from error


def _override(
    tables: Mapping[str, Any], overrides: Mapping[str, object], mistakes: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's tables with the overrides on top, and which key came from which flag."""
    names: dict[str, RecipeField] = {}
    for field in recipe_fields():
        names |= {field.key: field, field.name: field, field.flag.removeprefix("--"): field}
    merged = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    overridden: dict[str, str] = {}
    for name, value in overrides.items():
        target = names.get(name)
        if target is None:
            mistakes[name] = f"there is no option {name!r}{_nearest(name, names)}"
        elif value is not None:
            section = merged.setdefault(target.section, {})
            if isinstance(section, dict):
                section[target.name] = os.fspath(value) if isinstance(value, os.PathLike) else value
            overridden[target.key] = target.flag
    return merged, overridden


def _nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_sections(given: Mapping[str, Any], overridden: Mapping[str, str], report: _Mistakes) -> dict[str, Any]:
    """The good values of every section; the rest goes to the report."""
    structs = section_structs()
    sections: dict[str, Any] = {name: {} for name in structs}
    for name, table in given.items():
        if name not in structs:
            report.add(name, _unknown_section(name), plain=True)
        elif not isinstance(table, dict):
            report.add(name, f"is a section: write [{name}] and its keys below it")
        else:
            fields = {field.name: field for field in struct_fields(structs[name], name)}
            sections[name] = _check_table(name, table, fields, overridden, report)
    return sections


def _unknown_section(name: str) -> str:
    for field in recipe_fields():
        if field.name == name:
            return f"{name} belongs into the section [{field.section}]"
    return f"there is no section [{name}]{_nearest(name, list(section_structs()))}"


def _check_table(
    path: str,
    table: Mapping[str, Any],
    fields: Mapping[str, RecipeField],
    overridden: Mapping[str, str],
    report: _Mistakes,
) -> dict[str, Any]:
    good: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}.{name}"
        field = fields.get(name)
        if field is None:
            report.add(key, f"there is no key {name!r} in [{path}]{_elsewhere(name, fields)}", plain=True)
        elif key == LOCAL_WORKERS:
            good[name] = _check_local_workers(value, report)
        else:
            try:
                good[name] = _convert(value, field, from_flag=key in overridden)
            except msgspec.ValidationError as error:
                report.add(key, f"is {_shown(value)}: {_explained(error, field, value, from_flag=key in overridden)}")
    return good


def _elsewhere(name: str, fields: Mapping[str, RecipeField]) -> str:
    for field in recipe_fields():
        if field.name == name:
            return f"; it belongs into [{field.section}]"
    return _nearest(name, fields)


def _convert(value: object, field: RecipeField, *, from_flag: bool) -> object:
    """`value` as the field's type; text from a flag is read as a number or list where the type wants one."""
    if from_flag and field.key in _NAME_OR_NUMBER and isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    converted: object = msgspec.convert(value, field.type, strict=not from_flag)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError("expected a finite number")
    return converted


def _check_local_workers(value: object, report: _Mistakes) -> list[dict[str, Any]]:
    """Checks each worker: a table from the file, a struct from Python, or `memory=600MiB,speed=0.5` from a flag."""
    if not isinstance(value, list | tuple):
        report.add(LOCAL_WORKERS, "is a list of workers: write [[cluster.local_workers]] and its keys below it")
        return []
    fields = {field.name: field for field in struct_fields(LocalWorker, LOCAL_WORKERS)}
    good = []
    for index, worker in enumerate(value):
        path = f"{LOCAL_WORKERS}[{index}]"
        table = _worker_table(worker)
        if table is None:
            report.add(path, f"is {_shown(worker)}: expected key=value pairs such as memory=600MiB,speed=0.5")
            continue
        overridden = {f"{path}.{name}": "" for name in table} if isinstance(worker, str) else {}
        good.append(_check_table(path, table, fields, overridden, report))
    return good


def _worker_table(worker: object) -> dict[str, Any] | None:
    match worker:
        case LocalWorker():
            return msgspec.structs.asdict(worker)
        case dict():
            return worker
        case str():
            pairs = [part.partition("=") for part in worker.split(",") if part.strip()]
            if all(equals for _, equals, _ in pairs):
                return {key.strip(): text.strip() for key, _, text in pairs}
    return None


def _add_missing(given: Mapping[str, Any], sections: dict[str, Any], report: _Mistakes, *, no_file: bool) -> None:
    """Reports required keys that are absent; a placeholder stands in, so that the remaining checks can run."""
    for field in recipe_fields():
        if field.required and field.name not in sections[field.section]:
            sections[field.section][field.name] = "absent"
            if field.key not in report.keys and not _is_given(given, field):
                advice = f"give {field.flag}" if no_file else f"write it below [{field.section}] or give {field.flag}"
                report.add(field.key, f"is missing: {advice}")


def _is_given(given: Mapping[str, Any], field: RecipeField) -> bool:
    table = given.get(field.section)
    return isinstance(table, Mapping) and field.name in table


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _explained(error: msgspec.ValidationError, field: RecipeField, value: object, *, from_flag: bool) -> str:
    """The library's sentence in the middle of ours, without its marks; for a choice between words, the words."""
    if words := choices(field.type):
        reason = field.refused.get(value) if isinstance(value, str) else None
        return f"expected {' or '.join(words)}" + (f" ({reason})" if reason else "")
    text = str(error).split(" - at `")[0].replace("`", "")
    if plain_type(field.type) is str and text.endswith((", got int", ", got float")):
        return "expected text, in quotes"
    kind = _UNQUOTED.get(plain_type(field.type))
    if kind is not None and text.endswith(", got str"):
        return f"expected {kind}" if from_flag else f"expected {kind} without quotes"
    return text[:1].lower() + text[1:]
