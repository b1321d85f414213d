import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import accuracy_score, classification_report

from coterie.tasks.entity_metric import EntityCounts

RELAXED = settings(deadline=None, max_examples=60)  # a busy machine is no failure

TAG = st.sampled_from(["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-MISC", "I-MISC"])
SENTENCES = st.lists(st.lists(st.tuples(TAG, TAG), min_size=1, max_size=8), min_size=1, max_size=6)


@RELAXED
@given(SENTENCES)
def test_every_figure_equals_seqevals(sentences):
    gold = [[one for one, _ in sentence] for sentence in sentences]
    predicted = [[other for _, other in sentence] for sentence in sentences]
    counts = EntityCounts()
    for one, other in zip(gold, predicted, strict=True):
        counts.add(one, other)
    result = counts.result()
    assert result["word_accuracy"] == pytest.approx(accuracy_score(gold, predicted))
    if not any(tag != "O" for sentence in (*gold, *predicted) for tag in sentence):
        assert result["entity_f1"] == 0.0  # seqeval cannot report on no type at all
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = classification_report(gold, predicted, output_dict=True, zero_division=0)
    micro = expected["micro avg"]
    assert result["entity_f1"] == pytest.approx(micro["f1-score"])
    assert result["entity_precision"] == pytest.approx(micro["precision"])
    assert result["entity_recall"] == pytest.approx(micro["recall"])
    assert result["entities_gold"] == micro["support"]
    for entity_type in ("PER", "LOC", "MISC"):
        assert (entity_type in expected) == (f"entity_f1/{entity_type}" in result)
        if entity_type in expected:
            assert result[f"entity_f1/{entity_type}"] == pytest.approx(expected[entity_type]["f1-score"])
            assert result[f"entities_gold/{entity_type}"] == expected[entity_type]["support"]


def test_the_report_names_types_and_both_means():
    counts = EntityCounts()
    counts.add(["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "I-PER", "O", "B-PER"])
    assert counts.report().splitlines() == [
        "entity type            precision  recall     F1  entities",
        "LOC                         0.0%    0.0%   0.0%         1",
        "PER                        50.0%  100.0%  66.7%         1",
        "all (micro)                50.0%   50.0%  50.0%         2",
        "mean of types (macro)      25.0%   50.0%  33.3%         2",
        "3 of 4 words tagged right",
    ]


def test_nothing_counted_gives_zeros_and_a_report():
    counts = EntityCounts()
    assert set(counts.result().values()) == {0.0}
    assert "0 of 0 words" in counts.report()
