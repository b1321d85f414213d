"""Taps on a frozen backbone's blocks: a stage's own layers at the selected tokens, in one forward, for any family."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from coterie.heads.trials import own_blocks
from coterie.models import RandomKey, StageModule
from coterie.models.cut import BlockPatch
from coterie.sidetuning.selection import TokenSelection

_NO_DROPOUT = RandomKey(seed=0, step=0, micro_batch=0)


class TappedStage:
    """A stage that runs forward only, without dropout, and gives its own layers' outputs at some tokens.

    Layer l, from 1, is the output of block l - 1, which is unit l. A stage that ends below the output layer hands over
    its last block's output as any stage does. Whoever runs the stage by an executor says with `select` what the next
    forward taps, and takes it with `taken`.

    Attributes:
        stage: The stage; it stays in evaluation mode.
        layers: The layers that it taps, ascending; none if all its blocks are below the ladder.
    """

    def __init__(self, stage: StageModule, first_layer: int = 1) -> None:
        stage.eval()
        self.stage = stage
        own = range(max(stage.first_unit, 1), min(stage.stop_unit, stage.unit_count - 1))
        self.layers = tuple(layer for layer in own if layer >= first_layer)
        self._selection: TokenSelection | None = None
        self._taps: dict[int, Tensor] = {}
        for index, block in own_blocks(stage.module):
            if index + 1 in self.layers:
                patch = vars(block)["forward"]
                assert isinstance(patch, BlockPatch)
                patch.watch = partial(self._note, index + 1)

    def select(self, selection: TokenSelection | None) -> None:
        """Choose the tokens that forwards tap from now on; None taps nothing."""
        self._selection = selection
        self._taps = {}

    def taken(self) -> dict[int, Tensor]:
        """Of the last forward per layer (N, D), float32; it is handed over, so that nothing is kept here."""
        taps, self._taps = self._taps, {}
        return taps

    def forward(
        self, inputs: Mapping[str, Tensor], hidden: Tensor | None, selection: TokenSelection
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the stage on one micro-batch.

        Args:
            inputs: The model's inputs, [B, T] each.
            hidden: From the stage before, [B, T, D]; None on the first.
            selection: Which tokens are tapped.

        Returns:
            Hidden states [B, T, D], or on a stage with the output layer the backbone's own logits; and per layer the
            selected tokens' activations (N, D), float32.
        """
        self.select(selection)
        with torch.no_grad():
            output = self.stage.forward(inputs, hidden, _NO_DROPOUT)
        taps = self.taken()
        self.select(None)
        return output, taps

    def _note(self, layer: int, hidden: Tensor) -> None:
        """Keep the selected tokens of one layer's output [B, T, D]."""
        if self._selection is not None:
            self._taps[layer] = self._selection.gather(hidden.detach()).float()
