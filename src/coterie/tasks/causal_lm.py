"""Causal language modelling: learn texts, answers to instructions, or the assistant's part of chats.

A label is the token that follows. Of a document everything is learnt, its end included; of an instruction the answer
and its end; of a chat every turn of the assistant. A document longer than the context is cut into pieces that are
learnt one by one; other rows keep their beginning, and one in which no answer is left is skipped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, assert_never

import msgspec
import numpy as np

from coterie.errors import RecipeError, UsageError
from coterie.tasks.chats import ASSISTANT, chat_prompt, chat_tokens, has_chat_template
from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, Example, IntArray, LabelArray, PredictedArray
from coterie.tasks.language_encoding import TokenRow, cut_left, encode_tokens, pack_rows
from coterie.tasks.language_metrics import LanguageMetric, RougeMetric
from coterie.tasks.language_rows import Chat, Instruction, Message, TextDocument
from coterie.tasks.language_writers import to_jsonl, write_jsonl
from coterie.tasks.read_language import LanguageFile, read_language
from coterie.tasks.splits import split_sources
from coterie.tasks.task import DataFiles, Split, TaskData
from coterie.tasks.templates import (
    Prompt,
    answer_prompt,
    answer_tokens,
    check_prompt,
    document_tokens,
    generated_text,
    instruction_texts,
    turn_end_ids,
)
from coterie.units import counted

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer

LanguageRow = TextDocument | Instruction | Chat


class CausalLm(msgspec.Struct, frozen=True, kw_only=True):
    """What a causal model learns to write.

    Attributes:
        template: What an instruction is wrapped in, with `{text}` and perhaps `{input}`; None: the usual way.
        packing: Several training rows share a context, without seeing each other.
    """

    name: ClassVar[str] = "causal-lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    main_metric: ClassVar[str] = "perplexity"
    shares: ClassVar[tuple[str, ...]] = ("token_accuracy",)
    labels: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)
    usual_tokens: ClassVar[int] = 1024

    template: str | None = None
    packing: bool = False

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits.

        Raises:
            DataError: A split cannot be read, or there is nothing to read.
            RecipeError: The prompt has no place for the text, or for an input that was named.
        """
        if files.prompt is not None:
            check_prompt(files.prompt)
        splits = {}
        for name, source in split_sources(files).items():
            read = read_language(source, split=name, options=files.options)
            if name == "train" and files.options.tagged:
                _check_prompt_is_used(files, read)
            notes = _notes_on_inputs(files, read)
            splits[name] = Split(name=name, source=read.source, examples=read.examples, notes=notes)
        task = CausalLm(template=files.prompt, packing=files.packing)
        return TaskData(task=task, splits=splits, config_overrides={})

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """Token ids, and as the label of each the token that follows, where that is learnt.

        Raises:
            DataError: The tokenizer's chat template refuses the row.
        """
        row = self._tokens(_as_row(example), tokenizer)
        return encode_tokens(row if row.ids else TokenRow([tokenizer.id_of_nothing], [False]), max_tokens)

    def pieces(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> tuple[Example, ...]:
        """A document cut so that each piece, with the special tokens around it, has at most `max_tokens`."""
        if not isinstance(example, TextDocument):
            return (example,)
        ids = tokenizer.encode_text(example.text)
        room = max(max_tokens - len(tokenizer.leading_ids) - 1, 1)
        if len(ids) <= room:
            return (example,)
        starts = range(0, len(ids), room)
        return tuple(
            TextDocument(
                text=tokenizer.decode(ids[start : start + room]),
                token_ids=tuple(ids[start : start + room]),
                ends=start + room >= len(ids),
                line=example.line,
            )
            for start in starts
        )

    def joined(self, rows: Sequence[EncodedExample], max_tokens: int) -> tuple[EncodedExample, ...] | None:
        """Packed rows, if `packing` says so."""
        return pack_rows(rows, max_tokens) if self.packing else None

    def notes(self, examples: Sequence[Example], tokenizer: "LoadedTokenizer") -> tuple[str, ...]:
        """Which template writes the rows, and that nothing ends an answer."""
        return language_notes(examples, tokenizer, self.template)

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Cross-entropy of the learnt tokens, summed, in float32.

        Args:
            logits: (B, T, V) in any floating type.
            labels: (B, T), `IGNORED_LABEL` where the next token is not learnt.
        """
        from coterie.tasks.cross_entropy import cross_entropy_sum  # noqa: PLC0415 - data and metrics need no torch

        return cross_entropy_sum(logits, labels)

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """Tokens that are learnt."""
        return int(np.count_nonzero(labels != IGNORED_LABEL))

    def predictions(self, logits: "Tensor") -> "Tensor":
        """The likeliest next token at each position: (B, T, V) to (B, T) int64."""
        return logits.argmax(dim=-1)

    def metric(self) -> LanguageMetric:
        """Perplexity and token accuracy."""
        return LanguageMetric()

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> Example:  # noqa: ARG002 - as Task
        """Refused: single next tokens are no answer.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a causal model answers by generating text", hint="`coterie predict` and `coterie.generate` do that"
        )

    def prompt(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> IntArray:
        """See `GenerativeTask`; a prompt that is too long loses its beginning."""
        row = _as_row(example)
        kept_first = len(tokenizer.leading_ids)
        match row:
            case TextDocument():
                ids = document_tokens(tokenizer, tokenizer.encode_text(row.text), ends=False).ids
            case Instruction():
                ids = answer_prompt(tokenizer, self._texts(row), row.line)
            case Chat():
                ids = chat_prompt(tokenizer, _asked(row), row.line)
            case _:
                assert_never(row)
        return cut_left(ids or [tokenizer.id_of_nothing], kept_first, max_tokens)

    def stop_ids(self, tokenizer: "LoadedTokenizer") -> tuple[int, ...]:
        """See `GenerativeTask`."""
        return turn_end_ids(tokenizer)

    def answer(self, example: Example, tokenizer: "LoadedTokenizer", generated_ids: Sequence[int]) -> Example:
        """The text written on, the instruction with its answer, or the chat with one more turn of the assistant."""
        text = generated_text(tokenizer, generated_ids)
        row = _as_row(example)
        match row:
            case TextDocument():
                return TextDocument(text=row.text + text, line=row.line)
            case Instruction():
                return msgspec.structs.replace(row, answer=text)
            case Chat():
                turn = Message(role=ASSISTANT, content=text)
                return Chat(messages=(*_asked(row), turn), line=row.line)
            case _:
                assert_never(row)

    def generation_metric(self) -> RougeMetric:
        """ROUGE of answers to instructions and of the last turn of chats; documents have nothing to compare with."""
        return RougeMetric(_own_answer)

    def text(self, examples: Sequence[Example]) -> str:
        """Rows as JSON Lines."""
        return to_jsonl(examples)

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write rows as `.jsonl`."""
        write_jsonl(path, examples)

    def _texts(self, row: Instruction) -> Prompt:
        return instruction_texts(row.text, row.context, self.template)

    def _tokens(self, row: LanguageRow, tokenizer: "LoadedTokenizer") -> TokenRow:
        match row:
            case TextDocument():
                ids = tokenizer.encode_text(row.text) if row.token_ids is None else row.token_ids
                return document_tokens(tokenizer, ids, ends=row.ends)
            case Instruction():
                return answer_tokens(tokenizer, self._texts(row), row.answer, row.line)
            case Chat():
                return chat_tokens(tokenizer, row.messages, row.line)
            case _:
                assert_never(row)


def _check_prompt_is_used(files: DataFiles, read: LanguageFile) -> None:
    """A prompt, or an input beside the text, for rows that have no place for either would be left out in silence."""
    if any(isinstance(example, Instruction) for example in read.examples):
        return
    kind = "chats" if isinstance(read.examples[0], Chat) else "texts, all of which is learnt"
    for option, value in (("prompt", files.prompt), ("pair_column", files.options.pair_column)):
        if value is not None:
            raise RecipeError(
                f"`{option}` is for instructions with answers, but the rows of {read.source} are {kind}",
                hint=f"leave {option} out, or name the columns of question and answer (text_column, label_column)",
            )


def _notes_on_inputs(files: DataFiles, read: LanguageFile) -> tuple[str, ...]:
    """What is said of inputs beside the instructions for which the user's prompt has no place.

    Raises:
        RecipeError: The user has named their column.
    """
    inputs = sum(isinstance(example, Instruction) and bool(example.context) for example in read.examples)
    if files.prompt is None or "{input}" in files.prompt or not inputs:
        return ()
    if files.options.pair_column is not None:
        raise RecipeError(
            f"the prompt {files.prompt!r} has no place for the inputs in the column {files.options.pair_column!r}",
            hint="write {input} where they belong, or leave pair_column out",
        )
    return (f"the prompt has no {{input}}: the inputs of {counted(inputs, 'row')} are left out",)


def language_notes(examples: Sequence[Example], tokenizer: "LoadedTokenizer", template: str | None) -> tuple[str, ...]:
    """What a user should know of how rows become tokens: the template, and a missing end of text."""
    notes = []
    if not all(isinstance(example, TextDocument) for example in examples):
        if has_chat_template(tokenizer):
            notes.append("prompts and answers are written by the tokenizer's chat template")
        elif template is None:
            notes.append("the tokenizer has no chat template: turns begin with lines like `### Instruction:`")
    if tokenizer.end_id is None:
        notes.append("the tokenizer has no end-of-text token: the model does not learn where an answer ends")
    return tuple(notes)


def _as_row(example: Example) -> LanguageRow:
    assert isinstance(example, TextDocument | Instruction | Chat), "rows come from this task's own readers"
    return example


def _asked(chat: Chat) -> tuple[Message, ...]:
    """The chat up to where the assistant answers last."""
    return chat.messages[:-1] if chat.messages[-1].role == ASSISTANT else chat.messages


def _own_answer(example: Example) -> tuple[str, ...]:
    match example:
        case Instruction() if example.answer is not None:
            return (example.answer,)
        case Chat() if example.messages[-1].role == ASSISTANT:
            return (example.messages[-1].content,)
        case _:
            return ()
