"""Any data source in, checked IOB2 sentences out: finds the format, the split, and the tag scheme."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from coterie.errors import DataError
from coterie.tasks.examples import TaggedSentence
from coterie.tasks.readers import hf_datasets
from coterie.tasks.readers.conll import read_conll
from coterie.tasks.readers.csv_rows import find_delimiter, read_csv
from coterie.tasks.readers.options import DataSource, FileFormat, RawSentence, ReadOptions
from coterie.tasks.readers.plain_text import read_plain_text
from coterie.tasks.readers.records import read_jsonl, read_records
from coterie.tasks.readers.text import read_text
from coterie.tasks.sources import open_source, pick_split, refuse_binary, require_split_file, source_name
from coterie.tasks.tag_schemes import name_scheme, split_tag, to_iob2

_SUFFIXES: Mapping[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".iob2": "conll",
}


class SentenceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from one source.

    Attributes:
        source: File or folder, or what the rows in memory are called.
        sentences: All sentences, in order, tags in IOB2.
        scheme: The scheme the source uses: `IOB2`, `IOB1`, `IOBES`, or `none` if it holds no tags.
        repaired_tags: `I-` tags of an IOB2 source that continued nothing and became `B-`.
    """

    source: str
    sentences: tuple[TaggedSentence, ...]
    scheme: str
    repaired_tags: int


def _find_format(path: Path, text: str, options: ReadOptions) -> FileFormat:
    suffix = path.suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    if first.startswith("{") and first.endswith("}"):
        return "jsonl"
    if find_delimiter(first):
        return "csv"
    return "conll" if options.tagged or suffix != ".txt" else "text"


def _read_file(path: Path, options: ReadOptions) -> list[RawSentence]:
    refuse_binary(path)
    text = read_text(path, options.encoding)
    file_format = options.format if options.format != "auto" else _find_format(path, text, options)
    if file_format == "jsonl":
        return read_jsonl(text, str(path), options)
    if file_format == "csv":
        return read_csv(text, str(path), options)
    if file_format == "text":
        if options.tagged:
            raise DataError(f"{path}: plain text holds no tags", hint="use CoNLL columns, JSON Lines or CSV")
        return read_plain_text(text)
    if file_format == "datasets":
        raise DataError(f"{path}: is a file, not a folder made by `save_to_disk`", hint="give the folder")
    return read_conll(text, str(path), options)


def _read_raw(source: DataSource, split: str, options: ReadOptions) -> tuple[str, list[RawSentence]]:
    opened = open_source(source, options)
    if not isinstance(opened, Path):
        name = source_name(source, split)
        rows = pick_split(opened, split, name) if isinstance(opened, Mapping) else opened
        return name, read_records(rows, name, hf_datasets.with_label_names(rows, options))
    file = require_split_file(opened, split) if opened.is_dir() else opened
    return str(file), _read_file(file, options)


def _check(sentence: RawSentence, index: int, source: str) -> None:
    """Refuse words that no tokenizer can take, and tags outside every known scheme."""

    def where(word: int) -> str:
        line = sentence.lines[word]
        return f"{source}:{line}" if line else f"{source}, row {index}"

    for position, word in enumerate(sentence.words):
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise DataError(f"{where(position)}: half a surrogate pair in {word!r}", hint="write the file as UTF-8")
    for position, tag in enumerate(sentence.tags):
        if split_tag(tag) is None:
            raise DataError(
                f"{where(position)}: {tag!r} is not an entity tag",
                hint="tags are O, or B-, I- (IOB), E-, S- (IOBES), L-, U- (BILOU) and a type, such as B-PER; "
                "is it the right column?",
            )


def _to_sentence(raw: RawSentence) -> TaggedSentence:
    return TaggedSentence(words=raw.words, tags=to_iob2(raw.tags), line=raw.lines[0] if raw.lines else 0)


def read_sentences(source: DataSource, *, split: str = "train", options: ReadOptions | None = None) -> SentenceFile:
    """Read one split of tagged sentences (untagged ones if `options.tagged` is false).

    Tags in IOB1, IOBES, BILOU or BMES become IOB2. An `I-` that continues nothing starts an entity, as the CoNLL
    evaluation and seqeval read it.

    Args:
        source: A file, a folder of split files or made by `save_to_disk`, or rows in memory.
        split: `train`, `dev` or `test`: which one to take where the source holds several.
        options: How to read it; guessed by default.

    Raises:
        DataError: The source cannot be read or understood; file and line are named.
        MissingPackageError: It needs the package `datasets`, which is absent.
    """
    options = options or ReadOptions()
    name, raw = _read_raw(source, split, options)
    if not any(sentence.words for sentence in raw):
        raise DataError(f"{name}: holds no sentence", hint="is it the right file, and whole?")
    for index, sentence in enumerate(raw):
        _check(sentence, index, name)
    sentences = tuple(_to_sentence(sentence) for sentence in raw)
    if not options.tagged:
        return SentenceFile(source=name, sentences=sentences, scheme="none", repaired_tags=0)
    scheme = name_scheme(sentence.tags for sentence in raw)
    repaired = _count_changes(raw, sentences) if scheme == "IOB2" else 0
    return SentenceFile(source=name, sentences=sentences, scheme=scheme, repaired_tags=repaired)


def _count_changes(raw: Sequence[RawSentence], sentences: Sequence[TaggedSentence]) -> int:
    return sum(
        one != other
        for before, after in zip(raw, sentences, strict=True)
        for one, other in zip(before.tags, after.tags, strict=True)
    )
