"""Text over workers that join: what one device writes, token for token, and its figures."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.api import QuietObserver, run_evaluation, run_prediction
from coterie.config.forward import forward_recipe
from coterie.errors import CoterieError
from coterie.tasks.catalog import get_task
from coterie.tasks.tokenizer import load_tokenizer
from coterie.worker.settings import WorkerSettings

WORDS = ("<pad>", "<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Summarize", "dialogue.", "Summary:", "the")
ROWS = [
    {"dialogue": "a b c d e f g h", "summary": "a b c"},
    {"dialogue": "q r", "summary": "q"},
    {"dialogue": "k l m n o", "summary": "the k"},
    {"dialogue": "x", "summary": "x x"},
    {"dialogue": "e d c b a", "summary": "e"},
]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks whose answers differ from row to row, and its tokenizer."""
    folder = tmp_path_factory.mktemp("writer") / "tiny-llama"
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), WORDS, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    return folder


def options(workers: int, **more: object) -> dict[str, object]:
    joined = {"workers": workers, "min_workers": workers, "host": "127.0.0.1", "join_timeout_s": 40}
    fixed: dict[str, object] = {"task": "summarization", "max_new_tokens": NEW_TOKENS, "batch_rows": 4}
    return fixed | (joined if workers > 1 else {}) | more


def over(cluster: type, workers: int):
    return cluster(*(WorkerSettings(name=f"device-{number}") for number in range(workers))) if workers > 1 else None


def predicted(writer: Path, cluster: type, workers: int, **more: object):
    observer = over(cluster, workers)
    recipe = forward_recipe(writer, ROWS, options(workers, **more))
    found = run_prediction(recipe, ROWS, "test", observer or QuietObserver())
    if observer is not None:
        observer.wait()
        assert observer.failures == {}
    return found, observer


def test_two_workers_write_what_transformers_writes(writer, cluster):
    found, observer = predicted(writer, cluster, 2)
    task, tokenizer = get_task("summarization"), load_tokenizer(writer)
    whole = AutoModelForCausalLM.from_pretrained(writer, dtype=torch.float32).eval()
    expected = []
    for row in found.rows:
        ids = torch.from_numpy(task.prompt(row, tokenizer, 64 - NEW_TOKENS))[None]
        written = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(tokenizer.hf.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    assert list(found.texts) == expected
    assert len(set(expected)) > 2
    assert [row.summaries for row in found.rows] == [(text.strip(),) for text in expected]
    assert found.plan is not None
    assert len(found.plan.stages) == 2
    longest = max(len(task.prompt(row, tokenizer, 64 - NEW_TOKENS)) for row in found.rows) + NEW_TOKENS
    kept = 4 * 4 * 2 * (2 * 8) * 4 * longest  # rows, blocks, keys and values, heads of 8, float32
    assert sum(stage.memory.activations for stage in found.plan.stages) == pytest.approx(kept, rel=0.03)
    assert observer.progress[-1] == ("answered", len(ROWS), len(ROWS))


def test_drawn_text_is_the_same_on_one_two_and_three_devices(writer, cluster):
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 4}
    texts = [predicted(writer, cluster, workers, **drawn)[0].texts for workers in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != predicted(writer, cluster, 1)[0].texts
    assert texts[0] != predicted(writer, cluster, 1, **drawn | {"seed": 5})[0].texts


def test_more_groups_than_are_under_way_at_once_take_turns(writer, cluster):
    assert predicted(writer, cluster, 2, batch_rows=1)[0].texts == predicted(writer, cluster, 1)[0].texts


def test_an_evaluation_over_workers_gives_loss_perplexity_and_rouge(writer, cluster):
    records = []
    for workers in (1, 2):
        observer = over(cluster, workers)
        recipe = forward_recipe(writer, ROWS, options(workers))
        records.append(run_evaluation(recipe, ROWS, "test", observer or QuietObserver()).record)
        if observer is not None:
            observer.wait()
            assert {what for what, _, _ in observer.progress} == {"predicted", "answered"}
    alone, together = records
    assert alone.main_metric == "rouge_l"
    assert {"rouge_1", "rouge_2", "rouge_l", "token_accuracy"} <= alone.metrics.keys()
    assert "perplexity" in alone.details
    assert together.metrics == pytest.approx(alone.metrics)
    assert together.loss == pytest.approx(alone.loss)
    for word in ("perplexity", "ROUGE-L"):
        assert word in alone.report


def test_generation_can_be_left_out_of_an_evaluation(writer):
    recipe = forward_recipe(writer, ROWS, options(1, when_evaluating="off"))
    record = run_evaluation(recipe, ROWS, "test", QuietObserver()).record
    assert record.main_metric == "perplexity"
    assert "rouge_l" not in record.metrics


def test_a_lost_worker_ends_a_generation_with_its_name(writer, cluster):
    observer = over(cluster, 2)
    recipe = forward_recipe(writer, ROWS, options(2, max_new_tokens=40))

    def stumble(*_: object, **__: object) -> None:
        raise MemoryError("test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.pipeline.generation.next_tokens", stumble)
        with pytest.raises(CoterieError, match="memory"):
            run_prediction(recipe, ROWS, "test", observer)
    observer.wait()
    assert observer.failures


def test_a_context_without_room_for_a_prompt_is_refused(writer):
    recipe = forward_recipe(writer, ROWS, options(1, max_new_tokens=64))
    with pytest.raises(CoterieError) as caught:
        run_prediction(recipe, ROWS, "test", QuietObserver())
    assert "leaves no room" in caught.value.message
