"""Which tokens a model's output layer reads: found by its gradients, so that no family has to be known."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_spec import SideSpec
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import RandomKey, build_stage, config_of, describe
from coterie.sidetuning.selection import Reads, TokenSelection, select_tokens

_LENGTHS = (5, 3)
"""Tokens of the rows that are probed; the second row has padding behind it."""
_KEY = RandomKey(seed=0, step=0, micro_batch=0)
_PAD, _TOKEN, _VOCABULARY = 0, 7, 64


class TokenSelector:
    """Chooses the tokens of a batch that are sent; for one model, at the data's owner."""

    def __init__(self, spec: ModelSpec, side: SideSpec) -> None:
        """Find what the model's output layer reads.

        Raises:
            UnsupportedModelError: It reads several tokens of a row at once.
        """
        self.reads = reads_of(spec)
        self._selects_tokens = side.selects_tokens
        config: Any = config_of(spec)
        self._pad_token_id: int | None = config.get_text_config().pad_token_id

    def select(self, inputs: Mapping[str, Tensor], labels: Tensor | None) -> TokenSelection:
        """The tokens of one micro-batch that are sent.

        Args:
            inputs: `input_ids` and, but for packed rows, `attention_mask`, each (B, T).
            labels: (B, T) or (B,); None in prediction: see `select_tokens`.
        """
        ids = inputs["input_ids"]
        present = inputs.get("attention_mask", torch.ones_like(ids))
        readable = present
        if self.reads == "last" and self._pad_token_id is not None:
            # Such models look for the last token that is not the pad token, whatever the mask says.
            readable = ids != self._pad_token_id
        return select_tokens(labels, readable, self.reads, selects_tokens=self._selects_tokens, present=present)


@functools.lru_cache(maxsize=8)
def reads_of(spec: ModelSpec) -> Reads:
    """What the output layer reads: `first`, `last`, or `labelled` if every token gets logits of its own.

    A small copy of the output layer (a vocabulary of 64, made-up weights) runs on made-up hidden states, and the
    gradients of its logits say where they come from.

    Raises:
        UnsupportedModelError: Logits come from several tokens at once (mean pooling).
    """
    small = _small(spec)
    unit_count = describe(small).unit_count
    stage = build_stage(small, unit_count - 1, unit_count, StandInWeights(small))
    stage.eval()
    inputs, hidden = _probe_inputs(config_of(small).hidden_size)
    logits = stage.forward(inputs, hidden, _KEY)
    draw = torch.Generator().manual_seed(1)
    weighted = logits * torch.randn(logits.shape, generator=draw)
    if logits.ndim == 3:
        own = [_sources(weighted[0, token], hidden)[0] == [token] for token in range(_LENGTHS[0])]
        if all(own):
            return "labelled"
    else:
        read = [_sources(weighted[row], hidden)[row] for row in range(len(_LENGTHS))]
        if read == [[0] for _ in _LENGTHS]:
            return "first"
        if read == [[length - 1] for length in _LENGTHS]:
            return "last"
    raise UnsupportedModelError(
        f"the output layer of {type(stage.module).__name__} reads several tokens of a row at once, and side-tuning "
        "sends the one that is read",
        hint="use a model that reads the first or the last token (ModernBERT: "
        'classifier_pooling = "cls" in its config.json)',
    )


def _small(spec: ModelSpec) -> ModelSpec:
    values = json.loads(spec.config_json)
    if "vocab_size" in values:
        values |= {"vocab_size": _VOCABULARY, "pad_token_id": _PAD}
    return ModelSpec(config_json=json.dumps(values), auto_class=spec.auto_class, method="none")


def _probe_inputs(width: int) -> tuple[dict[str, Tensor], Tensor]:
    mask = torch.tensor([[int(token < length) for token in range(max(_LENGTHS))] for length in _LENGTHS])
    ids = torch.where(mask.bool(), _TOKEN, _PAD)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(*mask.shape, width, generator=draw).requires_grad_()
    return {"input_ids": ids, "attention_mask": mask}, hidden


def _sources(logits: Tensor, hidden: Tensor) -> list[list[int]]:
    """Per row the tokens whose hidden states have an influence on some logits."""
    (gradient,) = torch.autograd.grad(logits.sum(), hidden, retain_graph=True)
    return [row.abs().sum(-1).nonzero().squeeze(1).tolist() for row in gradient]
