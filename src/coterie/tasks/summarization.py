"""Summaries of dialogues and other texts by a causal model: a prompt with the text, then the summary, which is learnt.

Where prompt and summary exceed the context the text loses its end, so that the whole summary is learnt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from coterie.errors import UsageError
from coterie.tasks.causal_lm import CausalLm, language_notes
from coterie.tasks.examples import EncodedExample, Example, IntArray, LabelArray, PredictedArray
from coterie.tasks.language_encoding import TokenRow, cut_left, encode_tokens
from coterie.tasks.language_metrics import LanguageMetric, RougeMetric
from coterie.tasks.language_rows import SummarizedText
from coterie.tasks.language_writers import to_jsonl, write_jsonl
from coterie.tasks.read_language import read_summaries
from coterie.tasks.splits import split_sources
from coterie.tasks.task import DataFiles, Split, TaskData
from coterie.tasks.templates import (
    Prompt,
    answer_prompt,
    answer_tokens,
    check_prompt,
    fill_prompt,
    generated_text,
    turn_end_ids,
)

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer

SAID = "Summarize the following dialogue.\n\n{text}"
"""What the user of a chat says."""

PLAIN = SAID + "\n\nSummary:\n"
"""What a model without a chat template reads."""

_LANGUAGE = CausalLm()


class Summarization(msgspec.Struct, frozen=True, kw_only=True):
    """Summaries, written token by token.

    Attributes:
        template: The prompt, with `{text}` for the text; None: `SAID` in chats, else `PLAIN`.
    """

    name: ClassVar[str] = "summarization"
    auto_class: ClassVar[str] = CausalLm.auto_class
    main_metric: ClassVar[str] = CausalLm.main_metric
    shares: ClassVar[tuple[str, ...]] = CausalLm.shares
    labels: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[tuple[str, ...]] = CausalLm.suffixes
    usual_tokens: ClassVar[int] = CausalLm.usual_tokens

    template: str | None = None

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits.

        Raises:
            DataError: A split cannot be read, or there is nothing to read.
            RecipeError: The prompt has no place for the text.
        """
        if files.prompt is not None:
            check_prompt(files.prompt)
        splits = {}
        for name, source in split_sources(files).items():
            read = read_summaries(source, split=name, options=files.options)
            splits[name] = Split(name=name, source=read.source, examples=read.examples)
        return TaskData(task=Summarization(template=files.prompt), splits=splits, config_overrides={})

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """Token ids, and as the label of each the token that follows, where that belongs to the summary or its end.

        Raises:
            DataError: The tokenizer's chat template refuses the row.
        """
        row, fitted = self._fitted(_as_row(example), tokenizer, max_tokens)
        return encode_tokens(row, max_tokens, truncated=fitted)

    def pieces(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> tuple[Example, ...]:  # noqa: ARG002 - as ReshapingTask
        """The row: its text is shortened where it is encoded."""
        return (example,)

    def joined(self, rows: Sequence[EncodedExample], max_tokens: int) -> tuple[EncodedExample, ...] | None:  # noqa: ARG002 - as ReshapingTask
        """None: rows stay for themselves."""
        return None

    def notes(self, examples: Sequence[Example], tokenizer: "LoadedTokenizer") -> tuple[str, ...]:
        """Which template writes the rows, and that nothing ends a summary."""
        return language_notes(examples, tokenizer, self.template or PLAIN)

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """See `CausalLm`."""
        return _LANGUAGE.loss_sum(logits, labels)

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """Tokens that are learnt."""
        return _LANGUAGE.count_loss_tokens(labels)

    def predictions(self, logits: "Tensor") -> "Tensor":
        """See `CausalLm`."""
        return _LANGUAGE.predictions(logits)

    def metric(self) -> LanguageMetric:
        """Perplexity and token accuracy of the given summaries."""
        return LanguageMetric()

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> Example:  # noqa: ARG002 - as Task
        """Refused: single next tokens are no summary.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "summaries are made by generating text", hint="`coterie predict` and `coterie.generate` do that"
        )

    def prompt(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> IntArray:
        """See `GenerativeTask`; a text that is too long loses its end."""
        row, _ = self._fitted(SummarizedText(text=_as_row(example).text, line=example.line), tokenizer, max_tokens)
        return cut_left(row.ids, len(tokenizer.leading_ids), max_tokens)

    def stop_ids(self, tokenizer: "LoadedTokenizer") -> tuple[int, ...]:
        """See `GenerativeTask`."""
        return turn_end_ids(tokenizer)

    def answer(self, example: Example, tokenizer: "LoadedTokenizer", generated_ids: Sequence[int]) -> Example:
        """The text with the generated summary."""
        summary = generated_text(tokenizer, generated_ids).strip()
        return msgspec.structs.replace(_as_row(example), summaries=(summary,))

    def generation_metric(self) -> RougeMetric:
        """ROUGE against the row's own summaries."""
        return RougeMetric(lambda example: _as_row(example).summaries)

    def text(self, examples: Sequence[Example]) -> str:
        """Rows as JSON Lines."""
        return to_jsonl(examples)

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write rows as `.jsonl`."""
        write_jsonl(path, examples)

    def _prompt(self, text: str) -> Prompt:
        if self.template is not None:
            filled = fill_prompt(self.template, text)
            return Prompt(filled, filled)
        return Prompt(fill_prompt(SAID, text), fill_prompt(PLAIN, text))

    def _fitted(self, row: SummarizedText, tokenizer: "LoadedTokenizer", max_tokens: int) -> tuple[TokenRow, bool]:
        """The row's tokens with as much of the text's beginning as fits, and whether something is missing.

        What a text's end takes in tokens is guessed from its length, again until it fits: tokens do not add up exactly.
        """
        kept = len(row.text)
        while True:
            tokens = self._tokens(row, row.text[:kept], tokenizer)
            excess = len(tokens.ids) - max_tokens
            if excess <= 0 or kept == 0:
                return tokens, kept < len(row.text)
            text_tokens = len(tokenizer.encode_text(row.text[:kept]))
            kept = min(kept - 1, kept * max(text_tokens - excess, 0) // max(text_tokens, 1))

    def _tokens(self, row: SummarizedText, text: str, tokenizer: "LoadedTokenizer") -> TokenRow:
        if row.summaries:
            return answer_tokens(tokenizer, self._prompt(text), row.summaries[0], row.line)
        ids = answer_prompt(tokenizer, self._prompt(text), row.line)
        ids = ids or [tokenizer.id_of_nothing]  # a prompt of the text alone, and an empty text
        return TokenRow(ids, [False] * len(ids))


def _as_row(example: Example) -> SummarizedText:
    assert isinstance(example, SummarizedText), "rows come from this task's own readers"
    return example
