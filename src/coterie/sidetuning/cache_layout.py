"""What a cache of activations holds, and for what it was made: written once, compared whenever the folder is opened."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from coterie.checkpoint.durable import sync_folder, write_file
from coterie.errors import ActivationCacheError
from coterie.jobs.side_spec import UploadDtype
from coterie.sidetuning.cached_rows import RowCoder

LAYOUT = "layout.json"
NO_QUOTA_BYTES = 1 << 62
"""A cache that may take whatever there is room for."""
FORMAT_VERSION = 1
"""Raised when an older program could misread what a newer one writes."""


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and type of what is stored, and what it depends on.

    Attributes:
        layers: The tapped layers, ascending.
        width: Width D of the backbone.
        dtype: Type that the activations are stored in.
        key: All else that the activations depend on, by name: digests of the weights and of the data, the truncation,
            which tokens are selected. A cache is used again only if all of it is the same. Data that may grow do not
            belong here but into `ActivationCache.collection`.
    """

    layers: tuple[int, ...]
    width: int
    dtype: UploadDtype
    key: dict[str, str]

    @property
    def coder(self) -> RowCoder:
        """What turns positions into bytes and back."""
        return RowCoder(len(self.layers), self.width, self.dtype)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the activations of so many selected tokens."""
        return tokens * self.coder.row_bytes


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the layout and a hash of its exact bytes."""

    format_version: int
    sha256: str
    layout: msgspec.Raw


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    """The one field that every version of the format has."""

    format_version: int


def settle_layout(folder: Path, layout: CacheLayout) -> None:
    """Write the layout into a new folder, or compare it with the one there.

    Raises:
        ActivationCacheError: The folder's cache was made for something else, by a newer program, or is damaged.
    """
    path = folder / LAYOUT
    if path.exists():
        refuse_other(folder, _read(path), layout)
        return
    body = msgspec.json.encode(layout, order="deterministic")
    sealed = _Sealed(format_version=FORMAT_VERSION, sha256=hashlib.sha256(body).hexdigest(), layout=msgspec.Raw(body))
    partial = path.with_suffix(".partial")
    write_file(partial, msgspec.json.encode(sealed))
    partial.replace(path)
    sync_folder(folder)


def refuse_other(folder: Path, there: CacheLayout, wanted: CacheLayout) -> None:
    """Refuse a cache that was made for something else than wanted.

    Raises:
        ActivationCacheError: With all that differs.
    """
    if differences := list(_differences(there, wanted)):
        raise ActivationCacheError(
            f"the cache in {folder} was made for something else: {'; '.join(differences)}",
            hint="choose another folder for this run's cache, or delete that one if nothing needs it",
        )


def _differences(there: CacheLayout, wanted: CacheLayout) -> Iterator[str]:
    if there.layers != wanted.layers:
        yield f"it holds layers {_listed(there.layers)}, this run needs {_listed(wanted.layers)}"
    if there.width != wanted.width:
        yield f"width {there.width} there, {wanted.width} here"
    if there.dtype != wanted.dtype:
        yield f"stored as {there.dtype} there, as {wanted.dtype} here"
    for name in sorted(there.key.keys() | wanted.key.keys()):
        values = [_shown(key.get(name)) for key in (there.key, wanted.key)]
        if there.key.get(name) != wanted.key.get(name):
            yield f"{name} is {values[0]} there, {values[1]} here"


def _shown(value: str | None) -> str:
    """A value as people read it; digests shortened."""
    if value is None:
        return "not given"
    return value if len(value) <= 40 else f"{value[:12]}…"


def _listed(layers: tuple[int, ...]) -> str:
    if len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers)) or "none"


def _read(path: Path) -> CacheLayout:
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise ActivationCacheError(
                f"the cache in {path.parent} has format version {version}; this program reads up to version "
                f"{FORMAT_VERSION}",
                hint="use the version of coterie that made it, or a newer one",
            )
        sealed = msgspec.json.decode(data, type=_Sealed)
        if hashlib.sha256(sealed.layout).hexdigest() == sealed.sha256:
            return msgspec.json.decode(sealed.layout, type=CacheLayout)
        problem = "its hash does not match"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = str(error)
    raise ActivationCacheError(
        f"{path} is damaged ({problem}), so what the cache beside it holds is not known",
        hint="delete the folder and collect again",
    )
