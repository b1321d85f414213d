"""What backward does on a cut model: recomputation, micro-batches in flight, weight stashing, adapters, bfloat16."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch.nn import functional
from transformers import AutoConfig

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models import (
    Anatomy,
    FolderWeights,
    RandomKey,
    StageModule,
    WeightStore,
    build_stage,
    describe,
    load_whole_model,
    make_model_spec,
    named_by_unit,
    open_model,
    seed_by_key,
)

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (TAGS, "bert", {**SHAPE, **DROPOUT, "num_labels": 5}),
    "llama": (
        TEXT,
        "llama",
        {**SHAPE, "num_key_value_heads": 2, "attention_dropout": 0.2, "tie_word_embeddings": True},
    ),
    "gpt2": (
        TEXT,
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mixtral": (TEXT, "mixtral", {**SHAPE, "num_key_value_heads": 2, "attention_dropout": 0.2, "num_local_experts": 3}),
    # Word embeddings narrower than the model, norms after the layers; queries, keys and values in one matrix.
    "opt-350m shape": (
        TEXT,
        "opt",
        {
            **{key: value for key, value in SHAPE.items() if key != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "phi3": (TEXT, "phi3", {**SHAPE, "num_key_value_heads": 2, "resid_pdrop": 0.2, "sliding_window": 4}),
    "gpt_neox": (TEXT, "gpt_neox", {**SHAPE, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
}
CUTS = (0, 2, 3, 5)
SEED = 4
Inputs = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


def key_of(micro_batch: int) -> RandomKey:
    return RandomKey(seed=SEED, step=1, micro_batch=micro_batch)


def batch_of(micro_batch: int) -> Inputs:
    """Rows and lengths differ from one micro-batch to the next; one row is padded."""
    generator = torch.Generator().manual_seed(micro_batch)
    ids = torch.randint(3, 61, (2 + micro_batch % 2, 5 + micro_batch), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(logits.shape[0] * logits.shape[1]) % logits.shape[-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels)


class Model:
    """One saved tiny model."""

    def __init__(self, name: str, folder: Path) -> None:
        auto_class, kind, settings = KINDS[name]
        self.folder = folder
        self.auto_class = auto_class
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, pad_token_id=0, **settings)
        getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
        self.source = open_model(folder)

    def spec(self, **wishes: Any) -> tuple[ModelSpec, Anatomy, FolderWeights]:
        spec = make_model_spec(self.source, auto_class=self.auto_class, config_overrides={}, seed=SEED, **wishes)
        return spec, describe(spec), FolderWeights(self.source, spec)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("model"))


class Split:
    """Stages with any number of micro-batches in flight."""

    def __init__(self, spec: ModelSpec, weights: WeightStore, *, recompute: bool) -> None:
        self.stages = [build_stage(spec, a, b, weights) for a, b in pairwise(CUTS)]
        self.recompute = recompute
        self.tape: dict[int, list[tuple[torch.Tensor | None, torch.Tensor]]] = {}

    def forward(self, micro_batch: int) -> float:
        hidden: torch.Tensor | None = None
        tape = self.tape[micro_batch] = []
        for stage in self.stages:
            hidden = None if hidden is None else hidden.detach().clone().requires_grad_()
            output = stage.forward(batch_of(micro_batch), hidden, key_of(micro_batch), recompute=self.recompute)
            tape.append((hidden, output))
            hidden = output
        assert hidden is not None
        return float(loss_of(hidden.detach()))

    def backward(self, micro_batch: int) -> None:
        tape = self.tape.pop(micro_batch)
        loss_of(tape[-1][1]).backward()
        for (_, sent), (received, _) in reversed(list(pairwise(tape))):
            if sent.requires_grad:
                assert received is not None
                sent.backward(received.grad)

    def gradients(self) -> Gradients:
        total: Gradients = {}
        for stage in self.stages:
            for name, parameter in stage.trainable().items():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad
        return total


def whole_gradients(model: torch.nn.Module, anatomy: Anatomy, micro_batches: list[int]) -> Gradients:
    set_key = seed_by_key(model, anatomy)
    for micro_batch in micro_batches:
        set_key(key_of(micro_batch))
        loss_of(model(**batch_of(micro_batch)).logits).backward()
    return {name: p.grad.clone() for name, p in named_by_unit(model).items() if p.grad is not None}


def assert_same(found: Gradients, expected: Gradients, anatomy: Anatomy) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if anatomy.tied is not None and name == anatomy.tied.name:
            assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
        else:
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_in_flight_do_not_disturb_one_another(model: Model, recompute: bool) -> None:
    spec, anatomy, weights = model.spec()
    split = Split(spec, weights, recompute=recompute)
    for micro_batch in (0, 1, 2):
        split.forward(micro_batch)
    for micro_batch in (0, 1, 2):
        split.backward(micro_batch)
    expected = whole_gradients(load_whole_model(spec, weights), anatomy, [0, 1, 2])
    assert_same(split.gradients(), expected, anatomy)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_under_stashed_weights_is_that_of_its_own_forward(model: Model, recompute: bool) -> None:
    spec, anatomy, weights = model.spec()
    split = Split(spec, weights, recompute=recompute)
    old = [stage.parameters() for stage in split.stages]
    split.forward(0)
    for stage, parameters in zip(split.stages, old, strict=True):
        stage.swap_parameters({n: torch.nn.Parameter(p.detach() * 1.5) for n, p in parameters.items()})
    split.forward(1)
    for stage, parameters in zip(split.stages, old, strict=True):
        stage.swap_parameters(parameters)
    split.backward(0)
    expected = whole_gradients(load_whole_model(spec, weights), anatomy, [0])
    assert_same(split.gradients(), expected, anatomy)


def test_recomputation_with_a_frozen_embedding_has_the_gradients_of_none(model: Model) -> None:
    spec, anatomy, weights = model.spec(frozen_patterns=["embedding"])
    plain, recomputed = Split(spec, weights, recompute=False), Split(spec, weights, recompute=True)
    for split in (plain, recomputed):
        split.forward(0)
        split.backward(0)
    assert plain.gradients().keys() == anatomy.trainable_names
    for name, gradient in plain.gradients().items():
        assert torch.equal(recomputed.gradients()[name], gradient), name


def test_recomputation_keeps_less_for_backward(model: Model) -> None:
    spec, _, weights = model.spec()
    kept = {}
    for recompute in (False, True):
        split = Split(spec, weights, recompute=recompute)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.nbytes), t)[1], lambda t: t):
            split.forward(0)
        kept[recompute] = sum(sizes)
    assert kept[True] < kept[False] / 2


def with_adapters(stages: list[StageModule], anatomy: Anatomy) -> Gradients:
    """Adapters as after some training, put into the stages: B starts at zero, which would hide A's gradient."""
    values: Gradients = {}
    for number, name in enumerate(sorted(n for n in anatomy.trainable_names if ".lora_" in n)):
        generator = torch.Generator().manual_seed(number)
        values[name] = torch.randn(anatomy.shapes[name], generator=generator) * 0.1
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.trainable().items():
                if name in values:
                    parameter.copy_(values[name])
    return values


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # raised inside PEFT
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_on_stages_have_the_gradients_of_plain_peft_on_the_plain_whole_model(
    model: Model, recompute: bool
) -> None:
    lora = LoraSpec(rank=3, alpha=5, dropout=0.3, target_modules=("all-linear",))
    spec, anatomy, weights = model.spec(method="lora", lora=lora)
    split = Split(spec, weights, recompute=recompute)
    adapters = with_adapters(split.stages, anatomy)
    split.forward(0)
    split.backward(0)
    assert spec.lora is not None
    kinds = sorted({name.rpartition(".")[2] for name in spec.lora.target_modules})
    config = LoraConfig(
        r=3, lora_alpha=5, lora_dropout=0.3, target_modules=kinds, fan_in_fan_out=spec.config_json.count("gpt2") > 0
    )
    plain = getattr(transformers, model.auto_class).from_pretrained(model.folder, dtype=torch.float32)
    if spec.lora.modules_to_save == ("lm_head",):
        pytest.fail("a language model's own head is no new layer")
    tuned = get_peft_model(plain, config)
    set_peft_model_state_dict(tuned, {f"base_model.model.{name}": tensor for name, tensor in adapters.items()})
    set_key = seed_by_key(tuned.base_model.model, anatomy)
    set_key(key_of(0))
    loss_of(tuned.train()(**batch_of(0)).logits).backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default.", "."): p.grad
        for name, p in tuned.named_parameters()
        if p.grad is not None
    }
    found = {name: g for name, g in split.gradients().items() if ".lora_" in name}
    assert found.keys() == adapters.keys()
    assert_same(found, expected, anatomy)


def test_new_adapters_are_those_of_the_whole_model_and_leave_it_unchanged(model: Model) -> None:
    spec, anatomy, weights = model.spec(method="lora", lora=LoraSpec(rank=3))
    whole = load_whole_model(spec, weights)
    named = named_by_unit(whole)
    assert named.keys() == anatomy.unit_of.keys()
    stages = [build_stage(spec, a, b, weights) for a, b in pairwise(CUTS)]
    for stage in stages:
        for name, parameter in stage.parameters().items():
            assert torch.equal(parameter, named[name]), name
            assert parameter.requires_grad == named[name].requires_grad, name
            assert tuple(parameter.shape) == anatomy.shapes[name], name
    untouched = getattr(transformers, model.auto_class).from_pretrained(model.folder, dtype=torch.float32)
    assert torch.equal(whole.eval()(**batch_of(0)).logits, untouched.eval()(**batch_of(0)).logits)


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_compute_is_that_of_the_whole_model_under_autocast(model: Model, recompute: bool) -> None:
    spec, anatomy, weights = model.spec(compute_dtype="bfloat16")
    split = Split(spec, weights, recompute=recompute)
    split.forward(0)
    split.backward(0)
    whole = load_whole_model(spec, weights)
    set_key = seed_by_key(whole, anatomy)
    set_key(key_of(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = whole(**batch_of(0)).logits
    loss_of(logits).backward()
    expected = {name: p.grad for name, p in named_by_unit(whole).items() if p.grad is not None}
    found = split.gradients()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert_same(found, expected, anatomy)
