"""The feed-forward part of a block in shares: what stands in the places of its modules' forwards."""

from torch import Tensor

from coterie.backends.shares import Array, NeuronInputs
from coterie.heads.effective import WeightVersion
from coterie.heads.layout import NeuronLayout
from coterie.heads.replaced import Replaced, can_be_shared
from coterie.heads.split_function import SplitCall, SplitLayer


class SplitNeurons:
    """Computes a block's neurons in shares.

    A gated part is one module, whose forward is replaced whole. Without a gate families call three modules one after
    another from different places: the first then gives the sum of all parts, which the activation lets pass and to
    which the second adds its bias. Each knows that sum by its identity, and computes as ever whatever else it is given.

    Args:
        layout: Where they are.
        layer: Who computes what.
    """

    def __init__(self, layout: NeuronLayout, layer: SplitLayer) -> None:
        self._layout = layout
        self._layer = layer
        self._pending: tuple[Tensor, Tensor | None] | None = None
        if layout.core is not None:
            self._core = Replaced(layout.core, self._whole)
            self._replaced: tuple[Replaced, ...] = (self._core,)
        else:
            self._core = Replaced(layout.first, self._first)
            self._activation = Replaced(layout.activation, self._pass)
            self._second = Replaced(layout.second.module, self._project)
            self._replaced = (self._core, self._activation, self._second)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """What is to be put in place."""
        return self._replaced

    def _whole(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not can_be_shared(hidden):
            return self._core.own(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        return self._completed(*self._computed(hidden))

    def _first(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not can_be_shared(hidden):
            return self._core.own(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        self._pending = self._computed(hidden)
        return self._pending[0]

    def _pass(self, *args: object, **kwargs: object) -> object:
        if self._pending is not None and args and args[0] is self._pending[0]:
            return args[0]
        return self._activation.own(*args, **kwargs)

    def _project(self, *args: object, **kwargs: object) -> object:
        pending, self._pending = self._pending, None
        if pending is None or not args or args[0] is not pending[0]:
            return self._second.own(*args, **kwargs)
        return self._completed(*pending)

    def _computed(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Summed parts and what goes into the second product, for [B,T,D] or [N,D]."""
        rows = hidden if hidden.ndim == 3 else hidden[None]
        y, inner = self._layer(self._call(rows))
        if rows is hidden:
            return y, inner
        return y[0], None if inner is None else inner[0]

    def _completed(self, y: Tensor, inner: Tensor | None) -> Tensor:
        second = self._layout.second
        bias = second.bias()
        if bias is not None:
            y = y + bias
        added = None if inner is None else second.added(inner)
        return y if added is None else y + added

    def _call(self, hidden: Tensor) -> SplitCall:
        layout, shape = self._layout, self._layout.shape
        weights = dict(zip(("wg", "w1") if shape.gated else ("w1",), layout.firsts.weights(), strict=True))
        if shape.biased:
            weights |= zip(("bg", "b1") if shape.gated else ("b1",), layout.firsts.biases(), strict=True)
        weights["w2"] = layout.second.weight()
        added = dict(zip(("gate", "up") if shape.gated else ("up",), layout.firsts.added(hidden), strict=True))

        def make_inputs(x: Array, added: dict[str, Array]) -> NeuronInputs:
            return NeuronInputs(x=x, added=added)

        return SplitCall(
            x=hidden,
            weights=weights,
            version=WeightVersion([*layout.firsts.sources(), *layout.second.sources()]),
            added={name: one for name, one in added.items() if one is not None},
            make_inputs=make_inputs,
            inner=layout.second.is_adapted,
        )
