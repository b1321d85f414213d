"""Keys and values of the tokens seen so far, for the blocks of one stage: transformers' cache with places left empty.

A block knows its number in the whole model, and the model's own code asks the cache how long it is at whatever block it
likes (usually the first of a kind) to make masks and positions. So a stage's cache has a place for every block of the
model; those of other stages' blocks hold nothing and only count along.
"""

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from coterie.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ReservedLayer(DynamicLayer):  # type: ignore[misc] # transformers is untyped here
    """One block's keys and values in memory that is reserved once.

    transformers' own layer appends, which copies everything at each token and leaves holes of ever other sizes in the
    heap. Pages are taken by the system as they are first written, so a long reserve costs nothing before its time.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve for keys and values [B, heads, T, K] of `capacity` tokens."""
        self.device = key_states.device
        self.keys, self.values = (
            states.new_empty((*states.shape[:2], self._capacity, states.shape[-1]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the newest keys and values [B, heads, T, K]; all kept so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self._tokens, self._tokens + key_states.shape[-2]
        assert stop <= self._capacity, f"{stop} tokens where {self._capacity} were reserved"
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        self._tokens = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_seq_length(self) -> int:
        """Tokens kept."""
        return self._tokens


class AbsentLayer(DynamicLayer):  # type: ignore[misc] # as above
    """The place of another stage's block: it knows how many tokens that block has seen, and keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.tokens


class StageCache(DynamicCache):  # type: ignore[misc] # as above
    """The cache of one group of rows on one stage.

    Args:
        config: The model's config, which says what kind of attention each block has.
        blocks: Numbers of the stage's own blocks.
        capacity: Most tokens of a row, prompt and answer together.

    Raises:
        UnsupportedModelError: The kind of memory that a block has cannot be followed from another stage.
    """

    def __init__(self, config: "PretrainedConfig", blocks: range, capacity: int) -> None:
        super().__init__(config=config)
        self.capacity = capacity
        self._absent = [index for index in range(len(self.layers)) if index not in blocks]
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = ReservedLayer(capacity) if index in blocks else AbsentLayer()
            elif index not in blocks and type(layer) not in {DynamicSlidingWindowLayer, LinearAttentionLayer}:
                raise UnsupportedModelError(
                    f"blocks of {config.model_type} keep a {type(layer).__name__} while text is written, which cannot "
                    "be done by several devices",
                    hint="generate on one device: leave --workers and --local-worker out",
                )

    def count(self, tokens: int) -> None:
        """Note that the other stages' blocks see `tokens` more tokens of each row, as this stage's own have."""
        for index in self._absent:
            layer = self.layers[index]
            if isinstance(layer, AbsentLayer):
                layer.tokens += tokens
            elif isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length += tokens
            else:
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    def bytes_at(self, tokens: int) -> int:
        """Memory of the own blocks once each row has `tokens` tokens; something must have been kept already."""
        return sum(_bytes_at(layer, tokens) for layer in self.layers)


def _bytes_at(layer: object, tokens: int) -> int:
    if isinstance(layer, LinearAttentionLayer):
        states: list[torch.Tensor | None] = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)  # None: another stage's, or it has no such
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or not keys.shape[-2]:
        return 0
    per_token: int = (keys.nbytes + values.nbytes) // keys.shape[-2]
    if isinstance(layer, DynamicSlidingWindowLayer):
        # It appends to what it kept, so for a moment there are two of them.
        return 2 * per_token * min(tokens, int(layer.sliding_window))
    return per_token * tokens
