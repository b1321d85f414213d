"""The weights that a block's linear layers have now, as tensors under autograd, and what LoRA adds to their results."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.models.adapters import is_transposed
from coterie.models.frozen_linear import FrozenLinear

Fusion = Literal["apart", "stacked", "by_head"]
"""How projections lie in linear layers: one each; rows of all one after another; rows of each head side by side."""


class Projection:
    """One linear layer, PEFT's wrapping or not. Reads its parameters anew each time: others may be in their places."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_adapted = hasattr(module, "base_layer") and hasattr(module, "lora_A")

    @property
    def refusal(self) -> str:
        """Why its weight cannot be shared out, or nothing."""
        base = self._base
        if isinstance(base, FrozenLinear):
            return f"its weights are held in {base.matrix.dtype}, and a share would need them in float32"
        if not isinstance(base, nn.Linear) and not is_transposed(base):
            return f"a layer of it is a {type(base).__name__}, which is not known here"
        weight = base.weight
        if not isinstance(weight, Tensor) or weight.dtype != torch.float32:
            return f"its weights are {weight.dtype}, and shares are computed in float32"
        if self._is_adapted and getattr(self.module, "lora_variant", None):
            return "its adapters change the weights themselves (DoRA), which would have to be made anew for each share"
        return ""

    @property
    def rows(self) -> int:
        """Numbers that it gives."""
        return self.weight().shape[0]

    @property
    def is_adapted(self) -> bool:
        """Whether something may be added to its result."""
        return self._is_adapted

    def weight(self) -> Tensor:
        """[out, in], a view of the parameter."""
        weight = self._base.weight
        assert isinstance(weight, Tensor)
        return weight.T if is_transposed(self._base) else weight

    def bias(self) -> Tensor | None:
        """[out]."""
        bias = self._base.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def sources(self) -> Iterator[Tensor]:
        """The parameters themselves."""
        for tensor in (self._base.weight, self._base.bias):
            if isinstance(tensor, Tensor):
                yield tensor

    def added(self, inputs: Tensor) -> Tensor | None:
        """What adapters add to the result [..., out] for inputs [..., in], in PEFT's own operations."""
        module = self.module
        if not self._is_adapted or module.disable_adapters or module.merged:
            return None
        total: Tensor | None = None
        adapters = module.active_adapters
        assert isinstance(adapters, list)
        for name in adapters:
            if name in module.lora_A:  # type: ignore[operator] # a ModuleDict
                low = module.lora_A[name](module.lora_dropout[name](inputs))  # type: ignore[index,operator] # as above
                one = module.lora_B[name](low) * module.scaling[name]  # type: ignore[index,operator] # as above
                total = one if total is None else total + one
        return total

    @property
    def _base(self) -> nn.Module:
        base = self.module.base_layer if self._is_adapted else self.module
        assert isinstance(base, nn.Module)
        return base


class Projections:
    """Several projections of the same input, however they lie in linear layers.

    Args:
        modules: One layer for each, or one for all.
        fusion: How they lie in it.
        widths: Numbers that each gives.
        head_dim: Numbers of a head, for `by_head`.
    """

    def __init__(
        self, modules: Iterable[nn.Module], fusion: Fusion, widths: tuple[int, ...], head_dim: int = 1
    ) -> None:
        self._layers = [Projection(module) for module in modules]
        self._fusion = fusion
        self._widths = widths
        self._head_dim = head_dim

    @property
    def biased(self) -> bool:
        """Whether any has a bias."""
        return any(layer.bias() is not None for layer in self._layers)

    def sources(self) -> Iterator[Tensor]:
        """The parameters that `weights` and `biases` are made of."""
        for layer in self._layers:
            yield from layer.sources()

    def weights(self) -> tuple[Tensor, ...]:
        """[width, in] each."""
        if self._fusion == "apart":
            return tuple(layer.weight() for layer in self._layers)
        return self._cut(self._layers[0].weight(), 0)

    def biases(self) -> tuple[Tensor, ...]:
        """[width] each; zeros for a layer that has none."""
        if self._fusion == "apart":
            biases = [layer.bias() for layer in self._layers]
            return tuple(
                torch.zeros(layer.rows, device=layer.weight().device) if bias is None else bias
                for layer, bias in zip(self._layers, biases, strict=True)
            )
        bias = self._layers[0].bias()
        assert bias is not None, "the layer has no biases"
        return self._cut(bias, 0)

    def added(self, inputs: Tensor) -> tuple[Tensor | None, ...]:
        """What adapters add to each result [B,T,width]; drawn in the order in which the block would."""
        if self._fusion == "apart":
            return tuple(layer.added(inputs) for layer in self._layers)
        total = self._layers[0].added(inputs)
        return (None,) * len(self._widths) if total is None else self._cut(total, total.ndim - 1)

    def _cut(self, tensor: Tensor, axis: int) -> tuple[Tensor, ...]:
        """The projections' parts of an axis."""
        if self._fusion == "stacked":
            return torch.split(tensor, list(self._widths), axis)
        shape = tensor.shape
        by_head = tensor.view(*shape[:axis], -1, len(self._widths), self._head_dim, *shape[axis + 1 :])
        return tuple(one.flatten(axis, axis + 1) for one in by_head.unbind(axis + 1))


class WeightVersion:
    """Equal to another exactly while the same parameters hold the same values. Keeps no parameter alive."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._of = [(weakref.ref(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001 - torch's own counter

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightVersion) or len(self._of) != len(other._of):
            return False
        return all(
            mine() is not None and mine() is theirs() and own == its
            for (mine, own), (theirs, its) in zip(self._of, other._of, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(version for _, version in self._of))
