"""Backbone and side network at work together, on the device that has both: for predictions and for text.

The side network reads each block's output and adds its own to the last one's, so whatever the model's own code does
afterwards (final norm, pooler, output layer) needs no change; and since it sees one token at a time, it needs no memory
of its own while text is written: the backbone's keys and values are those of the backbone alone.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_folder import (
    FETCH_AGAIN,
    FIRST_TASK_LAYERS,
    SIDE_CONFIG,
    SIDE_NETWORK,
    SideConfig,
    read_side_config,
)
from coterie.models import PackedWeights, RandomKey, StageModule, WeightStore, build_stage, describe
from coterie.models.stubs import hidden_result
from coterie.models.trained import ReplacedWeights, read_tensors
from coterie.sidetuning.additive import added
from coterie.sidetuning.side_network import SideNetwork

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NO_DROPOUT = RandomKey(seed=0, step=0, micro_batch=0)
_LEAST_PROBABILITY = 1e-6
"""Additions may push a probability below 0; its logarithm, which the loss reads, ends here."""


class Ladder:
    """A side network on a model's blocks; it climbs while the model runs forward.

    Works on a whole model and on a stage that holds all units, since it only looks at what blocks return. One forward
    runs at a time.

    Attributes:
        top: The last block's own output [B, T, D] in the forward before, if `keeps_top`; else None.
    """

    def __init__(
        self, model: "PreTrainedModel", blocks_name: str, network: SideNetwork, *, keeps_top: bool = False
    ) -> None:
        """Put it on the blocks of `model`, whose module name is `blocks_name`."""
        blocks = model.get_submodule(blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        self._network = network.eval()
        self._state: Tensor | None = None
        self._last = len(blocks)
        self.keeps_top = keeps_top
        self.top: Tensor | None = None
        self._handles = [
            block.register_forward_hook(_Rung(self, layer))
            for layer, block in enumerate(blocks, 1)
            if layer in network.layers
        ]

    def remove(self) -> None:
        """Take it off; the model is what it was."""
        for handle in self._handles:
            handle.remove()

    def climb(self, layer: int, hidden: Tensor) -> Tensor:
        """Take a block's output [B, T, D]; what takes its place: it itself but for the last block's."""
        below = None if layer == self._network.layers[0] else self._state
        self._state = self._network.climb(layer, below, hidden)
        if layer < self._last:
            return hidden
        result = hidden + self._network.result(self._state)
        self._state = None
        if self.keeps_top:
            self.top = hidden
        return result


class _Rung:
    """A block's hook."""

    def __init__(self, ladder: Ladder, layer: int) -> None:
        self._ladder = ladder
        self._layer = layer

    def __call__(self, _block: nn.Module, _inputs: object, output: object) -> object:
        hidden = hidden_result(output)
        risen = self._ladder.climb(self._layer, hidden)
        if risen is hidden:
            return output
        return (risen, *output[1:]) if isinstance(output, tuple) else risen


class SideBackbone:
    """A whole model with the side network of an exported folder: what the device predicts by.

    Attributes:
        ladder: The side network on the model's blocks.
    """

    def __init__(self, model: "PreTrainedModel", spec: ModelSpec, weights: WeightStore, folder: Path) -> None:
        """Put the side network on a model that has the layers in their places that were trained with it.

        Args:
            model: The whole model.
            spec: Its spec.
            weights: Of the model.
            folder: Of the side network.

        Raises:
            ModelError: As `load_side_network`.
        """
        config = _config(folder)
        self._model = model.eval()
        self._known = inspect.signature(model.forward).parameters
        is_additive = config.side.mode == "additive"
        self.ladder = Ladder(model, config.blocks, load_side_network(folder), keeps_top=is_additive)
        self._first_output = _first_output(spec, weights, folder) if is_additive else None

    @torch.inference_mode()
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The answer to one batch.

        Args:
            inputs: The model's inputs, [B, T] each; those that it does not know are left out.

        Returns:
            Logits [B, T, V] or [B, V]. In additive mode the logarithms of what device and server make together of the
            backbone's probabilities, of a regression the scores.
        """
        known = {name: tensor for name, tensor in inputs.items() if name in self._known}
        logits: Tensor = self._model(**known).logits
        if self._first_output is None:
            return logits
        top, self.ladder.top = self.ladder.top, None
        before = self._first_output.forward(inputs, top, _NO_DROPOUT)
        answer = added(before, logits.float() - before.float())
        return answer if answer.shape[-1] == 1 else answer.clamp_min(_LEAST_PROBABILITY).log()


def _first_output(spec: ModelSpec, weights: WeightStore, folder: Path) -> StageModule:
    """The output layer as it was before training."""
    unit_count = describe(spec).unit_count
    path = folder / FIRST_TASK_LAYERS
    first = ReplacedWeights(weights, read_tensors(path)) if path.is_file() else weights
    stage = build_stage(spec, unit_count - 1, unit_count, PackedWeights(first, spec))
    stage.eval()
    return stage


def load_side_network(folder: Path) -> SideNetwork:
    """The side network in an exported folder.

    Raises:
        ModelError: The folder holds none, or not the one that its config describes.
    """
    config = _config(folder)
    network = SideNetwork(config.layers, config.width, config.side, seed=0)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    tensors = read_tensors(folder / SIDE_NETWORK)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ModelError(
            f"{folder / SIDE_NETWORK} does not hold what {SIDE_CONFIG} describes: {wrong[0]} is "
            f"{found.get(wrong[0], 'not there')} and should be {expected.get(wrong[0], 'absent')}",
            hint=FETCH_AGAIN,
        )
    network.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    return network


def attach_side_network(model: "PreTrainedModel", folder: Path) -> Ladder:
    """Put the side network of an exported folder on its backbone: a whole model, or a stage's that holds all units.

    Raises:
        ModelError: As `load_side_network`.
    """
    return Ladder(model, _config(folder).blocks, load_side_network(folder))


def _config(folder: Path) -> SideConfig:
    config = read_side_config(folder)
    if config is None:
        raise ModelError(
            f"{folder} holds no {SIDE_CONFIG}", hint="give a folder that a run with a side network exported"
        )
    return config
