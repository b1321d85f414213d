"""Plain text without tags, one sentence a line, to be tagged by a model."""

import re

from coterie.tasks.readers.options import RawSentence
from coterie.tasks.readers.text import split_lines

_WORD = re.compile(r"\w+(?:[-'’.]\w+)*|[^\w\s]")


def split_words(sentence: str) -> tuple[str, ...]:
    """Words and punctuation marks as the usual NER data sets separate them: `Mr. O'Neil's` is `Mr . O'Neil's`."""
    return tuple(_WORD.findall(sentence))


def read_plain_text(text: str) -> list[RawSentence]:
    """A sentence from each line that is not blank."""
    split = [(number, split_words(line)) for number, line in enumerate(split_lines(text), start=1)]
    return [RawSentence(words=words, tags=(), lines=(number,) * len(words)) for number, words in split if words]
