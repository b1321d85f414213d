"""Data sources in, rows of causal models out: which columns mean what, and how plain text falls into documents."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from coterie.errors import DataError
from coterie.tasks.examples import Example
from coterie.tasks.language_rows import Chat, Instruction, Message, SummarizedText, TextDocument
from coterie.tasks.readers.options import DataSource, ReadOptions, find_column
from coterie.tasks.readers.row import Row
from coterie.tasks.readers.text import read_text, split_lines
from coterie.tasks.rows import RowFile, read_rows, text_of
from coterie.tasks.sources import open_source, require_split_file

CHAT_COLUMNS = ("messages", "conversations", "conversation")
INSTRUCTION_COLUMNS = ("instruction", "prompt", "question", "query")
CONTEXT_COLUMNS = ("input", "context")
ANSWER_COLUMNS = ("output", "response", "answer", "completion")
TEXT_COLUMNS = ("text", "document", "content")
DIALOGUE_COLUMNS = ("dialogue", "document", "article", "source", "text")
SUMMARY_COLUMNS = ("summary", "summaries", "highlights", "target")
NUMBERED_SUMMARY = re.compile(r"summary ?\d+", re.IGNORECASE)
"""How data sets with several summaries of one text call their columns (DialogSum's test data)."""

_PLAIN_TEXT = (".txt", ".text", ".md")
_ROLES: Mapping[str, str] = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""What the format with `from` and `value` calls the speakers."""


class LanguageFile(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one source, and where it is, in words."""

    source: str
    examples: tuple[Example, ...]


def read_language(source: DataSource, *, split: str, options: ReadOptions) -> LanguageFile:
    """Documents, instructions or chats: which of them the columns of the first row say.

    A text file (.txt, .md) holds documents: blank lines separate them, or line ends where no line is blank.

    Raises:
        DataError: The source cannot be read or understood; file and line are named.
    """
    opened = open_source(source, options)
    if isinstance(opened, Path):
        path = require_split_file(opened, split) if opened.is_dir() else opened
        if options.format == "auto" and path.suffix.lower() in _PLAIN_TEXT:
            return LanguageFile(source=str(path), examples=_documents(path, options))
    rows = read_rows(source, split=split, options=options)
    return _read_each(rows, _reader_for(rows, options, for_training=split == "train"))


def read_summaries(source: DataSource, *, split: str, options: ReadOptions) -> LanguageFile:
    """Texts with their summaries, without blank ones; they may be missing where `options.tagged` is false.

    Raises:
        DataError: The source cannot be read or understood; file and line are named.
    """
    rows = read_rows(source, split=split, options=options)
    names = list(rows.rows[0].fields)
    text = _column(rows, names, options.text_column, DIALOGUE_COLUMNS, "the text")
    summaries = _summary_columns(names, options)
    if options.tagged and not summaries:
        raise _no_column(rows, options.label_column, SUMMARY_COLUMNS, "the summary")

    def summarized(row: Row, where: str) -> Example:
        found = [summary for name in summaries for summary in _texts(row.fields.get(name), where)]
        if options.tagged and not found:
            raise DataError(f"{where}: has no summary", hint="remove the row or write one")
        written = tuple(summary for summary in found if summary.strip())
        return SummarizedText(text=_text(row, text, where, "the text"), summaries=written, line=row.line)

    return _read_each(rows, summarized)


def _documents(path: Path, options: ReadOptions) -> tuple[TextDocument, ...]:
    lines = split_lines(read_text(path, options.encoding))
    has_blank = any(not line.strip() for line in _without_edges(lines))
    documents = []
    block: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            block.append(line)
        if block and (not line.strip() or not has_blank):
            first = number - len(block) + (1 if line.strip() else 0)
            text = text_of("\n".join(block), f"{path}:{first}", "the text")
            documents.append(TextDocument(text=text, line=first))
            block = []
    if not documents:
        raise DataError(f"{path}: holds no text", hint="is it the right file, and whole?")
    return tuple(documents)


def _without_edges(lines: Sequence[str]) -> Sequence[str]:
    """Without blank lines at both ends, which separate nothing."""
    filled = [index for index, line in enumerate(lines) if line.strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else ()


def _read_each(rows: RowFile, read: Callable[[Row, str], Example]) -> LanguageFile:
    examples = tuple(read(row, rows.where(index)) for index, row in enumerate(rows.rows))
    return LanguageFile(source=rows.source, examples=examples)


def _reader_for(rows: RowFile, options: ReadOptions, *, for_training: bool) -> Callable[[Row, str], Example]:
    """How to read rows with the columns of the first one; other splits than that for training may have no inputs."""
    first = rows.rows[0].fields
    names = list(first)
    usual = (*CHAT_COLUMNS, *INSTRUCTION_COLUMNS, *TEXT_COLUMNS)
    text = _column(rows, names, options.text_column, usual, "the text")
    if isinstance(first[text], list | tuple):
        return lambda row, where: Chat(messages=_messages(row.fields.get(text), where), line=row.line)
    if options.text_column is None and text.strip().lower() in CHAT_COLUMNS:
        _messages(first[text], rows.where(0))  # no text to learn as it is, though it may be one: JSON within a string
    if not _is_instruction(text, names, options):
        return lambda row, where: TextDocument(text=_text(row, text, where, "the text"), line=row.line)
    every = list(dict.fromkeys(name for row in rows.rows for name in row.fields))  # the first row may lack its input
    context = find_column(every, options.pair_column, CONTEXT_COLUMNS)
    if context is None and options.pair_column is not None and for_training:
        raise _no_column(rows, options.pair_column, CONTEXT_COLUMNS, "the input")
    answer = find_column(names, options.label_column, ANSWER_COLUMNS)
    if options.tagged and answer is None:
        raise _no_column(rows, options.label_column, ANSWER_COLUMNS, "the answer")

    def instruction(row: Row, where: str) -> Example:
        return Instruction(
            text=_text(row, text, where, "the instruction"),
            context="" if context is None else text_of(row.fields.get(context) or "", where, "the input"),
            answer=_answer(row, answer, where) if options.tagged and answer is not None else None,
            line=row.line,
        )

    return instruction


def _answer(row: Row, column: str, where: str) -> str | None:
    """The answer; None where it is blank: nobody has written it yet."""
    text = _text(row, column, where, "the answer")
    return text if text.strip() else None


def _is_instruction(text: str, names: Sequence[str], options: ReadOptions) -> bool:
    """Not a document: by the column's name, or because the user says where answers are."""
    return (
        options.label_column is not None
        or find_column([text], None, INSTRUCTION_COLUMNS) is not None
        or (options.text_column is not None and find_column(names, None, ANSWER_COLUMNS) is not None)
    )


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where}: the chat is no list of messages", hint=_CHAT_HINT)
    return tuple(_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1))


_CHAT_HINT = 'a chat looks like [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]'


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: is no object", hint=_CHAT_HINT)
    role, content = (value.get(key, value.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}: has no role", hint=_CHAT_HINT)
    return Message(role=_ROLES.get(role, role), content=text_of(content, where, "the content"))


def _summary_columns(names: Sequence[str], options: ReadOptions) -> tuple[str, ...]:
    found = find_column(names, options.label_column, SUMMARY_COLUMNS)
    if found is not None or options.label_column is not None:
        return () if found is None else (found,)
    return tuple(name for name in names if NUMBERED_SUMMARY.fullmatch(name.strip()))


def _texts(value: object, where: str) -> list[str]:
    """A summary, or a list of them; none where the field is null."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [text_of(item, where, "the summary") for item in values]


def _text(row: Row, column: str, where: str, what: str) -> str:
    return text_of(row.fields.get(column), where, what)


def _column(rows: RowFile, names: Sequence[str], wanted: int | str | None, usual: Sequence[str], what: str) -> str:
    found = find_column(names, wanted, usual)
    if found is None:
        raise _no_column(rows, wanted, usual, what)
    return found


def _no_column(rows: RowFile, wanted: int | str | None, usual: Sequence[str], what: str) -> DataError:
    looked_for = repr(wanted) if wanted is not None else " or ".join(usual)
    return DataError(
        f"{rows.where(0)}: has no column {looked_for} for {what}; its columns: {', '.join(rows.rows[0].fields)}",
        hint="say which columns to use (text_column, pair_column, label_column)",
    )
