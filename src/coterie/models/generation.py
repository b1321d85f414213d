"""Text by a stage: one step of a group of rows, by the model's own code for generation.

The model makes masks, positions and what it feeds of the ids itself, as in transformers' `generate`; a stage differs
from a whole model only in its blocks (`cut`) and in the cache of its own blocks (`kept_tokens`).
"""

import inspect
import json
from typing import Any

import torch
from torch import Tensor

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.kept_tokens import StageCache
from coterie.models.keys import RandomKey
from coterie.models.skeleton import config_of, model_class
from coterie.models.source import ModelSource
from coterie.models.stage import StageModule

_NO_DROPOUT = RandomKey(seed=0, step=0, micro_batch=0)


class RowGroup:
    """Rows that are continued together, on one stage: their ids so far, and what the stage's blocks keep of them.

    Attributes:
        ids: Token ids [B, T], prompts padded on the left.
        mask: 1 where a token is none of the padding, [B, T]; None if there is no padding.
        cache: Keys and values of the tokens that the stage has seen.
    """

    def __init__(self, ids: Tensor, mask: Tensor | None, cache: StageCache) -> None:
        self.ids = ids
        self.mask = mask
        self.positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        if mask is not None:
            self.positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        self.cache = cache
        self.is_first = True

    def append(self, ids: Tensor) -> None:
        """Continue every row by one token, [B]."""
        self.ids = torch.cat([self.ids, ids[:, None]], dim=-1)
        self.positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=-1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=-1)


class GenerationStage:
    """A stage that writes text; dropout is off from here on.

    Raises:
        UnsupportedModelError: The model does not write text.
    """

    def __init__(self, stage: StageModule) -> None:
        stage.eval()
        self.stage = stage
        self._accepted = frozenset(inspect.signature(stage.module.forward).parameters)
        self._blocks = range(max(stage.first_unit - 1, 0), min(stage.stop_unit, stage.unit_count - 1) - 1)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the embedding knows; None on a stage without it."""
        return int(self.stage.module.get_input_embeddings().weight.shape[0]) if self.stage.is_first else None

    def begin(self, ids: Tensor, mask: Tensor | None, new_tokens: int) -> RowGroup:
        """A group of rows before its first step.

        Args:
            ids: Prompts [B, T], padded on the left.
            mask: 1 where a token is none of the padding, [B, T]; None if there is no padding.
            new_tokens: Most tokens that will be appended.
        """
        device = self.stage.device
        mask = None if mask is None else mask.to(device)
        return RowGroup(ids.to(device), mask, self._cache(ids.shape[1] + new_tokens))

    @torch.no_grad()
    def forward(self, group: RowGroup, hidden: Tensor | None) -> Tensor:
        """Run the own blocks on what of a group they have not seen yet.

        Args:
            group: Of this stage.
            hidden: From the stage before, [B, t, D]; None on the first stage.

        Returns:
            Hidden states [B, t, D]; on the last stage the logits of the next token, float32 [B, V].
        """
        inputs = self._prepared(group)
        hidden = None if hidden is None else hidden.to(self.stage.device)
        output = self.stage.forward(inputs, hidden, _NO_DROPOUT)
        group.cache.count(inputs["input_ids"].shape[1])
        group.is_first = False
        return output[:, -1].float() if self.stage.is_last else output

    def _prepared(self, group: RowGroup) -> dict[str, Any]:
        """The arguments of the model's forward, as its own class makes them for `generate`."""
        wished: dict[str, Any] = {"position_ids": group.positions, "logits_to_keep": 1}
        prepared: dict[str, Any] = self.stage.module.prepare_inputs_for_generation(
            group.ids,
            next_sequence_length=None if group.is_first else 1,
            cache=group.cache,
            attention_mask=group.mask,
            use_cache=True,
            is_first_iteration=group.is_first,
            **{name: value for name, value in wished.items() if name in self._accepted},
        )
        if prepared.get("cache") is None:
            # Phi-3's rotary embedding changes with the length: at that point all keys must be made again.
            group.cache = prepared["cache"] = self._cache(group.cache.capacity)
        return prepared

    def _cache(self, capacity: int) -> StageCache:
        return StageCache(self.stage.module.config, self._blocks, capacity)


def check_writes_text(spec: ModelSpec, *, in_parts: bool) -> None:
    """Refuse models that cannot write text, on one device or (`in_parts`) on several, before anything is started.

    Raises:
        UnsupportedModelError: The model cannot; the message says why.
    """
    config = config_of(spec)
    found = model_class(spec.auto_class, config)
    if not found.can_generate() or not found._supports_default_dynamic_cache():  # noqa: SLF001 - what `generate` asks
        raise UnsupportedModelError(
            f"{found.__name__} does not write text as it is done here", hint="use a causal language model"
        )
    if in_parts:
        StageCache(config, range(0), 1)


def end_ids(source: ModelSource) -> tuple[int, ...]:
    """Ids after which a model is done with a text: those of its folder's `generation_config.json`, or of its config."""
    try:
        settings = json.loads((source.folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # most folders of small models have none
        settings = {}
    known = settings.get("eos_token_id") if isinstance(settings, dict) else None
    known = getattr(source.config, "eos_token_id", None) if known is None else known
    ids = known if isinstance(known, list) else [known]
    return tuple(token for token in ids if isinstance(token, int))
