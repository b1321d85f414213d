"""A layer's part computed in shares by several backends, as one operation of torch's autograd."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from coterie.backends.shares import Array, Inputs, Need, Shape
from coterie.heads.dealing import joined, part_inner, part_inputs, part_shape, part_weights
from coterie.heads.effective import WeightVersion
from coterie.heads.part_job import PartJob
from coterie.heads.pool import BackendPool, PartSaved
from coterie.planner.head_allocation import PartShare


class SplitCall(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One micro-batch of a split layer.

    Attributes:
        x: [B,T,D].
        weights: The whole layer's, by the names that its shape lists.
        version: Of the parameters that the weights are made of.
        added: What is added to the first projections, by name.
        make_inputs: The backends' inputs, of x and `added`.
        inner: Whether what goes into the second product is wanted too.
        has_backward: Whether there will be one.
    """

    x: Tensor
    weights: dict[str, Tensor]
    version: WeightVersion
    added: dict[str, Tensor]
    make_inputs: Callable[[Array, dict[str, Array]], Inputs]
    inner: bool = False
    has_backward: bool = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that may need a gradient."""
        return (self.x, *self.weights.values(), *self.added.values())


class SplitLayer:
    """The heads or the neurons of one block, dealt out.

    Args:
        pool: Where the backends are.
        shape: All heads, or all neurons.
        shares: Who computes how many of them, in order; together all.
    """

    def __init__(self, pool: BackendPool, shape: Shape, shares: Sequence[PartShare]) -> None:
        self.pool = pool
        self.shape = shape
        self._shares = tuple(shares)
        stops = list(itertools.accumulate(share.count for share in shares))
        self.parts = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def __call__(self, call: SplitCall) -> tuple[Tensor, Tensor | None]:
        """The sum of all parts [B,T,E], and what goes into the second product [B,T,n] if wanted."""
        has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
        call = msgspec.structs.replace(call, has_backward=has_backward)
        result: tuple[Tensor, Tensor | None] = _Split.apply(self, call, *call.tensors)  # type: ignore[no-untyped-call] # torch's
        return result

    def jobs(self, call: SplitCall, *, keep: bool) -> list[PartJob]:
        """What each backend is to do."""
        inputs = call.make_inputs(_array(call.x), {name: _array(tensor) for name, tensor in call.added.items()})
        whole = {name: tensor.detach() for name, tensor in call.weights.items()}
        alone = len(self.parts) == 1
        return [
            PartJob(
                backend=share.backend,
                shape=part_shape(self.shape, share.count),
                weights=_PartWeights(self.shape, whole, part),
                slot=(id(self), part.start),
                version=call.version,
                inputs=inputs if alone else part_inputs(self.shape, inputs, part),
                strategy=share.strategy,
                inner=call.inner,
                keep=keep,
            )
            for share, part in zip(self._shares, self.parts, strict=True)
        ]


class _PartWeights(Mapping[str, Array]):
    """A part's weights, cut out when a backend first asks for them: it may have them already."""

    def __init__(self, shape: Shape, whole: dict[str, Tensor], part: range) -> None:
        self._shape = shape
        self._whole = whole
        self._part = part
        self._cut: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._cut:
            array = self._whole[name].to("cpu").numpy()
            own = part_weights(self._shape, {name: array}, self._part)[name]
            self._cut[name] = np.ascontiguousarray(own)
        return self._cut[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


class _Names(NamedTuple):
    """Which tensors an operation was given, after x."""

    weights: tuple[str, ...]
    added: tuple[str, ...]


class _Split(torch.autograd.Function):
    """Runs a layer's parts. What backends keep hangs on a saved tensor: recomputation can drop and remake it."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, layer: SplitLayer, call: SplitCall, *_tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `SplitLayer.__call__`."""
        ctx.layer = layer  # type: ignore[attr-defined] # torch's way to hand things to backward
        ctx.names = _Names(tuple(call.weights), tuple(call.added))  # type: ignore[attr-defined] # as above
        results = layer.pool.run_forward(layer.jobs(call, keep=call.has_backward))
        held = _Held(layer.pool, [part for _, part in results])
        ctx.save_for_backward(held.token())
        device = call.x.device
        y = _tensor(sum_parts([outputs.y for outputs, _ in results]), device)
        inners = [outputs.inner for outputs, _ in results if outputs.inner is not None]
        return y, _tensor(np.concatenate(inners, -1), device) if call.inner else None

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor, inner_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, the weights and what was added; only those that somebody needs."""
        layer: SplitLayer = ctx.layer  # type: ignore[attr-defined] # see forward
        names: _Names = ctx.names  # type: ignore[attr-defined] # see forward
        needs: tuple[bool, ...] = ctx.needs_input_grad[2:]  # type: ignore[attr-defined] # torch's own
        (token,) = ctx.saved_tensors  # type: ignore[attr-defined] # torch's own
        parts = _HELD[int(token.item())].take()  # the token must live until here
        weights_end = 1 + len(names.weights)
        need = Need(x=needs[0], weights=any(needs[1:weights_end]), added=any(needs[weights_end:]))
        inner = None if inner_gradient is None else _array(inner_gradient)
        inners = [None if inner is None else part_inner(layer.shape, inner, part) for part in layer.parts]
        found = layer.pool.run_backward(parts, _array(gradient), need, inners)
        xs = [grads.x for grads in found if grads.x is not None]
        weights = join_weights(layer.pool, [grads.weights for grads in found])
        added = joined([grads.added for grads in found])
        arrays = [
            sum_parts(xs) if need.x else None,
            *(weights[name] if need.weights else None for name in names.weights),
            *(added[name] if need.added else None for name in names.added),
        ]
        device = gradient.device
        wanted = (
            _tensor(array, device) if needed and array is not None else None
            for array, needed in zip(arrays, needs, strict=True)
        )
        return None, None, *wanted


class _Token(np.ndarray[tuple[int], np.dtype[np.int64]]):
    """A number that keeps what it stands for alive, as long as any tensor shares its memory."""

    held: "_Held"


class _Held:
    """What backends keep of one forward; given back when no saved tensor stands for it any more.

    Non-reentrant recomputation drops the tensors that a forward saves, and gives backward those of another forward.
    Only what hangs on a saved tensor goes with it, so this does, and not on the operation's context.
    """

    def __init__(self, pool: BackendPool, parts: list[PartSaved]) -> None:
        self._pool = pool
        self._parts: list[PartSaved] | None = parts

    def token(self) -> Tensor:
        """A tensor that stands for it."""
        number = next(_NUMBERS)
        _HELD[number] = self
        token = np.array([number], np.int64).view(_Token)
        token.held = self
        return torch.from_numpy(token)

    def take(self) -> list[PartSaved]:
        """The parts, for their one backward."""
        parts, self._parts = self._parts, None
        if parts is None:
            raise RuntimeError("a split layer has one backward for each forward")
        return parts

    def __del__(self) -> None:
        if self._parts:
            self._pool.drop(self._parts)


_HELD: "weakref.WeakValueDictionary[int, _Held]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().to("cpu").contiguous().numpy()
    return array


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def join_weights(pool: BackendPool, parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Weights' gradients of all parts, every other one of them in a thread: megabytes, while the backends are idle."""
    names = list(parts[0])
    if len(parts) == 1 or not names:
        return joined(parts)
    helped = pool.beside(lambda: joined([{name: part[name] for name in names[1::2]} for part in parts]))
    own = joined([{name: part[name] for name in names[::2]} for part in parts])
    return own | helped.result()


def sum_parts(parts: Sequence[Array]) -> Array:
    """In the parts' order, so that it is the same each time; in the first one's memory, if it may be written to."""
    if len(parts) == 1:
        return parts[0]
    total = np.add(parts[0], parts[1], out=parts[0] if parts[0].flags.writeable else None)
    for part in parts[2:]:
        total += part
    return total
