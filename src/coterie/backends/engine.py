"""What a device that runs hand-written kernels must offer; the launches say which kernels a share needs.

OpenCL and WebGPU differ in how memory is reached and how a kernel is started, not in what a share computes. Both start
kernels in order and come back at once; only `download` waits.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import Activation, Array, Mask, Rotary


class Buffer:
    """Memory of a device.

    Attributes:
        handle: The driver's object.
        floats: How many numbers fit, four bytes each.
        host: The array whose memory it is, where the device works in the processor's own.
        packed: Its contents in the orders that products read, where those are kept for the next product.
        constant: Whether the contents stay as they are until the buffer is given back, so that `packed` may be filled.
    """

    __slots__ = ("constant", "floats", "handle", "host", "packed")

    def __init__(
        self, handle: Any, floats: int, host: npt.NDArray[Any] | None = None, *, constant: bool = False
    ) -> None:
        self.handle = handle
        self.floats = floats
        self.host = host
        self.constant = constant
        self.packed: dict[tuple[object, ...], Buffer] = {}


class View(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A batch of matrices in a buffer; all strides count floats.

    Attributes:
        buffer: Where.
        row: Stride of the first index.
        column: Stride of the second index.
        batch: From one row of the micro-batch to the next.
        head: From one head (or group) to the next.
        shared: How many heads in a row read the same matrix.
        fold: A summed index of `Product.fold` entries may go round several times: the stride of a round.
    """

    buffer: Buffer
    row: int
    column: int = 1
    batch: int = 0
    head: int = 0
    shared: int = 1
    fold: int = 0

    @property
    def turned(self) -> "View":
        """The transposed matrices."""
        return msgspec.structs.replace(self, row=self.column, column=self.row)


class Product(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`c = alpha * a b + bias`, or added to what `c` holds: for each row of the micro-batch and each head.

    Attributes:
        a: [rows, inner].
        b: [inner, columns].
        c: [rows, columns], its columns side by side.
        rows: Of the result.
        columns: Of the result.
        inner: The summed index.
        fold: Entries of a round of the summed index; 0 if it goes round once.
        batch: Rows of the micro-batch.
        heads: Heads (or groups).
        alpha: Factor.
        bias: One number a column.
        accumulate: Whether `c` is added to.
    """

    a: View
    b: View
    c: View
    rows: int
    columns: int
    inner: int
    fold: int = 0
    batch: int = 1
    heads: int = 1
    alpha: float = 1.0
    bias: Buffer | None = None
    accumulate: bool = False


class Positions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Cosines and sines on the device, and how they are applied.

    Attributes:
        cos: [B or 1, T, R].
        sin: The same.
        style: Which numbers make a pair.
        dims: R.
        tokens: T.
        per_row: Whether the rows of the micro-batch have their own.
    """

    cos: Buffer
    sin: Buffer
    style: Rotary
    dims: int
    tokens: int
    per_row: bool


class Heads(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch's attention between the projections.

    Attributes:
        q: [B,T,H,d].
        k: [B,T,G,d].
        v: The same.
        probabilities: [B,H,T,T], before dropout.
        rows: B.
        tokens: T.
        heads: H.
        groups: G.
        head_dim: d.
        scale: Of the scores.
        keep: Dropout's mask, if any.
        keep_scale: Its factor.
    """

    q: Buffer
    k: Buffer
    v: Buffer
    probabilities: Buffer
    rows: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    scale: float
    keep: Buffer | None
    keep_scale: float

    @property
    def scores(self) -> int:
        """How many there are."""
        return self.rows * self.heads * self.tokens**2


class Mixer(Protocol):
    """Kernels that do all of attention between the projections, a few rows of scores at a time."""

    def takes(self, heads: Heads) -> bool:
        """Whether they can do these: a row of scores may be too long."""
        ...

    def forward(self, heads: Heads, bias: Buffer | None, strides: tuple[int, int, int], inner: Buffer) -> None:
        """Fill in the probabilities, and mix values into `inner` [B,T,H,d]; the bias's strides: those of B, H, T."""
        ...

    def backward(self, heads: Heads, d_inner: Buffer, gradients: Mapping[str, Buffer]) -> None:
        """Gradients of queries, keys and values, into those of `q`, `k` and `v`."""
        ...


class Engine(Protocol):
    """A device with its kernels. `n` counts floats; rows are rows of a matrix."""

    @property
    def info(self) -> BackendInfo:
        """Where it runs."""
        ...

    @property
    def mixer(self) -> Mixer | None:
        """What does attention between the projections, where the device has better than products."""
        ...

    def take(self, n: int) -> Buffer:
        """Memory, with any contents."""
        ...

    def give(self, buffer: Buffer) -> None:
        """Give memory back; kernels that were started before may still use it."""
        ...

    def trim(self) -> None:
        """Give memory that is kept for the next launches back to the driver."""
        ...

    def upload(self, array: Array | Mask, *, constant: bool = True) -> Buffer:
        """An array on the device; it may be read in place until the buffer is given back."""
        ...

    def load(self, array: Array) -> Buffer:
        """A weight on the device; the array may change after `settle`."""
        ...

    def settle(self) -> None:
        """Wait until the arrays that were loaded are read: once for all weights, since each wait costs a wake-up."""
        ...

    def output(self, shape: tuple[int, ...]) -> Buffer:
        """Memory for a result that will be downloaded."""
        ...

    def download(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and give the contents of an `output` as an array of its own; the buffer is given back."""
        ...

    def read(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and copy the contents; the buffer is kept."""
        ...

    def product(self, product: Product) -> None:
        """Multiply."""
        ...

    def softmax(
        self, scores: Buffer, bias: Buffer | None, strides: tuple[int, int, int], sizes: tuple[int, int, int]
    ) -> None:
        """Scores [B,H,T,T] to probabilities, in place; the bias's strides are those of B, H, T; sizes are B, H, T."""
        ...

    def softmax_gradient(self, probabilities: Buffer, gradient: Buffer, tokens: int, rows: int, scale: float) -> None:
        """Gradient of probabilities [rows, tokens] to that of scores before scaling, in place."""
        ...

    def drop(self, source: Buffer, keep: Buffer, target: Buffer, n: int, scale: float) -> None:
        """`target = source * keep * scale`; `target` may be `source`."""
        ...

    def add(self, target: Buffer, source: Buffer, n: int) -> None:
        """`target += source`."""
        ...

    def column_sums(self, source: Buffer, target: Buffer, rows: int, columns: int) -> None:
        """Sum a matrix over its rows."""
        ...

    def turn(self, target: Buffer, positions: Positions, rows: int, heads: int, head_dim: int, *, back: bool) -> None:
        """Turn [rows, heads * head_dim] by positions, in place; `back`: the transposed map, for gradients."""
        ...

    def activate(self, kind: Activation, up: Buffer, gate: Buffer | None, target: Buffer, n: int) -> None:
        """`act(up)`, or `act(gate) * up`."""
        ...

    def activate_gradient(
        self, kind: Activation, values: tuple[Buffer, Buffer | None], gradients: tuple[Buffer, Buffer | None], n: int
    ) -> None:
        """Of up and gate: the first gradient holds that of the result, and becomes that of `up`."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
