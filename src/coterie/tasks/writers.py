"""Tagged sentences out, in the formats that the readers take: the user-level result of `predict`."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from coterie.errors import DataError, StorageError, UsageError
from coterie.tasks.examples import TaggedSentence


def to_conll(sentences: Sequence[TaggedSentence]) -> str:
    """Two columns, tab-separated, a blank line after each sentence.

    Raises:
        DataError: A word is empty or holds a tab or a line end, which columns cannot express.
    """
    blocks = []
    for number, sentence in enumerate(sentences, start=1):
        for word in sentence.words:
            if not word.strip(" ") or any(character in word for character in "\t\n\r"):
                raise DataError(f"sentence {number}: CoNLL columns cannot hold the word {word!r}", hint="use .jsonl")
        blocks.append("".join(f"{word}\t{tag}\n" for word, tag in zip(sentence.words, sentence.tags, strict=True)))
    return "\n".join(blocks)


def to_jsonl(sentences: Sequence[TaggedSentence]) -> str:
    """One object a line with `tokens` and `ner_tags`."""
    encode = msgspec.json.encode
    return "".join(
        encode({"tokens": sentence.words, "ner_tags": sentence.tags}).decode() + "\n" for sentence in sentences
    )


def to_csv(sentences: Sequence[TaggedSentence]) -> str:
    """Columns `sentence_id`, `word`, `tag`; an empty sentence cannot be expressed and leaves no row."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(("sentence_id", "word", "tag"))
    for number, sentence in enumerate(sentences, start=1):
        writer.writerows((number, word, tag) for word, tag in zip(sentence.words, sentence.tags, strict=True))
    return out.getvalue()


_WRITERS: Mapping[str, Callable[[Sequence[TaggedSentence]], str]] = {
    ".conll": to_conll,
    ".jsonl": to_jsonl,
    ".csv": to_csv,
}


SENTENCE_SUFFIXES = tuple(_WRITERS)
"""The formats of tagged sentences."""


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file name that says no format of the task, before any work is done for it.

    Raises:
        UsageError: The name ends in none of `suffixes`.
    """
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"no format is known by the name {path}", hint=f"end it in {' or '.join(suffixes)}")


def write_sentences(path: Path, sentences: Sequence[TaggedSentence]) -> None:
    """Write tagged sentences in the format that the file's name says.

    Raises:
        UsageError: The name ends in no known suffix.
        DataError: A word cannot be written in this format.
        StorageError: The file cannot be written.
    """
    check_suffix(path, SENTENCE_SUFFIXES)
    text = _WRITERS[path.suffix.lower()](sentences)
    try:
        path.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}", hint="choose another path"
        ) from error
