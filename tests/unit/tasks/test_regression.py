import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

from coterie.errors import DataError
from coterie.tasks import DataFiles, get_task
from coterie.tasks.collate import collate
from coterie.tasks.data_summary import encode_split
from coterie.tasks.examples import ScoredText
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.regression import Regression

TASK = Regression()
RELAXED = settings(deadline=None, max_examples=40)  # a busy machine is no failure
STS_B = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    '0\tmain\tMSR\t2012\t1\tnone\tnone\tA plane is taking off.\tAn air "plane" is off.\t5.000\n'
    "1\tmain\tMSR\t2012\t2\tnone\tnone\tA man plays.\tA man sleeps.\t0.8\n"
)


def rows(*scores):
    return [{"text": f"t{index}", "score": score} for index, score in enumerate(scores)]


def prepared(train, **options):
    return TASK.prepare(DataFiles(train=train, options=ReadOptions(**options)))


def test_sts_b_is_read_from_its_own_files(tmp_path):
    (tmp_path / "train.tsv").write_text(STS_B, encoding="utf-8")
    (tmp_path / "test.tsv").write_text("\n".join(line.rpartition("\t")[0] for line in STS_B.splitlines()))
    data = prepared(tmp_path)
    assert set(data.splits) == {"train"}
    first, second = data.splits["train"].examples
    assert first == ScoredText(text="A plane is taking off.", pair='An air "plane" is off.', score=5.0, line=2)
    assert second.score == 0.8
    notes = data.splits["train"].notes
    assert "train scores from 0.8 to 5, mean 2.9" in notes
    assert any("test data have no answers and are left out" in note for note in notes)
    assert data.config_overrides == {"id2label": {0: "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    assert get_task("regression") == data.task == TASK


def test_scores_may_be_numbers_or_strings_and_may_be_missing(tokenizer):
    data = prepared(rows(1, "2.5", None, " ", float("nan"), -3e-2))
    scores = [row.score for row in data.splits["train"].examples]
    assert scores == [1.0, 2.5, None, None, None, -0.03]
    encoded = encode_split(TASK, data.splits["train"], tokenizer, 20, for_training=True)
    assert encoded.summary.skipped_rows == 3
    assert {row.labels.dtype for row in encoded.rows} == {np.dtype(np.float32)}
    labels = collate(encoded.rows, pad_token_id=0)["labels"]
    assert labels.dtype == np.float32
    np.testing.assert_array_equal(labels, np.array([1.0, 2.5, -0.03], dtype=np.float32))
    kept = encode_split(TASK, data.splits["train"], tokenizer, 20, for_training=False)
    assert kept.summary.loss_tokens == 3
    assert len(kept.rows) == 6


@pytest.mark.parametrize("score", ["high", True, [1], 1e39, "inf", 10**400])
def test_what_is_no_score_is_refused_with_its_row(score):
    with pytest.raises(DataError, match=r"row 1: .* is not a score") as caught:
        prepared(rows(1, score))
    assert "sequence-classification" in caught.value.hint


def test_scores_that_are_all_equal_are_refused():
    with pytest.raises(DataError, match="every row has the score 2"):
        prepared(rows(2, 2.0))


numbers = st.floats(-50, 50, width=32) | st.just(float("nan"))


@RELAXED
@given(st.lists(numbers, min_size=1, max_size=6), st.integers(0, 2**31))
def test_the_loss_is_the_sum_of_squared_errors_over_rows_with_a_score(scores, seed):
    labels = torch.tensor(scores)
    logits = torch.randn(len(scores), 1, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    loss = TASK.loss_sum(logits, labels)
    loss.backward()
    known = ~labels.isnan()
    count = TASK.count_loss_tokens(labels.numpy())
    assert count == int(known.sum())
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[~known], torch.zeros_like(logits.grad[~known]))
    if count:
        expected = mse_loss(logits[known].squeeze(-1), labels[known])
        torch.testing.assert_close(loss / count, expected, rtol=1e-5, atol=1e-5)
    else:
        assert loss.item() == 0.0


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.tensor([[300.0], [1.0]], dtype=torch.bfloat16)
    assert TASK.loss_sum(logits, torch.tensor([0.0, 1.0])).item() == 90000.0
    assert TASK.predictions(logits).dtype == torch.float32
    assert TASK.predictions(logits).shape == (2,)


def test_predictions_are_decoded_and_written_in_every_format(tmp_path):
    examples = (ScoredText(text="a", pair="b"), ScoredText(text="c", pair="d", score=1.0))
    predicted = TASK.predictions(torch.tensor([[0.25], [-1.5]])).numpy()
    answers = [TASK.decode(example, None, score) for example, score in zip(examples, predicted, strict=True)]
    assert TASK.text(answers) == "0.25\ta\tb\n-1.5\tc\td\n"
    for suffix in TASK.suffixes:
        TASK.write(tmp_path / f"a{suffix}", answers)
    assert (tmp_path / "a.txt").read_text() == "0.25\n-1.5\n"
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0]) == {"text": "a", "pair": "b", "score": 0.25}
    for suffix in (".jsonl", ".csv"):
        again = TASK.prepare(DataFiles(test=tmp_path / f"a{suffix}")).splits["test"].examples
        assert [(row.text, row.pair, row.score) for row in again] == [(r.text, r.pair, r.score) for r in answers]
