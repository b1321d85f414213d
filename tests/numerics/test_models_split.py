"""The heart: a cut model computes exactly what the plain, uncut Hugging Face model computes, for every family.

Each tiny random model is saved, loaded whole by `from_pretrained` and, unit range by unit range, from the same folder
(so experts that are named differently on disk are covered). Dropout is on, rows are padded, the loss and every gradient
are compared bit for bit; where both ends of a tied matrix add up, to 1e-6.
"""

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoConfig

from coterie.jobs.model_spec import LoraSpec
from coterie.models import (
    Anatomy,
    FolderWeights,
    RandomKey,
    StageModule,
    build_stage,
    describe,
    make_model_spec,
    open_model,
    seed_for,
)
from coterie.models.adapters import clean_name

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"
ROWS = "AutoModelForSequenceClassification"

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**BASE, **SPECIAL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
TIED = {"tie_word_embeddings": True}
OPT = {"ffn_dim": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61, **SPECIAL}
OPT_350M = {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
NINE_HEADS = {**GROUPED, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
FOURTEEN_HEADS = {**GROUPED, "hidden_size": 56, "num_attention_heads": 14, **TIED}
EXPERTS = {**HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (TAGS, "bert", BASE),
    "bert rows": (ROWS, "bert", BASE),
    "roberta": (TAGS, "roberta", BASE),
    # Positions start after the padding index: 11 of them hold the 9 tokens of a row.
    "roberta rows": (ROWS, "roberta", {**BASE, "max_position_embeddings": 11, "pad_token_id": 1}),
    "roberta text": (TEXT, "roberta", {**BASE, "is_decoder": True}),
    "distilbert rows": (
        ROWS,
        "distilbert",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 61},
    ),
    "electra rows": (ROWS, "electra", {**BASE, "embedding_size": 16}),
    "modernbert rows": (
        ROWS,
        "modernbert",
        {**BASE, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    ),
    "distilbert": (TAGS, "distilbert", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 61}),
    "electra": (TAGS, "electra", {**BASE, "embedding_size": 16}),
    "modernbert": (TAGS, "modernbert", {**BASE, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    "gpt2": (TEXT, "gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}),
    "gpt2 rows": (ROWS, "gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}),
    "opt": (TEXT, "opt", {**OPT, "word_embed_proj_dim": 32}),
    "opt-350m shape": (TEXT, "opt", OPT_350M),
    "opt-350m shape rows": (ROWS, "opt", OPT_350M),
    "llama": (TEXT, "llama", GROUPED),
    "llama tied": (TEXT, "llama", {**GROUPED, **TIED}),
    "llama rows": (ROWS, "llama", GROUPED),
    "llama 9/3 heads": (TEXT, "llama", NINE_HEADS),
    "llama 9/3 heads rows": (ROWS, "llama", {**NINE_HEADS, **TIED}),
    "qwen2": (TEXT, "qwen2", GROUPED),
    "qwen2 14/2 heads": (TEXT, "qwen2", FOURTEEN_HEADS),
    "qwen2 14/2 heads rows": (ROWS, "qwen2", FOURTEEN_HEADS),
    "qwen3": (TEXT, "qwen3", HEADS),
    "qwen3 rows": (ROWS, "qwen3", HEADS),
    "mistral": (TEXT, "mistral", {**GROUPED, "sliding_window": 4}),
    "mistral rows": (ROWS, "mistral", {**GROUPED, "sliding_window": 4}),
    "gemma": (TEXT, "gemma", HEADS),
    "gemma2": (TEXT, "gemma2", {**HEADS, "sliding_window": 4}),
    "gemma2 rows": (ROWS, "gemma2", {**HEADS, "sliding_window": 4}),
    "gemma3": (TEXT, "gemma3_text", {**HEADS, "sliding_window": 4, "layer_types": MIXED}),
    "gemma3 rows": (ROWS, "gemma3_text", {**HEADS, "sliding_window": 4, "layer_types": MIXED}),
    "phi": (TEXT, "phi", {**BASE, **SPECIAL}),
    "phi3": (TEXT, "phi3", {**BASE, **SPECIAL}),
    "phi3 rows": (ROWS, "phi3", {**GROUPED, "sliding_window": 4}),
    "gpt_neox": (TEXT, "gpt_neox", {**BASE, **SPECIAL}),
    "gpt_neox rows": (ROWS, "gpt_neox", {**BASE, **SPECIAL, "use_parallel_residual": False}),
    "bloom": (TEXT, "bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}),
    "falcon": (TEXT, "falcon", {**BASE, **SPECIAL}),
    "falcon alibi": (TEXT, "falcon", {**BASE, **SPECIAL, "alibi": True, "new_decoder_architecture": False}),
    "olmo2": (TEXT, "olmo2", {**BASE, **SPECIAL}),
    "smollm3": (TEXT, "smollm3", {**GROUPED, "no_rope_layer_interval": 2}),
    "mixtral": (TEXT, "mixtral", {**GROUPED, "num_local_experts": 3}),
    "mixtral rows": (ROWS, "mixtral", {**GROUPED, "num_local_experts": 3}),
    "qwen3_moe": (TEXT, "qwen3_moe", EXPERTS),
    "qwen3_moe rows": (ROWS, "qwen3_moe", EXPERTS),
    "granite": (TEXT, "granite", GROUPED),
    "gpt_oss": (TEXT, "gpt_oss", {**HEADS, "num_local_experts": 4, "sliding_window": 4}),
    "mamba": (TEXT, "mamba", {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 61, **SPECIAL}),
    "stablelm": (TEXT, "stablelm", GROUPED),
}
"""A name, its auto class, its model type and its tiny config; five units each."""

WITHOUT_DROPOUT = {"mamba"}

DROPOUTS = [
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "attention_dropout",
    "dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "classifier_dropout",
    "seq_classif_dropout",
    "summary_first_dropout",
]

CUTS = ((0, 1, 2, 4, 5), (0, 2, 5))
"""Units: the embedding alone, one block, two blocks, the output layer alone; then two stages with an end each."""

KEY = RandomKey(seed=7, step=3, micro_batch=1)


class Family:
    """One saved tiny model, and what the plain whole model computes on one padded micro-batch."""

    def __init__(self, name: str, folder: Path) -> None:
        auto_class, kind, settings = FAMILIES[name]
        known = AutoConfig.for_model(kind)
        dropouts = {key: 0.2 for key in DROPOUTS if hasattr(known, key)}
        self.config = AutoConfig.for_model(kind, **{"num_labels": 3, **settings, **dropouts})
        torch.manual_seed(1)
        model_class = getattr(transformers, auto_class)
        model_class.from_config(self.config).save_pretrained(folder)
        self.source = open_model(folder)
        self.spec = make_model_spec(self.source, auto_class=auto_class, config_overrides={}, seed=KEY.seed)
        self.weights = FolderWeights(self.source, self.spec)
        self.anatomy: Anatomy = describe(self.spec)
        self.inputs, self.labels = micro_batch(auto_class == ROWS)
        self.whole = model_class.from_pretrained(folder, dtype=torch.float32).train()
        self.whole.config.use_cache = False
        self.set_key = seed_plain_model(self.whole, self.anatomy)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), self.labels.flatten() % logits.shape[-1])

    def whole_loss_and_gradients(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.set_key(KEY)
        self.whole.zero_grad()
        loss = self.loss(self.whole(**self.inputs).logits)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.whole.named_parameters() if p.grad is not None}
        return loss.detach(), gradients

    def stages(self, cuts: tuple[int, ...]) -> list[StageModule]:
        return [build_stage(self.spec, a, b, self.weights) for a, b in itertools.pairwise(cuts)]


def micro_batch(one_label_a_row: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 61, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, 4:] = 0
    ids[mask == 0] = 0
    labels = torch.randint(0, 61, (3,) if one_label_a_row else (3, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}, labels


def seed_plain_model(model: torch.nn.Module, anatomy: Anatomy) -> Callable[[RandomKey], None]:
    """The rule of randomness, written a second time and without the code under test."""
    current = [KEY]
    blocks = model.get_submodule(anatomy.blocks_name)
    model.register_forward_pre_hook(lambda *_: torch.manual_seed(seed_for(current[0], 0)) and None)
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=index: torch.manual_seed(seed_for(current[0], i + 1)) and None)
    blocks[-1].register_forward_hook(lambda *_: torch.manual_seed(seed_for(current[0], len(blocks) + 1)) and None)
    return lambda key: current.__setitem__(0, key)


def run_split(
    stages: list[StageModule],
    inputs: Mapping[str, torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    recompute: bool,
) -> torch.Tensor:
    """A forward through all stages and a backward through all, with nothing shared but what would cross a link."""
    received: list[torch.Tensor | None] = []
    sent: list[torch.Tensor] = []
    hidden: torch.Tensor | None = None
    # What stages between the ends are sent where token ids stay on their owner's device.
    without_ids = {**inputs, "input_ids": torch.zeros_like(inputs["input_ids"])}
    for stage in stages:
        hidden = None if hidden is None else hidden.detach().clone().requires_grad_(hidden.requires_grad)
        received.append(hidden)
        known = inputs if stage.is_first or stage.is_last else without_ids
        hidden = stage.forward(known, hidden, KEY, recompute=recompute)
        sent.append(hidden)
    loss = loss_of(sent[-1])
    loss.backward()
    for earlier, later in zip(reversed(sent[:-1]), reversed(received), strict=False):
        assert later is not None
        if earlier.requires_grad:  # nothing goes below everything that is trained
            earlier.backward(later.grad)
    return loss.detach()


def summed_gradients(stages: list[StageModule]) -> dict[str, torch.Tensor]:
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.trainable().items():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return gradients


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("cuts", "recompute"), [(CUTS[0], False), (CUTS[1], True)], ids=["four", "two recomputed"])
def test_a_cut_model_has_the_loss_and_every_gradient_of_the_whole(
    family: Family, cuts: tuple[int, ...], recompute: bool
) -> None:
    loss, expected = family.whole_loss_and_gradients()
    stages = family.stages(cuts)
    split_loss = run_split(stages, family.inputs, family.loss, recompute=recompute)
    assert torch.equal(split_loss, loss)
    found = summed_gradients(stages)
    assert found.keys() == expected.keys()
    tied = family.anatomy.tied
    for name, gradient in expected.items():
        if tied is not None and name == tied.name:
            assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
        else:
            assert torch.equal(found[name], gradient), name


def test_every_parameter_of_the_model_has_one_unit_and_every_unit_its_parameters(family: Family) -> None:
    anatomy = family.anatomy
    assert anatomy.unit_of.keys() == {name for name, _ in family.whole.named_parameters()}
    assert anatomy.unit_count == len(set(anatomy.unit_of.values()) | {anatomy.unit_count - 1}) == 5
    assert {name for names in anatomy.trainable for name in names} == anatomy.unit_of.keys()
    assert (anatomy.tied is not None) == bool(family.whole.all_tied_weights_keys)
    assert not anatomy.blocks_read_ids


def test_dropout_is_on_and_depends_on_the_key_alone(family: Family, request: pytest.FixtureRequest) -> None:
    stage = build_stage(family.spec, 0, family.anatomy.unit_count, family.weights)
    with torch.no_grad():
        first = stage.forward(family.inputs, None, KEY)
        torch.manual_seed(99)
        again = stage.forward(family.inputs, None, KEY)
        other = stage.forward(family.inputs, None, KEY._replace(micro_batch=2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == any(name in request.node.name for name in WITHOUT_DROPOUT)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # raised inside PEFT
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # PEFT notices GPT-2's transposed layers
def test_a_cut_model_with_adapters_has_the_loss_and_every_adapters_gradient_of_plain_peft(family: Family) -> None:
    spec = make_model_spec(
        family.source,
        auto_class=family.spec.auto_class,
        config_overrides={},
        seed=KEY.seed,
        method="lora",
        lora=LoraSpec(rank=3, alpha=5, dropout=0.2, target_modules=("all-linear",)),
    )
    assert spec.lora is not None
    weights = FolderWeights(family.source, spec)
    config = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.2, target_modules=list(spec.lora.target_modules))
    plain = get_peft_model(copy.deepcopy(family.whole), config).train()
    adapters = {clean_name(n.removeprefix("base_model.model.")): p for n, p in plain.named_parameters() if "lora_" in n}
    stages = [build_stage(spec, a, b, weights) for a, b in itertools.pairwise(CUTS[0])]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(std=0.1, generator=generator)  # B starts at zero, which would hide A's gradient
        for stage in stages:
            for name, parameter in stage.trainable().items():
                if name in adapters:
                    parameter.copy_(adapters[name])
    family.set_key(KEY)
    loss = family.loss(plain(**family.inputs).logits)
    loss.backward()
    assert torch.equal(run_split(stages, family.inputs, family.loss, recompute=False), loss.detach())
    found = summed_gradients(stages)
    expected = {name: p.grad for name, p in adapters.items() if p.grad is not None}  # Mamba goes around some adapters
    assert expected.keys() == {name for name in found if ".lora_" in name} != set()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
