"""What the writers write, the readers read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import DataError, StorageError, UsageError
from coterie.tasks.examples import TaggedSentence
from coterie.tasks.readers.conll import read_conll
from coterie.tasks.readers.csv_rows import read_csv
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.readers.records import read_jsonl
from coterie.tasks.writers import to_conll, to_csv, to_jsonl, write_sentences

RELAXED = settings(deadline=None, max_examples=60)  # a busy machine is no failure

ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
COLUMN = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff\t\n\r")
TAG = st.sampled_from(["O", "B-PER", "I-PER", "B-creative-work"])


def sentences(word, *, fewest_words=1):
    pair = st.tuples(word, TAG)
    return st.lists(st.lists(pair, min_size=fewest_words, max_size=6).map(build), min_size=1, max_size=4)


def build(pairs):
    return TaggedSentence(words=tuple(word for word, _ in pairs), tags=tuple(tag for _, tag in pairs))


def plain(rows):
    return [(row.words, row.tags) for row in rows]


@RELAXED
@given(sentences(st.text(COLUMN, min_size=1).filter(lambda word: word.strip(" ") and "-DOCSTART-" not in word)))
def test_conll_columns(rows):
    assert plain(read_conll(to_conll(rows), "x", ReadOptions())) == plain(rows)


@RELAXED
@given(sentences(st.text(ANY), fewest_words=0))
def test_json_lines(rows):
    assert plain(read_jsonl(to_jsonl(rows), "x", ReadOptions())) == plain(rows)


@RELAXED
@given(sentences(st.text(ANY, min_size=1)))
def test_csv(rows):
    assert plain(read_csv(to_csv(rows), "x", ReadOptions())) == plain(rows)


@pytest.mark.parametrize("word", ["", " ", "a\tb", "a\nb"])
def test_words_that_columns_cannot_hold_are_refused(word):
    with pytest.raises(DataError, match="cannot hold the word"):
        to_conll([TaggedSentence(words=(word,), tags=("O",))])


def test_the_suffix_decides_the_format_and_a_bad_place_is_said(tmp_path):
    rows = [TaggedSentence(words=("é",), tags=("B-X",))]
    write_sentences(tmp_path / "a.conll", rows)
    assert (tmp_path / "a.conll").read_bytes() == "é\tB-X\n".encode()
    with pytest.raises(UsageError, match="no format is known"):
        write_sentences(tmp_path / "a.docx", rows)
    with pytest.raises(StorageError, match="cannot be written"):
        write_sentences(tmp_path / "no" / "a.conll", rows)
