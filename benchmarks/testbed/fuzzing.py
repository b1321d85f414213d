"""Makes valid frames and control messages, and spoils them where it hurts: in structure as well as in bytes.

Every choice is drawn from a `random.Random`, so that a seed repeats it. What a message looks like is read off its
class: one that is added to the union is fuzzed without a word here.
"""

import math
import random
import typing

import msgspec
import torch
from msgspec import inspect

from coterie.cluster.messages import CONTROL, AnyMessage
from coterie.tensors.codecs import encode
from coterie.transport.limits import ITEM_BYTES, LOSSY_DTYPES, wire_bytes
from coterie.transport.wire import MAGIC, PREAMBLE, WIRE_VERSION

Tree = typing.Any  # what msgpack can say
CODECS = ("raw", "fp16", "int8", "int4")
KINDS = (CONTROL, "hidden", "gradient", "weights", "state", "replica", "batch", "done", "tied", "no such kind")
WORDS = ("", "a", "phone", "coordinator", "param/x", "../../etc/passwd", "\x00", "é\u202e", "x" * 300)
INTEGERS = (0, 1, 2, 7, 255, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -1, -(1 << 63))
FLOATS = (0.0, -0.0, 1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf)
MESSAGES = typing.get_args(AnyMessage)
TYPES = {kind: inspect.type_info(kind) for kind in MESSAGES}


def nasty(draw: random.Random) -> Tree:
    """A value that does not belong anywhere."""
    deep: Tree = 0
    for _ in range(draw.choice((5, 600))):
        deep = [deep]
    values: tuple[Tree, ...] = (
        None,
        True,
        "",
        "x" * 5000,
        b"",
        b"\xff" * 300,
        b"\x80\x04.",
        [],
        {},
        [[]],
        {"": {}},
        {1: 2},
        deep,
    )
    huge = ((1 << 64) - 1, (1 << 62) + 3, 1 << 40)
    return draw.choice((*values, *huge, *INTEGERS, *FLOATS, *WORDS, list(range(200)), [0, 1 << 62, 1 << 62]))


def value_of(kind: inspect.Type, draw: random.Random) -> Tree:
    """Some value of a type, as msgpack says it."""
    value: Tree
    match kind:
        case inspect.StructType():
            value = {field.encode_name: value_of(field.type, draw) for field in kind.fields}
            if kind.tag is not None:
                value[kind.tag_field] = kind.tag
        case inspect.VarTupleType() | inspect.ListType() | inspect.FrozenSetType() | inspect.SetType():
            value = [value_of(kind.item_type, draw) for _ in range(draw.randrange(3))]
        case inspect.TupleType():
            value = [value_of(item, draw) for item in kind.item_types]
        case inspect.DictType():
            value = {value_of(kind.key_type, draw): value_of(kind.value_type, draw) for _ in range(draw.randrange(3))}
        case inspect.UnionType():
            value = value_of(draw.choice(kind.types), draw)
        case inspect.LiteralType():
            value = draw.choice(kind.values)
        case _:
            value = _plain(kind, draw)
    return value


def _plain(kind: inspect.Type, draw: random.Random) -> Tree:
    match kind:
        case inspect.IntType(ge=low):
            return draw.choice([value for value in INTEGERS if low is None or value >= low])
        case inspect.FloatType():
            return draw.choice(FLOATS)
        case inspect.StrType():
            return draw.choice(WORDS)
        case inspect.BytesType():
            return draw.randbytes(draw.randrange(40))
        case inspect.BoolType() | inspect.NoneType():
            return draw.random() < 0.5 if isinstance(kind, inspect.BoolType) else None
    raise NotImplementedError(f"a message holds a {kind}: say here what values it has")


def message_tree(draw: random.Random) -> Tree:
    """A control message with a value in every field."""
    return value_of(TYPES[draw.choice(MESSAGES)], draw)


def header_tree(draw: random.Random) -> tuple[Tree, bytes]:
    """A frame's header and the bytes of its tensors."""
    header: Tree = {"kind": draw.choice(KINDS)}
    if header["kind"] == CONTROL:
        header["body"] = msgspec.msgpack.encode(message_tree(draw))
    for name in ("source", "target", "run"):
        header[name] = draw.choice(WORDS)
    for name in ("plan_version", "step", "micro_batch"):
        header[name] = draw.choice(INTEGERS)
    specs, payload = [], b""
    for number in range(draw.randrange(4)):
        dtype = draw.choice(list(ITEM_BYTES))
        shape = tuple(draw.randrange(5) for _ in range(draw.randrange(4)))
        codec = draw.choice(CODECS) if dtype in LOSSY_DTYPES else "raw"
        spec, buffer = encode(torch.ones(shape, dtype=getattr(torch, dtype)), f"t{number}", codec)  # type: ignore[arg-type]
        specs.append(msgspec.to_builtins(spec))
        payload += bytes(buffer)
    if draw.random() < 0.2:
        specs.append(_consistent_lie(draw))
    header["tensors"] = specs
    return header, payload


def _consistent_lie(draw: random.Random) -> Tree:
    """A tensor that takes no bytes, or a few that do not come, and whose size does follow from its absurd shape."""
    dtype, codec = draw.choice(("float32", "bfloat16")), draw.choice(CODECS)
    sizes = (0, 0, 1, 3, 2000, 1 << 31, 1 << 40, 1 << 62, 1 << 63)
    shape = tuple(draw.choice(sizes) for _ in range(draw.randrange(6)))
    nbytes = wire_bytes(dtype, shape, codec)
    return {"name": "lie", "dtype": dtype, "shape": shape, "nbytes": min(nbytes, (1 << 64) - 1), "codec": codec}


def spoilt_tree(tree: Tree, draw: random.Random) -> Tree:
    """The same with one thing in it replaced, taken away or added."""
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        name = draw.choice(list(tree))
        how = draw.random()
        if how < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        if how < 0.2:
            return {**tree, draw.choice(WORDS): nasty(draw)}
        return {**tree, name: spoilt_tree(tree[name], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        at = draw.randrange(len(tree))
        return [*tree[:at], spoilt_tree(tree[at], draw), *tree[at + draw.choice((0, 1, 1, 1)) :]]
    return nasty(draw)


def spoilt_bytes(data: bytes, draw: random.Random) -> bytes:
    """The same with bytes flipped, cut out, doubled, moved or added."""
    at = draw.randrange(len(data) + 1)
    size = draw.choice((1, 1, 4, 17, 200))
    piece = data[at : at + size]
    match draw.randrange(6):
        case 0:
            return data[:at] + draw.randbytes(len(piece)) + data[at + size :]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + piece + data[at:]
        case 3:
            return data[at:] + data[:at]
        case 4:
            return data[:at] + draw.randbytes(size) + data[at:]
    return data[:at]


def framed(header: bytes, payload: bytes, draw: random.Random) -> bytes:
    """A preamble before them, which now and then says something else."""
    fields = [MAGIC, WIRE_VERSION, 0, len(header), len(payload)]
    if draw.random() < 0.15:
        at = draw.randrange(1, 5)
        largest = (None, 0xFFFF, 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF)[at]
        assert largest is not None
        fields[at] = draw.choice((0, 1, len(header) + 1, len(payload) + 1, largest, largest // 2)) & largest
    return PREAMBLE.pack(*fields) + header + payload


def stream(draw: random.Random) -> bytes:
    """A few frames in a row, spoilt in most cases."""
    parts = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        header, payload = header_tree(draw)
        while draw.random() < 0.6:
            header = spoilt_tree(header, draw)
        while draw.random() < 0.1:
            payload = spoilt_bytes(payload, draw)
        try:
            packed = msgspec.msgpack.encode(header)
        except (msgspec.MsgspecError, OverflowError, RecursionError):  # no msgpack for this: an int of 65 bits
            packed = draw.randbytes(30)
        while draw.random() < 0.2:
            packed = spoilt_bytes(packed, draw)
        parts.append(framed(packed, payload, draw))
    whole = b"".join(parts)
    while draw.random() < 0.2:
        whole = spoilt_bytes(whole, draw)
    return whole


def spoilt_message(draw: random.Random) -> bytes:
    """The body of a control frame, spoilt in most cases."""
    tree = message_tree(draw)
    while draw.random() < 0.6:
        tree = spoilt_tree(tree, draw)
    try:
        data = msgspec.msgpack.encode(tree)
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        data = draw.randbytes(30)
    while draw.random() < 0.2:
        data = spoilt_bytes(data, draw)
    return data
