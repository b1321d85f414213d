"""One unit's trained state as one safetensors file: `param/<name>` and `optim/<name>/<field>`.

Files are written piece by piece, straight from the tensors, while they are hashed: a copy of a unit's state (for BERT's
embedding 280 MB) would break the memory budget of the small device that writes it.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coterie.checkpoint.durable import sync_file
from coterie.errors import ProtocolError
from coterie.transport.frame import Buffer

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to shape: what one unit's file must hold, no more and no less."""

OptimizerState = Mapping[str, Mapping[str, Tensor]]
"""Parameter name to the optimizer's tensors for it, such as `exp_avg`, `exp_avg_sq`, `step`."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_FIELDS = 4  # AdamW with amsgrad has four: no optimizer in use has more
_MAX_ITEM_BYTES = 8
_MAX_HEADER_BYTES = 16 * 1024**2

Found = Mapping[str, tuple[str, tuple[int, ...]]]
"""Key to (safetensors dtype, shape), as a file or a set of tensors has them."""


class _HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def join_state(parameters: Mapping[str, Tensor], optimizer_state: OptimizerState) -> dict[str, Tensor]:
    """One flat mapping of a unit's tensors, by the keys used in files and on the wire."""
    tensors = {f"param/{name}": tensor for name, tensor in parameters.items()}
    for name, fields in optimizer_state.items():
        tensors.update({f"optim/{name}/{field}": tensor for field, tensor in fields.items()})
    return tensors


def split_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The inverse of `join_state`.

    Raises:
        ProtocolError: A key is neither `param/<name>` nor `optim/<name>/<field>`.
    """
    parameters: dict[str, Tensor] = {}
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, field = split_key(key)
        if field is None:
            parameters[name] = tensor
        else:
            optimizer_state.setdefault(name, {})[field] = tensor
    return parameters, optimizer_state


def split_key(key: str) -> tuple[str, str | None]:
    """(parameter name, optimizer field or None) of a key.

    Raises:
        ProtocolError: The key is neither `param/<name>` nor `optim/<name>/<field>`.
    """
    kind, _, rest = key.partition("/")
    name, _, field = rest.rpartition("/")
    if kind == "param" and rest:
        return rest, None
    if kind == "optim" and name and _FIELD.fullmatch(field):
        return name, field
    raise ProtocolError(f"a shard holds a tensor named {key[:200]!r}, which is neither a parameter nor its state")


def check_tensors(unit: int, found: Found, expected: Shapes) -> None:
    """Refuse a unit's tensors unless they are exactly the expected parameters and plausible optimizer state.

    Raises:
        ProtocolError: A parameter is missing, unknown, or has another shape or a type that is not trained.
    """
    fields: dict[str, int] = {}
    missing = set(expected)
    for key, (dtype, shape) in found.items():
        name, field = split_key(key)
        if name not in expected:
            raise ProtocolError(f"unit {unit}: the shard holds {name[:200]!r}, which is not a trained parameter of it")
        want = expected[name]
        if field is None:
            missing.discard(name)
            fits = shape == want and dtype in _FLOATS
        else:
            fields[name] = fields.get(name, 0) + 1
            fits = (shape == want or prod(shape) == 1) and dtype in _DTYPES.values()
        if not fits:
            raise ProtocolError(f"unit {unit}: {key} has shape {shape} and type {dtype}; the parameter has {want}")
        if fields.get(name, 0) > _MAX_FIELDS:
            raise ProtocolError(f"unit {unit}: {name} has more than {_MAX_FIELDS} optimizer tensors")
    if missing:
        names = ", ".join(sorted(missing)[:5])
        raise ProtocolError(f"unit {unit}: the shard lacks {len(missing)} parameters: {names}")


def largest_file_bytes(expected: Shapes) -> int:
    """No correct file of a unit with these parameters is larger."""
    return _MAX_HEADER_BYTES + sum(prod(shape) for shape in expected.values()) * _MAX_ITEM_BYTES * (1 + _MAX_FIELDS)


def found_in(tensors: Mapping[str, Tensor]) -> Found:
    """Types and shapes of tensors in memory, for `check_tensors`."""
    return {key: (_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)) for key, tensor in tensors.items()}


def found_in_file(path: Path) -> Found:
    """Types and shapes of the tensors of a file, whose whole header safetensors checks.

    Raises:
        ProtocolError: The file is not a well-formed safetensors file.
    """
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}
    except SafetensorError as error:
        raise ProtocolError(f"a received shard is not a safetensors file: {error}") from error


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """The bytes of a safetensors file of `tensors`, one piece a tensor, none of them copied if on the CPU."""
    # The widest types first, as the format asks, so that every tensor in the file is aligned to its own width.
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, _HeaderEntry] = {}
    end = 0
    for key in order:
        tensor = tensors[key]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = _HeaderEntry(_DTYPES[tensor.dtype], tuple(tensor.shape), (start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in order:
        flat = tensors[key].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the file that a unit's tensors would be: of their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for piece in pieces(tensors):
        digest.update(piece)
    return digest.hexdigest()


def write_pieces(path: Path, data: Iterable[Buffer], limit_bytes: int) -> tuple[str, int]:
    """Write a file piece by piece and put it onto the disk; returns its SHA-256 and its size.

    Raises:
        ProtocolError: The pieces exceed `limit_bytes`.
        OSError: The file system refuses.
    """
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("wb", buffering=0) as file:
        for piece in data:
            view = memoryview(piece)
            nbytes += view.nbytes
            if nbytes > limit_bytes:
                raise ProtocolError(f"a received shard is larger than the {limit_bytes} bytes that its unit can need")
            digest.update(view)
            while view.nbytes:  # an unbuffered write may stop early, at 2 GiB or at a full disk
                view = view[file.write(view) :]
        sync_file(file.fileno())
    return digest.hexdigest(), nbytes


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
