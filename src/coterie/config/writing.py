"""Writes a recipe as TOML: the run folder keeps the one that was in effect, flags included."""

import json

import msgspec

from coterie.config.recipe import LocalWorker, Recipe

_HEAD = "# The recipe in effect: the file and the flags of the run, with every default written out.\n"


def recipe_to_toml(recipe: Recipe) -> str:
    """`recipe` as a TOML file that `load_recipe` reads back to an equal recipe."""
    parts = [_HEAD]
    workers: tuple[LocalWorker, ...] = recipe.cluster.local_workers
    for name in recipe.__struct_fields__:
        section = getattr(recipe, name)
        parts.append(f"\n[{name}]\n" + toml_table(section, leave_out="local_workers"))
    parts.extend("\n[[cluster.local_workers]]\n" + toml_table(worker) for worker in workers)
    return "".join(parts)


def toml_table(struct: msgspec.Struct, defaults: msgspec.Struct | None = None, *, leave_out: str = "") -> str:
    """The keys of a table, a line each; without those that are as in `defaults`, if it is given."""
    values = {name: getattr(struct, name) for name in struct.__struct_fields__ if name != leave_out}
    if defaults is not None:
        values = {name: value for name, value in values.items() if value != getattr(defaults, name)}
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items() if value is not None)


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case _:
            # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
