"""Rows of causal models out, as the readers take them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from coterie.errors import StorageError
from coterie.tasks.examples import Example
from coterie.tasks.language_rows import Chat, Instruction, SummarizedText, TextDocument
from coterie.tasks.writers import check_suffix


def to_jsonl(examples: Sequence[Example]) -> str:
    """One object a line: `text`; `instruction`, `input`, `output`; `messages`; or `dialogue`, `summary`."""
    return "".join(msgspec.json.encode(_fields(example)).decode() + "\n" for example in examples)


def write_jsonl(path: Path, examples: Sequence[Example]) -> None:
    """Write rows as JSON Lines.

    Raises:
        UsageError: The name ends in another suffix.
        StorageError: The file cannot be written.
    """
    check_suffix(path, (".jsonl",))
    try:
        path.write_bytes(to_jsonl(examples).encode("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}", hint="choose another path"
        ) from error


def _fields(example: Example) -> dict[str, object]:
    match example:
        case TextDocument():
            return {"text": example.text}
        case Instruction():
            context = {"input": example.context} if example.context else {}
            answer = {} if example.answer is None else {"output": example.answer}
            return {"instruction": example.text, **context, **answer}
        case Chat():
            return {"messages": [{"role": turn.role, "content": turn.content} for turn in example.messages]}
        case SummarizedText():
            names = ("summary",) if len(example.summaries) <= 1 else ("summaries",)
            values = example.summaries if len(example.summaries) <= 1 else (list(example.summaries),)
            return {"dialogue": example.text, **dict(zip(names, values, strict=False))}
        case _:
            raise AssertionError(f"no row of a causal model: {type(example).__name__}")
