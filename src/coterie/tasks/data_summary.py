"""Rows encoded for a run, and what became of them in numbers."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from coterie.errors import DataError
from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, Example, IntArray
from coterie.tasks.task import ReshapingTask, Split, Task
from coterie.units import counted

if TYPE_CHECKING:
    from coterie.tasks.tokenizer import LoadedTokenizer


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One split in numbers.

    Attributes:
        rows: Rows that are used.
        words: Words of these rows (0 in tasks without words).
        tokens: Tokens of these rows, special ones included.
        loss_tokens: Tokens that carry a label.
        truncated_rows: Rows longer than `max_tokens`.
        truncated_words: Words that were cut off with them.
        dropped_words: Words for which the tokenizer has no token.
        skipped_rows: Rows left out of training because no label, or no answer, is left in them.
        label_counts: Loss tokens per label name.
        token_percentiles: Tokens per row: the 50th, 90th and 99th percentile, and the longest.
        max_tokens: Most tokens of a row: the model's context, or less if so asked; 0 if unknown.
        notes: What else a user should know.
    """

    name: str
    source: str
    rows: int
    words: int
    tokens: int
    loss_tokens: int
    truncated_rows: int
    truncated_words: int
    dropped_words: int
    skipped_rows: int
    label_counts: dict[str, int]
    token_percentiles: tuple[int, int, int, int]
    max_tokens: int = 0
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """The figures as lines of text."""
        p50, p90, p99, longest = self.token_percentiles
        words = f"{self.words} words, " if self.words else ""
        first = (
            f"{self.name}: {self.rows} rows, {words}{self.tokens} tokens, {self.loss_tokens} with a label; "
            f"tokens per row: half up to {p50}, 90 % up to {p90}, 99 % up to {p99}, longest {longest}"
        )
        lines = [first]
        if self.truncated_rows:
            cut = f"{counted(self.truncated_words, 'word')}" if self.words else "what exceeds them is"
            lines.append(f"  {counted(self.truncated_rows, 'row')} of more than {self.max_tokens} tokens: {cut} cut")
        if self.dropped_words:
            lines.append(f"  {self.dropped_words} words have no token in this tokenizer and are never tagged")
        if self.skipped_rows:
            lines.append(f"  {self.skipped_rows} rows have no label left and are skipped")
        return "\n".join(lines + [f"  {note}" for note in self.notes])


class EncodedSplit(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The used rows of a split: `rows[i]` is the encoded `examples[i]`; rows that several share have no examples."""

    examples: tuple[Example, ...]
    rows: tuple[EncodedExample, ...]
    summary: DataSummary

    @property
    def lengths(self) -> IntArray:
        """Tokens of each row (N,)."""
        return np.array([row.tokens for row in self.rows], dtype=np.int64)


def encode_split(
    task: Task, split: Split, tokenizer: "LoadedTokenizer", max_tokens: int, *, for_training: bool
) -> EncodedSplit:
    """Encode all rows of a split.

    Rows without any label are skipped, and counted, in training; in evaluation every row stays.

    Raises:
        DataError: No row is left.
        UnsupportedModelError: The tokenizer does not serve this task.
    """
    reshaping = task if isinstance(task, ReshapingTask) else None
    examples: Sequence[Example] = split.examples
    if reshaping is not None:
        examples = [piece for row in examples for piece in reshaping.pieces(row, tokenizer, max_tokens)]
    pairs = [(example, task.encode(example, tokenizer, max_tokens)) for example in examples]
    used = [pair for pair in pairs if task.count_loss_tokens(pair[1].labels)] if for_training else pairs
    if not used:
        raise DataError(
            f"{split.source}: none of {len(pairs)} rows has a labelled token within {max_tokens} tokens",
            hint="check the data's labels, or allow longer rows",
        )
    kept = tuple(example for example, _ in used)
    rows = tuple(row for _, row in used)
    summary = msgspec.structs.replace(
        _summarise(task, split, rows, skipped=len(pairs) - len(used)), max_tokens=max_tokens
    )
    if reshaping is not None:
        notes = _reshaping_notes(split, examples, max_tokens) + reshaping.notes(split.examples, tokenizer)
        joined = reshaping.joined(rows, max_tokens) if for_training else None
        if joined is not None:
            notes += (_packing_note(rows, joined, max_tokens),)
            kept, rows = (), joined
        summary = msgspec.structs.replace(summary, notes=(*summary.notes, *notes))
    return EncodedSplit(examples=kept, rows=rows, summary=summary)


def _reshaping_notes(split: Split, pieces: Sequence[Example], max_tokens: int) -> tuple[str, ...]:
    if len(pieces) == len(split.examples):
        return ()
    return (f"texts of more than {max_tokens} tokens are cut: {len(split.examples)} became {len(pieces)} rows",)


def _packing_note(rows: Sequence[EncodedExample], joined: Sequence[EncodedExample], max_tokens: int) -> str:
    filled = sum(row.tokens for row in rows) / (len(joined) * max_tokens)
    return f"packed: {len(rows)} rows share {len(joined)} contexts of {max_tokens} tokens, {filled:.0%} full"


def _summarise(task: Task, split: Split, rows: Sequence[EncodedExample], *, skipped: int) -> DataSummary:
    lengths = np.array([row.tokens for row in rows])
    counts: Counter[str] = Counter()
    if task.labels:
        for row in rows:
            counts.update(task.labels[int(label)] for label in row.labels.ravel().tolist() if label != IGNORED_LABEL)
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="higher"))
    return DataSummary(
        name=split.name,
        source=split.source,
        rows=len(rows),
        words=sum(len(row.word_positions) for row in rows if row.word_positions is not None),
        tokens=int(lengths.sum()),
        loss_tokens=sum(task.count_loss_tokens(row.labels) for row in rows),
        truncated_rows=sum(row.truncated for row in rows),
        truncated_words=sum(row.truncated_words for row in rows),
        dropped_words=sum(row.dropped_words for row in rows),
        skipped_rows=skipped,
        label_counts={label: counts[label] for label in task.labels if counts[label]},
        token_percentiles=(p50, p90, p99, int(lengths.max())),
        notes=split.notes,
    )
