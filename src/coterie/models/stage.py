"""A stage: the Hugging Face model's own forward with everything outside the stage's units replaced by stubs."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from coterie.jobs.model_spec import ModelSpec
from coterie.models.adapters import inject, is_adapter
from coterie.models.anatomy import Anatomy, describe
from coterie.models.cut import Call, Slots, cut_blocks, fill_foreign, find_slots, install, patch_blocks, put
from coterie.models.frozen_linear import FrozenLinear, place_frozen
from coterie.models.frozen_weights import frozen_matrices
from coterie.models.keys import RandomKey, seed_for, seed_generators
from coterie.models.skeleton import BUILDING, empty_model, materialise_buffers, set_buffer
from coterie.models.stubs import ReachedExit
from coterie.models.weights import WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StageModule:
    """Units [first_unit, stop_unit) of a model.

    Parameter names are those of `Anatomy.unit_of`. The tied matrix has its one name on both stages that hold it. One
    forward runs at a time; any number may wait for their backward.

    Attributes:
        module: The cut model.
        device: Where it computes.
        first_unit: First own unit.
        stop_unit: One past the last own unit.
        unit_count: Units of the whole model.
        is_first: Whether the embedding is here.
        is_last: Whether the output layer is here.
        tied_name: The *trained* tied matrix if its other end is on another stage: its gradients must be summed.
    """

    def __init__(self, spec: ModelSpec, units: range, device: torch.device) -> None:
        """Cuts the empty model; `build_stage` fills it."""
        anatomy = describe(spec)
        self.module: PreTrainedModel = empty_model(spec)
        self.device = device
        self.first_unit, self.stop_unit = units.start, units.stop
        self.unit_count = anatomy.unit_count
        self.is_first = units.start == 0
        self.is_last = units.stop == anatomy.unit_count
        self.tied_name = _tied_apart(anatomy, units)
        self._anatomy = anatomy
        self._accepted = frozenset(inspect.signature(self.module.forward).parameters) - {"labels"}
        self._bfloat16 = spec.compute_dtype == "bfloat16"
        self._slots: Slots = {}
        self._call: Call | None = None
        cut_blocks(self.module, anatomy, units, self)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All own parameters, trained or not, in unit order."""
        named: dict[str, nn.Parameter] = {}
        for name in sorted(self._slots, key=self.unit_of):
            owner, leaf = self._slots[name][0]
            parameter = owner._parameters[leaf]  # noqa: SLF001 - the place itself, which may have been swapped
            assert parameter is not None
            named[name] = parameter
        return named

    def trainable(self) -> dict[str, nn.Parameter]:
        """Own parameters that are trained, in unit order."""
        return {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}

    def frozen(self) -> dict[str, torch.Tensor]:
        """Own tensors that training never changes, by the names that a `WeightStore` gives them under.

        They are the stage's very tensors: a later stage that is given them needs no second copy.
        """
        tensors = {name: p.detach() for name, p in self.parameters().items() if not p.requires_grad}
        for module in self.module.modules():
            if isinstance(module, FrozenLinear):
                tensors |= module.parts
        return tensors

    def unit_of(self, name: str) -> int:
        """The unit of an own parameter; the output unit for the tied matrix of a stage without the embedding."""
        unit = self._anatomy.unit_of[name]
        return unit if unit >= self.first_unit else self.unit_count - 1

    def swap_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Puts other parameters in the places of own ones (weight stashing).

        A backward reads the values that its forward saved, but a *recomputed* block reads the places again. So before
        the backward of a recomputed forward, that forward's parameters must be back in their places. Gradients go to
        the parameters that were in place during the forward.
        """
        put(self._slots, parameters)

    def train(self) -> None:
        """Dropout on."""
        self.module.train()

    def eval(self) -> None:
        """Dropout off."""
        self.module.eval()

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        hidden: torch.Tensor | None,
        key: RandomKey,
        *,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Runs the own units on one micro-batch.

        Args:
            inputs: The micro-batch's model inputs, [B,T] each, the same on every stage; those that the model does not
                know are left out (a tokenizer may make token types for a model without any).
            hidden: [B,T,D] from the stage before; None on the first stage.
            key: What this forward's randomness depends on.
            recompute: Keep only each block's input and run the block again in backward.

        Returns:
            Hidden states [B,T,D], or on the last stage the logits [B,T,V] or [B,labels]. With `bfloat16` compute they
            are of the type that the whole model would have there.
        """
        assert (hidden is None) == self.is_first, "exactly the first stage takes no hidden states"
        if self._bfloat16 and hidden is not None:
            # Autocast caches its cast of a leaf, and so would add up the blocks' gradients of it in bfloat16.
            hidden = hidden.view_as(hidden)
        known = {name: tensor for name, tensor in inputs.items() if name in self._accepted}
        self._call = Call(hidden, key, recompute)
        try:
            with self._precision():
                if self.is_first:
                    seed_generators(seed_for(key, 0), self.device)
                return self._run(known)
        finally:
            self._call = None

    @property
    def call(self) -> Call:
        """The forward that runs now; for the stage's own stubs and blocks."""
        assert self._call is not None, "a block ran outside of its stage's forward"
        return self._call

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast for `bfloat16`: weights and their gradients stay float32, matrix products run in bfloat16."""
        if not self._bfloat16 or self.device.type == "meta":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _run(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        try:
            logits: torch.Tensor = self.module(**inputs).logits
        except ReachedExit as reached:
            # The traceback holds every frame of the forward, and with them tensors that should be freed now.
            reached.__traceback__ = None
            return reached.hidden
        return logits

    def _fill(self, spec: ModelSpec, units: range, weights: WeightStore | None) -> None:
        anatomy = self._anatomy
        trained = anatomy.trainable_names
        slots, before = find_slots(self.module, anatomy, units)
        matrices = frozen_matrices(spec)
        if self.device.type != "meta":
            assert weights is not None, "a stage that computes needs weights"
            materialise_buffers(self.module, self.device)
            fill_foreign(before, self.device)
            install(slots, weights.get(name for name in slots if name not in matrices), trained, self.device)
            kept = [name for name, unit in anatomy.buffers.items() if unit in units]
            for name, tensor in weights.get(kept).items():
                set_buffer(self.module, name, tensor.to(self.device))
        if spec.lora is not None:
            inject(self.module, spec.lora, [n for n in spec.lora.target_modules if anatomy.unit_of_module(n) in units])
            slots, _ = find_slots(self.module, anatomy, units)
            if weights is not None and self.device.type != "meta":
                adapters = [name for name in slots if is_adapter(name)]
                install(slots, weights.get(adapters), trained, self.device)
        if matrices:
            place_frozen(self.module, [m for m in matrices.values() if m.unit in units], weights, self.device)
            slots, _ = find_slots(self.module, anatomy, units)
        self._slots = slots
        for name, parameter in self.parameters().items():
            parameter.requires_grad_(name in trained)
        patch_blocks(self.module, anatomy, self, self.device)
        self.train()


def build_stage(
    spec: ModelSpec,
    first_unit: int,
    stop_unit: int,
    weights: WeightStore | None,
    *,
    device: str | torch.device = "cpu",
) -> StageModule:
    """Builds units [first_unit, stop_unit), in training mode, and reads only their tensors.

    Args:
        spec: The model.
        first_unit: First own unit.
        stop_unit: One past the last own unit.
        weights: Where the own parameters come from, frozen matrices in parts (`PackedWeights`); None on `meta`.
        device: Where the stage computes; `meta` gives shapes without values; it cannot run a forward.

    Raises:
        UnsupportedModelError: The model cannot be cut.
        ModelError: A weight is missing or has the wrong shape.
    """
    units = range(first_unit, stop_unit)
    with BUILDING:
        stage = StageModule(spec, units, torch.device(device))
        assert 0 <= first_unit < stop_unit <= stage.unit_count, f"the model has no units [{first_unit}, {stop_unit})"
        stage._fill(spec, units, weights)  # noqa: SLF001 - the second half of building
    return stage


def _tied_apart(anatomy: Anatomy, units: range) -> str | None:
    tied = anatomy.tied
    if tied is None or tied.name not in anatomy.trainable_names:
        return None
    ends = {0, anatomy.unit_count - 1} & set(units)
    return tied.name if len(ends) == 1 else None
