"""CoNLL columns: one word a line, a blank line between sentences; tabs, or spaces as in the CoNLL-2003 files."""

import re
from collections.abc import Sequence

from coterie.errors import DataError
from coterie.tasks.readers.options import RawSentence, ReadOptions, SentenceCollector, column_index
from coterie.tasks.readers.text import split_lines
from coterie.tasks.tag_schemes import split_tag

_SPACES = re.compile(r" +")


def _is_hash(line: str) -> bool:
    """The line may be a comment such as `# id 17`, or the word `#`."""
    return line == "#" or line.startswith("# ")


class _Layout:
    """Separator and number of columns of one file, taken from its first line that surely holds a word."""

    def __init__(self, lines: Sequence[str]) -> None:
        certain = (line for line in lines if line.strip(" \t") and not _is_hash(line))
        words = (line for line in certain if not line.startswith("-DOCSTART-"))
        first = next(words, None) or next((line for line in lines if "\t" in line.strip(" \t")), "")
        self.tabs = "\t" in first
        self.count = len(self.split(first))

    def split(self, line: str) -> list[str]:
        """The columns of a line. Only the separator splits: words may hold other kinds of space."""
        return line.split("\t") if self.tabs else _SPACES.split(line.strip(" \t"))

    def is_word(self, columns: Sequence[str], tag_column: int) -> bool:
        """The columns of a line that begins with `#` are a word's, not a comment's."""
        if len(columns) != self.count:
            return False
        has_tag = -len(columns) <= tag_column < len(columns)
        return self.count == 1 or not has_tag or split_tag(columns[tag_column]) is not None


def _pick(columns: Sequence[str], index: int, where: str) -> str:
    if not -len(columns) <= index < len(columns):
        raise DataError(
            f"{where}: has {len(columns)} columns, so none with the index {index}",
            hint="give another index: 0 is the first, -1 the last",
        )
    return columns[index]


def _check_count(found: int, layout: _Layout, options: ReadOptions, where: str) -> None:
    if found == layout.count and (found > 1 or not options.tagged):
        return
    expected = f"the file's first has {layout.count}" if found != layout.count else "a word and a tag are needed"
    raise DataError(
        f"{where}: {found} column{'s' * (found != 1)}, but {expected}",
        hint="every line holds a word and its tag, separated by a tab or by spaces, and the same columns in all lines",
    )


def read_conll(text: str, source: str, options: ReadOptions) -> list[RawSentence]:
    """The sentences of a CoNLL file; `-DOCSTART-` lines and comments between sentences are skipped.

    Raises:
        DataError: A line has another number of columns than the first, or no word; `source` and line are named.
    """
    lines = split_lines(text)
    layout = _Layout(lines)
    word_column = column_index(options.text_column, 0)
    tag_column = column_index(options.label_column, -1)
    sentences = SentenceCollector()
    for number, line in enumerate(lines, start=1):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            sentences.finish()
            continue
        columns = layout.split(line)
        if not sentences.is_open and _is_hash(line) and not layout.is_word(columns, tag_column):
            continue
        where = f"{source}:{number}"
        _check_count(len(columns), layout, options, where)
        word = _pick(columns, word_column, where)
        if not word:
            raise DataError(f"{where}: the column of the word is empty", hint="remove the line or fill it in")
        tag = _pick(columns, tag_column, where).strip(" ") if options.tagged else None
        sentences.add(word, tag, number)
    sentences.finish()
    return sentences.done
