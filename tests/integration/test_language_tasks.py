"""Causal models end to end: chats, instructions, summaries learnt over two workers; the output in plain libraries."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from coterie import api
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference
from coterie.errors import DataError, StorageError, UnsupportedModelError
from coterie.ids import RunId
from coterie.metrics.records import StepRecord
from coterie.worker.settings import WorkerSettings

SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefgh"
SERVER = WorkerSettings(name="server", role="server")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks with tied ends and dropout; pad is the end of a turn, as in SmolLM2-Instruct."""
    folder = tmp_path_factory.mktemp("speaker") / "tiny-llama"
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    end = vocabulary["<|im_end|>"]
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=36,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=48,
        max_position_embeddings=128,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        pad_token_id=end,
        bos_token_id=vocabulary["<|im_start|>"],
        eos_token_id=end,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=[end, vocabulary["!"]], pad_token_id=end).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_ML, model_max_length=128, **names)
    saved.save_pretrained(folder)
    return folder


def write(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    for split, found in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """The assistant says what the user said, once or twice."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        words = ["".join(draw.choices(LETTERS, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 2))]
        turns = [(role, word) for word in words for role in ("user", "assistant")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows


@pytest.fixture
def two(cluster):
    return cluster(*(WorkerSettings(name=name) for name in ("left", "right")))


@pytest.fixture
def language_recipe(make_recipe, speaker, tmp_path):
    def make(data: Path, **options: object):
        named = {"model.name": str(speaker), "data.train": str(data)}
        return make_recipe(tmp_path / "run", **{"task": "causal-lm", "workers": 2, **named, **options})

    return make


def test_chats_are_learnt_over_two_workers_as_on_one_device(language_recipe, run, alone, two, tmp_path):
    data = write(tmp_path, {"train": chats(16, 1), "dev": chats(5, 2)})
    recipe = language_recipe(data)
    result = run(recipe, two)
    assert two.failures == {}
    assert len(result.plan.stages) == 2
    assert largest_difference(result.losses, alone(recipe, 4)) < 1e-5
    (quality,) = [record for record in result.quality if record.split == "dev"]
    assert quality.main_metric == "perplexity"
    assert set(quality.metrics) == {"perplexity", "token_accuracy"}
    assert not quality.main_is_share
    assert any("chat template" in notice for notice in two.notices)

    model, info = AutoModelForCausalLM.from_pretrained(result.model_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    assert tokenizer.chat_template == CHAT_ML
    assert len(model.generation_config.eos_token_id) == 2
    found = api.evaluate(result.model_folder, data, split="dev").record
    assert found.metrics == pytest.approx(quality.metrics)
    assert quality.loss == pytest.approx(plain_loss(model, tokenizer, data / "dev.jsonl"), rel=1e-4)


def plain_loss(model: Any, tokenizer: Any, file: Path) -> float:
    """The mean loss of the assistant's words, counted by transformers alone, a chat at a time."""
    total, count = 0.0, 0
    for line in file.read_text().splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True, return_tensors="pt")
        ids = ids["input_ids"]
        labels = torch.full_like(ids, -100)
        start, end = tokenizer.convert_tokens_to_ids(list(SPECIAL))
        inside = False
        heading = tokenizer("assistant\n")["input_ids"]
        for place in range(ids.shape[1]):
            before = ids[0, max(place - len(heading) - 1, 0) : place].tolist()
            inside = inside or before == [start, *heading]
            if inside:
                labels[0, place] = ids[0, place]
            inside = inside and int(ids[0, place]) != end
        tokens = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model.eval()(input_ids=ids, labels=labels).loss) * tokens
        count += tokens
    return total / count


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_packed_instructions_train_adapters_that_plain_peft_loads(language_recipe, run, alone, two, tmp_path, speaker):
    draw = random.Random(3)
    rows = [
        {"instruction": "Say", "input": draw.choice(LETTERS) * 3, "output": draw.choice(LETTERS)} for _ in range(30)
    ]
    rows.append({"instruction": "x" * 300, "input": "", "output": "never seen"})
    data = write(tmp_path, {"train": rows})
    recipe = language_recipe(data, method="lora", lora_rank=2, packing=True, epochs=2)
    result = run(recipe, two)
    assert two.failures == {}
    assert any("30 rows share" in notice and "1 rows have no label left" in notice for notice in two.notices)
    assert largest_difference(result.losses, alone(recipe, len(result.losses))) < 1e-5

    settings = json.loads((result.model_folder / "adapter_config.json").read_text())
    assert settings["task_type"] == "CAUSAL_LM"
    plain = AutoModelForCausalLM.from_pretrained(speaker)
    adapted = PeftModel.from_pretrained(plain, result.model_folder).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        changed = adapted(input_ids=ids).logits
        with adapted.disable_adapter():
            assert not torch.equal(changed, adapted(input_ids=ids).logits)
        merged = adapted.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, changed, atol=1e-5, rtol=1e-4)


def test_a_run_on_summaries_resumes_to_the_losses_of_an_undisturbed_one(
    language_recipe, run, alone, cluster, tmp_path, changed
):
    draw = random.Random(6)
    rows = [{"dialogue": "".join(draw.choices(LETTERS, k=draw.randint(2, 90))), "summary": "ab"} for _ in range(12)]
    data = write(tmp_path, {"train": rows})
    recipe = language_recipe(data, task="summarization", epochs=2)
    first, second = (cluster(*(WorkerSettings(name=name) for name in ("left", "right"))) for _ in range(2))

    def fail(record):
        if isinstance(record, StepRecord) and record.step == 3:
            raise StorageError("the test's disk is full")

    first.on_record = fail
    with pytest.raises(StorageError, match="disk is full"):
        run(recipe, first)
    result = run(changed(recipe, "run", resume=True), second)
    assert len(result.losses) == 3, "the first epoch ended with a checkpoint"
    assert largest_difference(result.losses, alone(recipe, 6)[3:]) < 1e-5


def test_what_cannot_be_packed_or_holds_nothing_is_refused_before_any_worker_joins(
    language_recipe, two, tmp_path, model
):
    data = write(tmp_path, {"train": chats(4, 1)})
    with pytest.raises(UnsupportedModelError, match="both directions"):
        api.train(language_recipe(data, **{"model.name": str(model)}), two)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(DataError, match=r"broken.jsonl:2: broken JSON"):
        api.train(language_recipe(broken), two)
    assert two.threads == []


def test_chats_are_learnt_beside_a_frozen_model_of_two_devices(language_recipe, run, cluster, tmp_path):
    data = write(tmp_path, {"train": chats(16, 1), "dev": chats(5, 2)})
    side = {"mode": "side", "workers": 3, "min_workers": 2, "epochs": 3, "learning_rate": 2e-2, "rank": 8}
    watcher = cluster(*(WorkerSettings(name=name) for name in ("left", "right")), SERVER)
    result = run(language_recipe(data, **side), watcher)
    assert watcher.failures == {}
    assert len(result.plan.stages) == 2
    assert result.losses[-1] < result.losses[0]
    (dev,) = result.quality
    assert api.evaluate(result.model_folder, data / "dev.jsonl").record.loss == pytest.approx(dev.loss, rel=1e-3)


def test_a_side_run_on_summaries_asks_devices_for_each_token_of_the_answer_once(
    language_recipe, run, cluster, tmp_path
):
    rows = [{"text": "abc " * 5 + letter, "summary": letter} for letter in LETTERS]
    data = write(tmp_path, {"train": rows})
    side = {"mode": "side", "epochs": 2, "learning_rate": 1e-2, "rank": 4, "task": "summarization", "min_workers": 1}
    result = run(language_recipe(data, **side), cluster(WorkerSettings(name="phone"), SERVER))
    assert result.summary.side.device_passes == 1
    job = prepare_job(language_recipe(data, **side), RunId("rows"), lambda _text: None)
    tokens = sum(job.task.count_loss_tokens(row.labels) for row in job.splits["train"].rows)
    # Each frame of the two micro-batches of four steps has one scale more.
    assert result.summary.side.taps_bytes == tokens * 4 * 36 * 2 + 4 * 4
