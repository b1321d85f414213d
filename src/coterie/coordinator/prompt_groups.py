"""Rows whose prompts are continued together: what is fed to the stages, and when a row or the whole group is done."""

import msgspec
import numpy as np

from coterie.jobs.generation_spec import GenerationSpec
from coterie.tasks.examples import Example, IntArray


class Prompts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is to be continued, and where it ends.

    Attributes:
        examples: The rows.
        ids: The prompt of each row (P,), at least one token each.
        stop_ids: Tokens after which a row is done.
        pad_id: Fills prompts up on the left, and continues rows that are done while others of their group are not.
        spec: How the tokens are chosen, and how many at most.
    """

    examples: tuple[Example, ...]
    ids: tuple[IntArray, ...]
    stop_ids: frozenset[int]
    pad_id: int
    spec: GenerationSpec

    @property
    def lengths(self) -> IntArray:
        """Tokens of each prompt (N,)."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return int(self.lengths.max())

    def groups(self, rows: int) -> list["PromptGroup"]:
        """All rows, longest prompts first, so that little is filled up, in groups of at most `rows`."""
        order = sorted(range(len(self.ids)), key=lambda row: -len(self.ids[row]))
        return [
            PromptGroup(self, number, tuple(order[start : start + rows]))
            for number, start in enumerate(range(0, len(order), rows))
        ]


class PromptGroup:
    """Some rows on their way.

    Attributes:
        number: Of the group.
        rows: Numbers of its rows.
        position: Tokens that its rows have been continued by.
        generated: The tokens of each row, its stop included, padding left out.
    """

    def __init__(self, prompts: Prompts, number: int, rows: tuple[int, ...]) -> None:
        self._prompts = prompts
        self.number = number
        self.rows = rows
        self.position = 0
        self.generated: tuple[list[int], ...] = tuple([] for _ in rows)
        self._newest = np.zeros((len(rows), 1), dtype=np.int64)

    def start(self) -> tuple[IntArray, IntArray | None]:
        """Prompts padded on the left, and 1 where they are not padding, (B, T) each; None if there is no padding."""
        prompts = [self._prompts.ids[row] for row in self.rows]
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self._prompts.pad_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for index, prompt in enumerate(prompts):
            ids[index, width - len(prompt) :] = prompt
            mask[index, width - len(prompt) :] = 1
        return ids, None if mask.all() else mask

    @property
    def newest(self) -> IntArray:
        """The token to continue each row by, (B, 1)."""
        return self._newest

    def take(self, tokens: IntArray) -> None:
        """The next token of each row, (B,); those of rows that are done are left aside."""
        for index, token in enumerate(tokens.tolist()):
            open_row = self._is_open(index)
            if open_row:
                self.generated[index].append(token)
            self._newest[index, 0] = token if open_row else self._prompts.pad_id
        self.position += 1

    @property
    def is_done(self) -> bool:
        """Nothing is left to be generated."""
        if self.position >= self._prompts.spec.max_new_tokens:
            return True
        return not any(self._is_open(index) for index in range(len(self.rows)))

    def _is_open(self, index: int) -> bool:
        generated = self.generated[index]
        return not generated or generated[-1] not in self._prompts.stop_ids
