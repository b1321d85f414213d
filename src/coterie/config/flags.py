"""The recipe as command-line flags: `--epochs 3` overrides `epochs = 3` of the file."""

import argparse
import typing
from collections.abc import Collection

from coterie.config.fields import (
    LOCAL_WORKERS,
    RecipeField,
    choices,
    default_text,
    plain_type,
    recipe_fields,
    section_structs,
)

_DEST = "recipe:"


def add_recipe_flags(
    parser: argparse.ArgumentParser, *, sections: Collection[str] | None = None, keys: Collection[str] = ()
) -> None:
    """One flag per field, grouped by section. Values stay text: `load_recipe` checks them.

    Args:
        parser: Gets the flags.
        sections: Only the fields of these sections; by default of all.
        keys: Single fields of other sections, by dotted key.
    """
    for section, struct in section_structs().items():
        whole = sections is None or section in sections
        fields = [f for f in recipe_fields() if f.section == section and (whole or f.key in keys)]
        if not fields:
            continue
        group = parser.add_argument_group(f"[{section}]", (struct.__doc__ or "").splitlines()[0])
        for field in fields:
            _add_flag(group, field)


def overrides_from(args: argparse.Namespace) -> dict[str, object]:
    """What the flags of `add_recipe_flags` gave, by dotted key, for `load_recipe`."""
    lists = {field.key for field in recipe_fields() if _is_list(field) and field.key != LOCAL_WORKERS}
    given = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST) and value is not None
    }
    return {key: _split(value) if key in lists else value for key, value in given.items()}


def _is_list(field: RecipeField) -> bool:
    return typing.get_origin(plain_type(field.type)) is tuple


def _split(values: list[str]) -> list[str]:
    """`--cuts 3,5` is `--cuts 3 --cuts 5`."""
    return [part.strip() for value in values for part in value.split(",")]


def _add_flag(group: argparse._ArgumentGroup, field: RecipeField) -> None:
    text = f"{field.description} {default_text(field)}".replace("%", "%%").replace("`", "")
    options = plain_type(field.type)
    dest = _DEST + field.key
    if options is bool:
        group.add_argument(field.flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif _is_list(field):
        # Once per value: a flag that swallows several words would swallow the recipe's path too.
        more = "Repeatable." if field.key == LOCAL_WORKERS else "Repeatable, or with commas between values."
        group.add_argument(field.flag, dest=dest, action="append", metavar=_metavar(field), help=f"{text} {more}")
    else:
        group.add_argument(field.flag, dest=dest, metavar=_metavar(field), help=text)


def _metavar(field: RecipeField) -> str:
    words = choices(field.type)
    if words:
        return "{" + ",".join(words) + "}"
    kind = plain_type(field.type)
    if kind is int:
        return "N"
    if kind is float:
        return "X"
    return field.flag.removeprefix("--").rpartition("-")[2].upper()
