"""Which columns of a data set hold a text, the second text of a pair, and the answer: the names that are usual."""

from collections.abc import Sequence

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.options import Column, ReadOptions, find_column
from coterie.tasks.rows import RowFile

PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("#1 string", "#2 string"),
    ("text", "text_pair"),
    ("text", "pair"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
)
"""The columns of GLUE's pairs, in its own files and on the hub, and other usual ones."""

TEXTS = (
    *("text", "sentence", "content", "review", "utterance", "query", "question", "sentence1", "question1", "premise"),
    *("title", "document", "tweet", "dialogue"),
)
LABELS = (
    *("label", "gold_label", "labels", "quality", "is_duplicate", "class", "category", "intent", "sentiment", "topic"),
    *("section", "target", "score"),
)
SCORES = ("score", "label", "similarity_score", "similarity", "rating", "relatedness_score", "labels", "target")


class TextColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Names of columns; `pair` is None for single texts, `answer` where there are no answers."""

    text: str
    pair: str | None = None
    answer: str | None = None

    def describe(self) -> str:
        """In words, for a note."""
        texts = f"texts from the column {self.text}" if self.pair is None else f"pairs from {self.text} and {self.pair}"
        return texts if self.answer is None else f"{texts}, answers from {self.answer}"


def find_columns(file: RowFile, options: ReadOptions, answers: Sequence[str]) -> TextColumns:
    """The columns that the user named, or else the usual ones; without an answer where there is no usual column of it.

    Naming the text's column alone means single texts.

    Args:
        file: The rows.
        options: What the user named.
        answers: Usual names of the column with the answers; not looked for unless `options.tagged`.

    Raises:
        DataError: A named column, or any usual one for the text, is not there.
    """
    names = list(dict.fromkeys(name for row in file.rows for name in row.fields))
    text, pair = _texts(file, names, options)
    if not options.tagged:
        return TextColumns(text=text, pair=pair)
    wanted = options.label_column
    others = [name for name in names if name not in {text, pair}]
    answer = find_column(names if isinstance(wanted, int) else others, wanted, answers)
    if wanted is not None and (answer is None or answer in {text, pair}):
        raise absent_column(file, wanted, (), "label_column")
    return TextColumns(text=text, pair=pair, answer=answer)


def absent_column(file: RowFile, wanted: Column, usual: Sequence[str], option: str) -> DataError:
    """What is said where a column is not there; `wanted` is what the user named, `usual` what was looked for else."""
    names = list(dict.fromkeys(name for row in file.rows for name in row.fields))
    looked_for = repr(wanted) if wanted is not None else " or ".join(usual)
    return DataError(
        f"{file.source}: there is no column {looked_for}; the columns are {', '.join(names)}",
        hint=f"say by `{option}` which one to read",
    )


def _texts(file: RowFile, names: Sequence[str], options: ReadOptions) -> tuple[str, str | None]:
    text, pair = options.text_column, options.pair_column
    if text is None and pair is None:
        for first, second in PAIRS:
            found = find_column(names, None, (first,)), find_column(names, None, (second,))
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
    first_name = find_column(names, text, TEXTS)
    if first_name is None:
        raise absent_column(file, text, TEXTS[:4], "text_column")
    if pair is None:
        return first_name, None
    second_name = find_column(names, pair, ())
    if second_name is None:
        raise absent_column(file, pair, (), "pair_column")
    return first_name, second_name
