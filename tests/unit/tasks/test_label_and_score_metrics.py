import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from coterie.tasks.examples import LabelledText, ScoredText
from coterie.tasks.label_metric import MOST_LABELS_SHOWN, LabelMetric
from coterie.tasks.score_metric import ScoreMetric

RELAXED = settings(deadline=None, max_examples=30)  # a busy machine is no failure


def labelled(gold, predicted, labels):
    metric = LabelMetric(labels)
    for label, answer in zip(gold, predicted, strict=True):
        metric.add(LabelledText(text="x", label=label), None, np.int64(labels.index(answer)))
    return metric


def scored(gold, predicted):
    metric = ScoreMetric()
    for score, answer in zip(gold, predicted, strict=True):
        metric.add(ScoredText(text="x", score=score), None, np.float32(answer))
    return metric


def test_two_labels_give_glues_figures():
    gold, predicted = list("1110010011"), list("1010011011")
    figures = labelled(gold, predicted, ["0", "1"]).result()
    assert figures["accuracy"] == 0.8
    assert figures["binary_f1"] == pytest.approx(metrics.f1_score(gold, predicted, pos_label="1"))
    assert figures["macro_f1"] == pytest.approx(metrics.f1_score(gold, predicted, average="macro"))
    assert figures["matthews"] == pytest.approx(metrics.matthews_corrcoef(gold, predicted))
    assert (figures["rows"], figures["rows_correct"]) == (10, 8)


@RELAXED
@given(st.lists(st.tuples(st.sampled_from("abcx"), st.sampled_from("abc")), max_size=12))
def test_every_figure_is_finite_and_no_warning_is_given_whatever_is_predicted(pairs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric = labelled([gold for gold, _ in pairs], [answer for _, answer in pairs], ["a", "b", "c"])
        figures = metric.result()
        report = metric.report()
    assert np.isfinite(list(figures.values())).all()
    assert figures["rows"] == len(pairs)
    assert report
    for name in ("accuracy", "macro_f1"):
        assert 0.0 <= figures[name] <= 1.0


def test_always_the_same_answer_has_the_correlation_0_and_the_report_says_so():
    metric = labelled(["a", "b", "a"], ["b", "b", "b"], ["a", "b"])
    assert metric.result()["matthews"] == 0.0
    assert metric.result()["f1/a"] == 0.0
    assert "every row is predicted as 'b': the correlation is set to 0" in metric.report()


def test_rows_without_a_label_are_left_out_and_unknown_labels_count_as_wrong():
    metric = labelled([None, "new", "a"], ["a", "a", "a"], ["a", "b"])
    figures = metric.result()
    assert (figures["rows"], figures["accuracy"]) == (2, 0.5)
    assert figures["f1/new"] == 0.0
    assert "new" in metric.report()
    assert labelled([None], ["a"], ["a", "b"]).report() == "no row has a label to compare with"


def test_the_report_has_a_line_for_each_label_and_of_many_the_worst():
    metric = labelled(["yes", "no", "no"], ["yes", "no", "yes"], ["no", "yes"])
    report = metric.report()
    assert [line.split()[0] for line in report.splitlines()[1:3]] == ["no", "yes"]
    assert "F1 of 'yes' (label 1): 66.7%" in report
    assert "2 of 3 rows right" in report
    many = [f"label {index:03}" for index in range(60)]
    lines = labelled(many, [*many[:30], *many[:30]], many).report().splitlines()
    assert sum(line.startswith("label ") and "%" in line for line in lines) == MOST_LABELS_SHOWN
    assert f"(the {MOST_LABELS_SHOWN} labels with the lowest F1 of 60)" in lines


def test_correlations_are_those_of_scipy():
    draw = np.random.default_rng(2)
    gold = draw.normal(size=40)
    predicted = (gold + draw.normal(size=40)).astype(np.float32)
    figures = scored(gold.tolist(), predicted).result()
    assert figures["spearman"] == pytest.approx(stats.spearmanr(gold, predicted).statistic)
    assert figures["pearson"] == pytest.approx(stats.pearsonr(gold, predicted.astype(np.float64)).statistic)
    assert figures["mean_squared_error"] == pytest.approx(np.mean((gold - predicted) ** 2), rel=1e-6)


@pytest.mark.parametrize(
    ("gold", "predicted", "reason"),
    [
        ([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], "every row is predicted as 0.5"),
        ([2.0, 2.0], [0.5, 0.7], "every row has the score 2"),
        ([2.0], [0.5], "there are not two rows with a score"),
    ],
)
def test_scores_that_are_all_equal_have_the_correlation_0_and_the_report_says_why(gold, predicted, reason):
    metric = scored(gold, predicted)
    figures = metric.result()
    assert figures["spearman"] == figures["pearson"] == 0.0
    assert f"{reason}: the correlations are set to 0" in metric.report()


def test_rows_without_a_score_are_left_out():
    metric = scored([None, 1.0, 2.0], [9.0, 1.0, 2.0])
    assert metric.result()["rows"] == 2
    assert metric.result()["spearman"] == pytest.approx(1.0)
    assert scored([], []).result()["spearman"] == 0.0
    assert scored([None], [1.0]).report() == "no row has a score to compare with"


def test_a_worker_that_holds_these_tasks_loads_neither_scikit_learn_nor_scipy():
    code = (
        "import sys, numpy as np, torch, coterie.worker.program\n"
        "from coterie.tasks.catalog import get_task\n"
        "for name in ('sequence-classification', 'regression'):\n"
        "    task = get_task(name)\n"
        "    logits = torch.zeros(2, 1, requires_grad=True)\n"
        "    labels = torch.zeros(2, dtype=torch.long if name[0] == 's' else torch.float32)\n"
        "    task.loss_sum(logits, labels).backward(); task.predictions(logits)\n"
        "print(sorted({'sklearn', 'scipy', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
