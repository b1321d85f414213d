"""The recipe's fields as a list, read from the structs once: for the reader, the flags and the reference page."""

import functools
import typing
from collections.abc import Iterator, Mapping

import msgspec

from coterie.config.recipe import Recipe

LOCAL_WORKERS = "cluster.local_workers"
"""The one field that is a list of tables."""


class RecipeField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one section.

    Attributes:
        section: Name of the section, such as `train`.
        name: Name in the TOML file.
        flag: The command line's flag, with its dashes.
        type: The annotation, with its range.
        default: The default; `msgspec.NODEFAULT` if the field is required.
        description: One or two sentences for people.
        refused: Words that people expect here, and why they are not taken (`Meta.extra["refused"]`).
    """

    section: str
    name: str
    flag: str
    type: typing.Any  # a type expression has no narrower type
    default: object
    description: str
    refused: Mapping[str, str] = {}

    @property
    def key(self) -> str:
        """The dotted name, such as `train.epochs`."""
        return f"{self.section}.{self.name}"

    @property
    def required(self) -> bool:
        """Whether the recipe must give it."""
        return self.default is msgspec.NODEFAULT


def struct_fields(struct: type[msgspec.Struct], section: str) -> Iterator[RecipeField]:
    """The fields of one section's struct, in the order they are written."""
    hints = typing.get_type_hints(struct, include_extras=True)
    for info in msgspec.structs.fields(struct):
        annotation = hints[info.name]
        meta = next(part for part in annotation.__metadata__ if isinstance(part, msgspec.Meta))
        flag = (meta.extra or {}).get("flag", info.name.replace("_", "-"))
        default = info.default_factory() if callable(info.default_factory) else info.default
        yield RecipeField(
            section=section,
            name=info.name,
            flag=f"--{flag}",
            type=annotation,
            default=default,
            description=meta.description or "",
            refused=(meta.extra or {}).get("refused", {}),
        )


@functools.cache
def section_structs() -> dict[str, type[msgspec.Struct]]:
    """The struct of each section, in the order of the file."""
    return {info.name: info.type for info in msgspec.structs.fields(Recipe)}


@functools.cache
def recipe_fields() -> tuple[RecipeField, ...]:
    """All fields of all sections."""
    return tuple(field for name, struct in section_structs().items() for field in struct_fields(struct, name))


def plain_type(annotation: object) -> object:
    """The annotation without its range and without "or nothing": `int` for `Annotated[int, …] | None`."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if len(parts) == 1 and len(typing.get_args(annotation)) == 2 and type(None) in typing.get_args(annotation):
        return plain_type(parts[0])
    return annotation


def choices(annotation: object) -> tuple[str, ...]:
    """The words a field allows, or nothing if it is not a choice between words."""
    annotation = plain_type(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return typing.cast("tuple[str, ...]", typing.get_args(annotation))
    return tuple(word for part in typing.get_args(annotation) for word in choices(part))


def default_text(field: RecipeField) -> str:
    """The default as a sentence for help and reference; empty if there is none or the description says it."""
    if field.required:
        return "Required."
    if field.default is None or field.default == ():
        return ""
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"Default: {shown}."
