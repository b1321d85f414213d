"""A GGUF file (llama.cpp's format): its metadata, its list of tensors, and single tensors as float32.

The header is parsed here because the readers of `gguf` and transformers either take seconds per 50,000 tokens of the
vocabulary or know fewer types; values are unpacked by `gguf`. Every length is checked against the file's size first.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from coterie.errors import ModelError, UnsupportedModelError

MetadataValue = int | float | bool | str | list["MetadataValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEEPEST_ARRAY = 2
_MOST_DIMENSIONS = 4
_DAMAGED = "download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor is in the file.

    Attributes:
        shape: In torch's order.
        kind: ggml's number for how its values are stored.
        offset_bytes: From the beginning of the file.
        nbytes: What it takes there.
    """

    shape: tuple[int, ...]
    kind: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A GGUF file, its header read.

    Attributes:
        path: The file.
        architecture: llama.cpp's name of the model's family.
        metadata: Settings under llama.cpp's keys; of a list of texts (the vocabulary) only the length.
        tensors: By llama.cpp's names.
    """

    path: Path
    architecture: str
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]

    def read(self, name: str) -> torch.Tensor:
        """One tensor as float32, unpacked, in memory of its own.

        Raises:
            ModelError: The file is cut off or cannot be read.
            UnsupportedModelError: Its values are stored in a way that `gguf` cannot unpack.
        """
        import numpy as np  # noqa: PLC0415 - beside its use, as the next one
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape  # noqa: PLC0415 - only for GGUF files
        from gguf.quants import dequantize  # noqa: PLC0415 - as above

        tensor = self.tensors[name]
        packed = np.empty(tensor.nbytes, dtype=np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.offset_bytes)
                got_bytes = file.readinto(packed.data)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error}", hint=_DAMAGED) from error
        if got_bytes != tensor.nbytes:
            raise ModelError(f"{self.path} ends within {name}", hint=_DAMAGED)
        kind = GGMLQuantizationType(tensor.kind)
        rows = packed.reshape(quant_shape_to_byte_shape(tensor.shape, kind))
        try:
            values = dequantize(rows, kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{name} in {self.path} is stored as {kind.name}, which cannot be unpacked",
                hint="use a file of another kind, such as Q8_0, Q4_K_M or F16",
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape))

    @property
    def kinds(self) -> tuple[str, ...]:
        """How its weights are stored, by ggml's names, without the vectors that are always float32."""
        from gguf import GGMLQuantizationType  # noqa: PLC0415 - only for GGUF files

        return tuple(
            sorted(
                {GGMLQuantizationType(tensor.kind).name for tensor in self.tensors.values() if len(tensor.shape) > 1}
            )
        )


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header; its tensors stay on the disk.

    Raises:
        ModelError: It is damaged, cut off, or no GGUF file.
        UnsupportedModelError: It is of an unknown version or one of several parts.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _parse(_Cursor(mapped, path), path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}", hint=_DAMAGED) from error


class _Bytes(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> bytes: ...


class _Cursor:
    """Reads little-endian values one after the other; never past the end."""

    def __init__(self, blob: _Bytes, path: Path) -> None:
        self._blob = blob
        self._path = path
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.position + count
        if end > len(self._blob):
            raise ModelError(f"{self._path} ends within its header", hint=_DAMAGED)
        taken = self._blob[self.position : end]
        self.position = end
        return taken

    def number(self, layout: str) -> int:
        """One whole number."""
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        assert isinstance(value, int)
        return value

    def text(self) -> str:
        """A length and as many bytes of UTF-8."""
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> MetadataValue:
        """A metadata value of a kind."""
        if kind in _SCALARS:
            (value,) = struct.unpack(_SCALARS[kind], self.take(struct.calcsize(_SCALARS[kind])))
            scalar: MetadataValue = value
            return scalar
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= _DEEPEST_ARRAY:
            raise ModelError(f"{self._path} holds a metadata value of the unknown kind {kind}", hint=_DAMAGED)
        of_kind, count = self.number("<I"), self.number("<Q")
        if of_kind in _SCALARS:
            layout = f"<{count}{_SCALARS[of_kind][1]}"
            if count > len(self._blob):  # before `calcsize` multiplies it
                raise ModelError(f"{self._path} ends within its header", hint=_DAMAGED)
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        if of_kind == _STRING:
            self.skip_texts(count)
            return count
        return [self.value(of_kind, depth + 1) for _ in range(count)]

    def skip_texts(self, count: int) -> None:
        """Go past texts without reading them: there may be hundreds of thousands."""
        size, position = len(self._blob), self.position
        for _ in range(count):
            if position + 8 > size:
                raise ModelError(f"{self._path} ends within its header", hint=_DAMAGED)
            position += 8 + int.from_bytes(self._blob[position : position + 8], "little")
        self.position = position


def _parse(cursor: _Cursor, path: Path) -> GgufFile:
    if cursor.take(4) != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file", hint="give a file that llama.cpp can read")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(f"{path} is of GGUF version {version}", hint="convert it to version 3")
    tensor_count, value_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("<I"))
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path} does not say which architecture it is of", hint=_DAMAGED)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts", hint="join them with llama.cpp's `llama-gguf-split --merge`"
        )
    table = [_tensor_entry(cursor, path) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelError(f"{path} says that its tensors are aligned to {alignment}", hint=_DAMAGED)
    start = -(-cursor.position // alignment) * alignment
    return GgufFile(
        path=path,
        architecture=architecture,
        metadata=metadata,
        tensors={name: _placed(shape, kind, start + offset, path) for name, shape, kind, offset in table},
    )


def _tensor_entry(cursor: _Cursor, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dimensions = cursor.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise ModelError(f"{name} in {path} has {dimensions} dimensions", hint=_DAMAGED)
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _placed(shape: tuple[int, ...], kind: int, offset_bytes: int, path: Path) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - only for GGUF files

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise UnsupportedModelError(
            f"{path} holds tensors of ggml's type {kind}, which `gguf` does not know", hint="update `gguf`"
        ) from None
    if block > 1 and (not shape or shape[-1] % block):
        raise ModelError(f"{path} holds a tensor of shape {shape} in blocks of {block} values", hint=_DAMAGED)
    nbytes = prod(shape) // block * block_bytes
    if offset_bytes + nbytes > path.stat().st_size:
        raise ModelError(f"{path} is shorter than its list of tensors says", hint=_DAMAGED)
    return GgufTensor(shape=shape, kind=kind, offset_bytes=offset_bytes, nbytes=nbytes)
