"""CSV with one word a row and a column that says to which sentence it belongs (the usual Kaggle layout)."""

import csv
import io
from collections.abc import Sequence

from coterie.errors import DataError
from coterie.tasks.readers.options import Column, RawSentence, ReadOptions, SentenceCollector, find_column

SENTENCE_COLUMNS = ("sentence_id", "sentence #", "sentence", "sentence_idx", "sent_id")
WORD_COLUMNS = ("word", "token", "words", "tokens")
TAG_COLUMNS = ("tag", "ner_tag", "label", "ner", "tags")
_DELIMITERS = (",", "\t", ";")


def find_delimiter(header: str) -> str | None:
    """The delimiter under which the first line names a sentence and a word column; `None` if it does not."""
    for delimiter in _DELIMITERS:
        names = [name.strip().strip('"').lower() for name in header.split(delimiter)]
        if find_column(names, None, SENTENCE_COLUMNS) and find_column(names, None, WORD_COLUMNS):
            return delimiter
    return None


def _column(header: Sequence[str], wanted: Column, usual: Sequence[str], source: str) -> int:
    name = find_column(header, wanted, usual)
    if name is None:
        looked_for = repr(wanted) if wanted is not None else " or ".join(usual)
        raise DataError(
            f"{source}:1: the header has no column {looked_for}; its columns: {', '.join(header)}",
            hint="say which columns hold the sentence, the word and the tag",
        )
    return header.index(name)


def read_csv(text: str, source: str, options: ReadOptions) -> list[RawSentence]:
    """The sentences of a CSV file with a header; an empty sentence column means: the same sentence as above.

    Raises:
        DataError: A column is missing, a row has another number of fields, or quotes are broken.
    """
    header_line = text.partition("\n")[0].removesuffix("\r")
    delimiter = find_delimiter(header_line) or max(_DELIMITERS, key=header_line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    sentences = SentenceCollector()
    try:
        header = [name.strip() for name in next(reader, [])]
        sentence_column = _column(header, options.sentence_column, SENTENCE_COLUMNS, source)
        word_column = _column(header, options.text_column, WORD_COLUMNS, source)
        tag_column = _column(header, options.label_column, TAG_COLUMNS, source) if options.tagged else None
        current = ""
        for row in reader:
            if not any(row):
                continue
            where = f"{source}:{reader.line_num}"
            if len(row) != len(header):
                raise DataError(f"{where}: has {len(row)} fields, the header {len(header)}", hint="check its quotes")
            name = row[sentence_column].strip()
            if name and name != current:
                sentences.finish()
                current = name
            if not row[word_column]:
                raise DataError(f"{where}: the word is empty", hint="remove the row or fill it in")
            tag = None if tag_column is None else row[tag_column].strip()
            sentences.add(row[word_column], tag, reader.line_num)
    except csv.Error as error:
        raise DataError(
            f"{source}:{reader.line_num}: broken CSV: {error}", hint="a quote inside a quoted field is doubled"
        ) from error
    sentences.finish()
    return sentences.done
