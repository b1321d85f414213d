"""Every recipe in `recipes/` trains: as it is, but for a tiny model, a few rows, and a few steps."""

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.config.loading import load_recipe
from coterie.config.recipe import Recipe
from coterie.models.trained import ADAPTER_CONFIG
from coterie.tasks.catalog import TASK_NAMES, get_task
from coterie.worker.settings import WorkerSettings

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
WORDS = ("anna", "likes", "rome", "and", "films", "rain", "is", "good", "bad", "very")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS = 2
TRAINED_ALL = ("full", "lora", "bitfit", "head")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Callable[[int], Path]:
    """A BERT of so many blocks, as narrow as can be."""
    return functools.cache(lambda blocks: save_encoder(tmp_path_factory.mktemp("encoder"), blocks))


def save_encoder(folder: Path, blocks: int) -> Path:
    torch.manual_seed(0)
    names = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": blocks}
    BertModel(BertConfig(vocab_size=len(names), **shape)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, names[name]) for name in ("[CLS]", "[SEP]")],
    )
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **roles).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A Llama of two blocks whose tokens are bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ENDS[0], pad_token=ENDS[0], model_max_length=2048
    )
    wrapped.add_special_tokens({"additional_special_tokens": list(ENDS[1:])})
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = LlamaConfig(vocab_size=len(wrapped), num_hidden_layers=2, max_position_embeddings=2048, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_data(recipe: Recipe, path: Path, rows: int) -> Path:
    """Data with the columns that the recipe reads, in a file of the kind that it names."""
    path = path.with_suffix(Path(recipe.data.train).suffix)
    lines = [line for index in range(rows) for line in row_lines(recipe, index)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row_lines(recipe: Recipe, index: int) -> Iterator[str]:
    data = recipe.data
    text = " ".join(WORDS[(index + offset) % len(WORDS)] for offset in range(5))
    if Path(data.train).suffix == ".conll":
        yield from (f"{word}\t{'B-PER' if word == 'anna' else 'O'}" for word in text.split())
        yield ""
    elif Path(data.train).suffix == ".txt":
        yield from (text * 25, "")  # more than fits a row: packing finds nothing to join
    elif data.text_column == "messages":
        turns = [("user", text), ("assistant", WORDS[index % 7]), ("user", "and?"), ("assistant", text)]
        yield json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    else:
        row = {data.text_column or "text": text, data.label_column or "label": answer(recipe, index)}
        if data.pair_column:
            row[str(data.pair_column)] = text[::-1]
        yield json.dumps(row)


def answer(recipe: Recipe, index: int) -> object:
    match recipe.data.task:
        case "sequence-classification":
            return index % len(recipe.data.label_names) if recipe.data.label_names else WORDS[7 + index % 2]
        case "regression":
            return index % 11 / 2
        case _:
            return " ".join(WORDS[index % 7 :][:3])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_as_it_is_on_a_tiny_model(path, tmp_path, cluster, run, encoder, decoder):
    written = load_recipe(path)
    writes = written.data.task in ("causal-lm", "summarization")
    rows = STEPS * written.train.batch_rows
    dev = write_data(written, tmp_path / "dev", 4) if written.data.dev else None
    recipe = load_recipe(
        path,
        {
            "model": decoder if writes else encoder(12 if written.train.trainable else 3),  # blocks that it names exist
            "train": write_data(written, tmp_path / "train", rows),
            "dev": dev,
            "output": tmp_path / "run",
            "max_steps": STEPS,
            "workers": written.cluster.workers_expected,
            "local_workers": (),
            "host": "127.0.0.1",
        },
    )
    settings = [WorkerSettings(name=f"device-{index}") for index in range(recipe.cluster.workers_expected)]
    if recipe.train.mode == "side":
        settings[0] = WorkerSettings(name="server", role="server")
    watcher = cluster(*settings)
    result = run(recipe, watcher)
    assert len(result.losses) == STEPS
    assert all(math.isfinite(loss) and loss > 0 for loss in result.losses)
    assert len(result.plan.stages) >= recipe.plan.min_workers
    if dev is not None:
        assert result.quality[-1].main_metric == get_task(recipe.data.task).main_metric
    is_adapter = (result.model_folder / ADAPTER_CONFIG).exists()
    assert is_adapter is (recipe.train.method == "lora")
    record = json.loads((result.model_folder / "coterie.json").read_text())
    assert record["task"] == recipe.data.task


def test_there_is_a_recipe_for_every_task_and_method():
    recipes = [load_recipe(path) for path in RECIPES]
    assert {recipe.data.task for recipe in recipes} == set(TASK_NAMES)
    assert {recipe.train.method for recipe in recipes} == set(TRAINED_ALL)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_begins_with_what_it_is_for_and_how_to_run_it(path):
    head = [line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    assert f"#   coterie train recipes/{path.name}" in head
    assert len(head) >= 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_its_paths_are_placeholders(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 50
    recipe = load_recipe(path)
    assert all(Path(name).parent == Path("data") for name in (recipe.data.train, recipe.data.dev) if name)
