import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import DataError
from coterie.tasks import DataFiles, get_task
from coterie.tasks.data_summary import encode_split
from coterie.tasks.examples import LabelledText
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.sequence_classification import SequenceClassification
from coterie.tasks.tokenizer import LoadedTokenizer

TASK = SequenceClassification(labels=("bad", "good"))
RELAXED = settings(deadline=None, max_examples=40)  # a busy machine is no failure


def jsonl(folder: Path, name: str, rows) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(train, task=None, dev=None, **options):
    files = DataFiles(train=train, dev=dev, options=ReadOptions(**options))
    return (task or SequenceClassification()).prepare(files)


def rows(*labels, **more):
    return [{"text": f"t{index}", "label": label, **more} for index, label in enumerate(labels)]


def found(data, split="train"):
    return [example.label for example in data.splits[split].examples]


def test_the_task_is_known_by_its_name():
    task = get_task("sequence-classification", labels=("a", "b"))
    assert task == SequenceClassification(labels=("a", "b"))
    assert task.auto_class == "AutoModelForSequenceClassification"


def test_string_labels_are_ordered_by_the_alphabet_and_integers_by_value():
    assert prepared(rows("b", "a", "c", "a")).task.labels == ("a", "b", "c")
    assert prepared(rows(10, 9, 2)).task.labels == ("2", "9", "10")
    assert prepared(rows("10", "9", "-1", "2")).task.labels == ("-1", "2", "9", "10")
    assert prepared(rows(1.0, 0.0, 1)).task.labels == ("0", "1")
    assert prepared(rows(True, False)).task.labels == ("false", "true")


def test_the_config_learns_number_names_and_kind_of_the_labels():
    assert prepared(rows("b", "a")).config_overrides == {
        "id2label": {0: "a", 1: "b"},
        "label2id": {"a": 0, "b": 1},
        "problem_type": "single_label_classification",
    }


def test_label_names_say_what_integers_mean_and_give_the_order():
    data = prepared(rows(1, 0, "1", "no"), label_names=("yes", "no", "unsure"))
    assert data.task.labels == ("yes", "no", "unsure")
    assert found(data) == ["no", "yes", "no", "no"]
    with pytest.raises(DataError, match="row 1: the label 3 is outside the 3 label names"):
        prepared(rows(0, 3), label_names=("yes", "no", "unsure"))


def test_the_class_names_of_a_data_set_are_used_and_its_secret_labels_are_none():
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )

    def make(*labels):
        return datasets.Dataset.from_dict({"sentence": ["x"] * len(labels), "label": labels}, features=features)

    data = prepared({"train": make(1, 0, 1), "validation": make(0), "test": make(-1, -1)})
    assert data.task.labels == ("negative", "positive")
    assert found(data) == ["positive", "negative", "positive"]
    assert set(data.splits) == {"train", "dev"}
    assert any("test data have no answers and are left out" in note for note in data.splits["train"].notes)
    renamed = prepared(make(1, 0), label_names=("bad", "good"))
    assert found(renamed) == ["good", "bad"]


def test_glues_own_folders_are_read_and_their_test_data_without_labels_left_out(tmp_path):
    (tmp_path / "train.tsv").write_text("gj04\t1\t\tBill fell.\ngj04\t0\t*\tFell bill.\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text('gj04\t1\t\tThey said "so".\n', encoding="utf-8")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tBill coughed.\n", encoding="utf-8")
    data = prepared(tmp_path)
    assert set(data.splits) == {"train", "dev"}
    assert data.task.labels == ("0", "1")
    assert data.splits["dev"].examples[0] == LabelledText(text='They said "so".', label="1", line=1)
    notes = data.splits["train"].notes
    assert any("test.tsv: the test data have no answers and are left out" in note for note in notes)
    assert any("texts from the column sentence, answers from label" in note for note in notes)
    with pytest.raises(DataError, match=r"test\.tsv: there is no column label or"):
        SequenceClassification().prepare(DataFiles(train=tmp_path, test=tmp_path / "test.tsv"))


def test_pairs_are_read_and_a_dash_in_mnli_is_no_label(tmp_path):
    pairs = [
        {"sentence1": "a", "sentence2": "b", "gold_label": "neutral"},
        {"sentence1": "c", "sentence2": "d", "gold_label": "-"},
        {"sentence1": "e", "sentence2": "f", "gold_label": "entailment"},
    ]
    data = prepared(jsonl(tmp_path, "train.jsonl", pairs))
    assert found(data) == ["neutral", None, "entailment"]
    assert data.splits["train"].examples[0].pair == "b"
    assert prepared(rows("-", "+")).task.labels == ("+", "-")


@pytest.mark.parametrize("empty", [None, "", " ", float("nan")])
def test_a_row_without_a_label_has_none_and_is_skipped_in_training(empty, tokenizer):
    data = prepared([*rows("a", empty, "b")])
    assert found(data) == ["a", None, "b"]
    encoded = encode_split(data.task, data.splits["train"], tokenizer, 20, for_training=True)
    assert encoded.summary.skipped_rows == 1
    assert encoded.summary.label_counts == {"a": 1, "b": 1}
    kept = encode_split(data.task, data.splits["train"], tokenizer, 20, for_training=False)
    assert [row.labels.tolist() for row in kept.rows] == [0, -100, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("a", "a"), "holds only the label 'a'"),
        ((None, None), "holds no label at all"),
        ((0.5, 1), "row 0: the label 0.5 is a number with a fraction"),
        (("0.5", "3.8"), "the labels are numbers with fractions, such as 0.5 and 3.8"),
        ((["a", "b"], "a"), r"row 0: .* is not a label"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(labels, message):
    with pytest.raises(DataError, match=message) as caught:
        prepared(rows(*labels))
    assert caught.value.hint


def test_labels_that_only_other_splits_have_count_as_wrong_with_a_note(tokenizer):
    data = prepared(rows("a", "b"), dev=rows("b", "c"))
    (note,) = data.splits["dev"].notes
    assert "1 rows have labels that training never sees (c); they count as wrong" in note
    encoded = data.task.encode(data.splits["dev"].examples[1], tokenizer, 20)
    assert encoded.labels.tolist() == -100
    metric = data.task.metric()
    for example, label in zip(data.splits["dev"].examples, (1, 1), strict=True):
        metric.add(example, encoded, np.int64(label))
    assert metric.result()["accuracy"] == 0.5


def test_a_model_s_labels_are_kept_and_others_refused_in_training():
    assert prepared(rows("bad", "bad"), TASK).task == TASK
    with pytest.raises(DataError, match=r"row 1: the training data have labels .* known ones: awful"):
        prepared(rows("bad", "awful"), TASK)
    with pytest.raises(DataError, match="none of its labels"):
        TASK.prepare(DataFiles(test=rows("x", "y")))


def test_integers_are_the_ids_of_a_model_s_labels_unless_its_labels_are_integers():
    assert found(TASK.prepare(DataFiles(test=rows(1, 0))), "test") == ["good", "bad"]
    stars = SequenceClassification(labels=("1", "2", "3"))
    assert found(stars.prepare(DataFiles(test=rows(1, 3))), "test") == ["1", "3"]


def test_a_model_whose_labels_nobody_named_takes_integers_or_the_user_s_names():
    generic = SequenceClassification(labels=("LABEL_0", "LABEL_1"))
    assert found(generic.prepare(DataFiles(test=rows(1, 0))), "test") == ["LABEL_1", "LABEL_0"]
    named = DataFiles(test=rows("good", 0), options=ReadOptions(label_names=("bad", "good")))
    data = generic.prepare(named)
    assert data.task.labels == ("bad", "good")
    assert found(data, "test") == ["good", "bad"]


def test_texts_to_be_answered_need_no_labels():
    data = TASK.prepare(DataFiles(test=[{"text": "x"}], options=ReadOptions(tagged=False)))
    assert data.task == TASK
    assert found(data, "test") == [None]


def test_a_text_or_a_pair_becomes_tokens_with_one_label(pair_tokenizer):
    single = TASK.encode(LabelledText(text="the paris", label="good"), pair_tokenizer, 100)
    assert single.input_ids.tolist() == [2, 4, 7, 8, 3]
    assert single.labels.tolist() == 1
    assert single.labels.dtype == np.int64
    pair = TASK.encode(LabelledText(text="the", pair="berlin", label="bad"), pair_tokenizer, 100)
    assert pair.input_ids.tolist() == [2, 4, 3, 9, 10, 3]
    assert pair.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert (pair.labels.tolist(), pair.truncated) == (0, False)


def test_too_long_a_pair_loses_tokens_of_its_longer_text_first_and_is_counted(pair_tokenizer):
    row = TASK.encode(LabelledText(text="the a in x . the a", pair="berlin", label="bad"), pair_tokenizer, 8)
    assert row.input_ids.tolist() == [2, 4, 5, 6, 3, 9, 10, 3]
    assert row.truncated
    exact = TASK.encode(LabelledText(text="the a in", pair="berlin", label="bad"), pair_tokenizer, 8)
    assert not exact.truncated


def test_truncated_rows_are_counted_in_the_summary(pair_tokenizer):
    data = prepared([*rows("a", "b"), {"text": "the a in x . the", "label": "a"}])
    encoded = encode_split(data.task, data.splits["train"], pair_tokenizer, 4, for_training=True)
    assert encoded.summary.truncated_rows == 1
    assert "1 row of more than 4 tokens" in encoded.summary.describe()


def test_a_text_without_any_token_makes_a_row_that_a_model_can_read(byte_level):
    tokenizer = LoadedTokenizer(byte_level, "tiny")
    row = TASK.encode(LabelledText(text="", label="bad"), tokenizer, 10)
    assert row.input_ids.tolist() == [tokenizer.end_id]
    assert row.labels.tolist() == 0


@RELAXED
@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=6), st.integers(0, 2**31))
def test_the_loss_is_the_sum_of_cross_entropies_over_labelled_rows(labels, seed):
    logits = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    loss = TASK.loss_sum(logits, torch.tensor(labels))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert TASK.count_loss_tokens(np.array(labels)) == sum(label >= 0 for label in labels)
    if set(labels) == {-100}:
        assert loss.item() == 0.0
        assert logits.grad.abs().sum() == 0


def test_predictions_are_decoded_and_written_in_every_format(tmp_path):
    logits = torch.tensor([[0.1, 2.0], [3.0, 1.0]])
    predicted = TASK.predictions(logits)
    assert predicted.tolist() == [1, 0]
    examples = (LabelledText(text='a, "b"\nc'), LabelledText(text="d\te", label="good"))
    answers = [TASK.decode(example, None, label) for example, label in zip(examples, predicted.numpy(), strict=True)]
    assert [answer.label for answer in answers] == ["good", "bad"]
    assert TASK.text(answers) == 'good\ta, "b" c\nbad\td e\n'
    for suffix in TASK.suffixes:
        TASK.write(tmp_path / f"a{suffix}", answers)
    assert (tmp_path / "a.txt").read_text() == "good\nbad\n"
    for suffix in (".jsonl", ".csv"):
        again = TASK.prepare(DataFiles(test=tmp_path / f"a{suffix}")).splits["test"].examples
        assert [(row.text, row.label) for row in again] == [(row.text, row.label) for row in answers]


def test_pairs_are_written_so_that_they_are_read_again(tmp_path):
    answers = [LabelledText(text="a", pair="ب 🙂", label="good"), LabelledText(text="c", pair="", label="bad")]
    for suffix in (".jsonl", ".csv"):
        TASK.write(tmp_path / f"a{suffix}", answers)
        again = TASK.prepare(DataFiles(test=tmp_path / f"a{suffix}")).splits["test"].examples
        assert [(row.text, row.pair, row.label) for row in again] == [(r.text, r.pair, r.label) for r in answers]
    assert TASK.text(answers) == "good\ta\tب 🙂\nbad\tc\t\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"label": "b"}\n', r"a\.jsonl:2: has no field 'text'"),
        ("a.jsonl", '{"text": null, "label": "a"}\n', r"a\.jsonl:1: the field 'text' is absent"),
        ("a.jsonl", '{"text": "\\ud83d", "label": "a"}\n', r"a\.jsonl:1: broken JSON"),
        ("a.csv", "text,kind\nx,1\n", r"a\.csv: there is no column label or .*; the columns are text, kind"),
        ("a.txt", "only texts\n", r"a\.txt: there is no column label"),
    ],
)
def test_rows_that_are_no_labelled_texts_are_refused_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / name)


def test_emoji_right_to_left_text_and_empty_lines_come_through(tmp_path):
    (tmp_path / "a.csv").write_text("\ufefftext,label\n\nالرياض 🙂,a\n\nירושלים,b\n", encoding="utf-8")
    data = prepared(tmp_path / "a.csv")
    assert [(row.text, row.label, row.line) for row in data.splits["train"].examples] == [
        ("الرياض 🙂", "a", 3),
        ("ירושלים", "b", 5),
    ]
