import pytest

from coterie.errors import DataError
from coterie.tasks import TokenClassification
from coterie.tasks.data_summary import encode_split
from coterie.tasks.examples import TaggedSentence
from coterie.tasks.task import Split

TASK = TokenClassification(labels=("O", "B-LOC", "I-LOC"))


def split_of(*examples: TaggedSentence) -> Split:
    return Split(name="train", source="rows", examples=examples, notes=("a note",))


SPLIT = split_of(
    TaggedSentence(words=("paris", "the", "berlin"), tags=("B-LOC", "O", "B-LOC")),
    TaggedSentence(words=("\u200b",), tags=("B-LOC",)),
    TaggedSentence(words=(), tags=()),
    TaggedSentence(words=("the",), tags=("O",)),
)


def test_training_skips_and_counts_rows_without_a_label(tokenizer):
    encoded = encode_split(TASK, SPLIT, tokenizer, 5, for_training=True)
    summary = encoded.summary
    assert [example.words[0] for example in encoded.examples] == ["paris", "the"]
    assert encoded.lengths.tolist() == [5, 3]
    assert (summary.rows, summary.words, summary.tokens, summary.loss_tokens) == (2, 4, 8, 3)
    assert (summary.truncated_rows, summary.truncated_words, summary.skipped_rows) == (1, 1, 2)
    assert summary.label_counts == {"O": 2, "B-LOC": 1}
    assert summary.token_percentiles == (5, 5, 5, 5)


def test_evaluation_keeps_every_row(tokenizer):
    encoded = encode_split(TASK, SPLIT, tokenizer, 100, for_training=False)
    assert encoded.examples == SPLIT.examples
    assert (encoded.summary.dropped_words, encoded.summary.skipped_rows) == (1, 0)


def test_the_description_says_all_that_was_lost(tokenizer):
    text = encode_split(TASK, SPLIT, tokenizer, 5, for_training=True).summary.describe()
    first, *others = text.splitlines()
    assert first.startswith("train: 2 rows, 4 words, 8 tokens, 3 with a label; tokens per row: half up to 5, ")
    assert others == [
        "  1 row of more than 5 tokens: 1 word cut",
        "  2 rows have no label left and are skipped",
        "  a note",
    ]


def test_data_without_any_label_are_refused(tokenizer):
    with pytest.raises(DataError, match="none of 1 rows has a labelled token within 9 tokens"):
        encode_split(TASK, split_of(TaggedSentence(words=("the",))), tokenizer, 9, for_training=True)
