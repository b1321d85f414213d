import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from coterie.errors import ModelError, RecipeError
from coterie.jobs.model_spec import FrozenDtype, LoraSpec, ModelSpec
from coterie.models import (
    FolderWeights,
    MappingWeights,
    PackedWeights,
    RandomKey,
    build_stage,
    describe,
    load_whole_model,
    make_forward_spec,
    make_model_spec,
    open_model,
)
from coterie.models.frozen_linear import FrozenLinear
from coterie.models.frozen_weights import FrozenMatrix, frozen_matrices, held_bytes, held_names

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"
SMALL: tuple[FrozenDtype, ...] = ("bfloat16", "int8", "int4")


def layer_of(linear: nn.Module, dtype: FrozenDtype, *, transposed: bool = False) -> FrozenLinear:
    matrix = FrozenMatrix(name="x.weight", unit=1, shape=tuple(linear.weight.shape), transposed=transposed, dtype=dtype)
    return FrozenLinear(matrix, linear.bias, matrix.pack(linear.weight.detach()))


def plain_with(linear: nn.Module, layer: FrozenLinear) -> nn.Module:
    """The layer as it was, with the unpacked weight."""
    linear.weight = nn.Parameter(layer.weight, requires_grad=False)
    return linear


def spec_of(folder: Path, auto_class: str, dtype: FrozenDtype, **wishes: Any) -> tuple[ModelSpec, PackedWeights]:
    source = open_model(folder)
    spec = make_model_spec(
        source, auto_class=auto_class, config_overrides={}, seed=1, frozen_dtype=dtype, **{"method": "lora", **wishes}
    )
    return spec, PackedWeights(FolderWeights(source, spec), spec)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", SMALL)
def test_forward_and_backward_are_those_of_a_plain_layer_with_the_unpacked_weight(
    dtype: FrozenDtype, transposed: bool
) -> None:
    torch.manual_seed(0)
    linear = Conv1D(48, 40) if transposed else nn.Linear(40, 48)
    layer = layer_of(linear, dtype, transposed=transposed)
    plain = plain_with(linear, layer)
    inputs, gradient = torch.randn(2, 5, 40), torch.randn(2, 5, 48)
    found, expected = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    layer(found).backward(gradient)
    bias_gradient = linear.bias.grad.clone()
    linear.bias.grad = None
    output = plain(expected)
    output.backward(gradient)
    assert torch.allclose(layer(inputs), output, atol=1e-6)
    assert torch.allclose(found.grad, expected.grad, atol=1e-6)
    assert torch.allclose(bias_gradient, linear.bias.grad, atol=1e-5)
    assert (layer.in_features, layer.out_features) == (40, 48)


@pytest.mark.parametrize("dtype", SMALL)
def test_nothing_is_kept_between_forward_and_backward(dtype: FrozenDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(nn.Linear(64, 64), dtype)
    unpacked: list[weakref.ref[torch.Tensor]] = []
    plain = FrozenLinear.unpacked

    def watched(self: FrozenLinear, wanted: torch.dtype) -> torch.Tensor:
        weight = plain(self, wanted)
        unpacked.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(FrozenLinear, "unpacked", watched)
    saved: list[torch.Tensor] = []
    inputs = torch.randn(3, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = layer(inputs)
    gc.collect()
    assert saved == []
    assert [reference() for reference in unpacked] == [None]
    output.sum().backward()
    assert inputs.grad is not None
    assert len(unpacked) == 2


@pytest.mark.parametrize("dtype", SMALL)
def test_under_autocast_it_computes_in_bfloat16_and_gives_gradients_of_the_inputs_type(dtype: FrozenDtype) -> None:
    layer = layer_of(nn.Linear(64, 32), dtype)
    inputs = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(inputs)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32
    assert torch.allclose(inputs.grad, layer.weight.sum(0).expand(3, 64), rtol=0.02, atol=0.02)


def test_frozen_are_linear_layers_inside_blocks_and_nothing_else(tied_llama: Path, bert_tags: Path) -> None:
    spec, _ = spec_of(tied_llama, TEXT, "int4")
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in frozen_matrices(spec)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert {matrix.unit for matrix in frozen_matrices(spec).values()} == {1, 2, 3}
    spec, _ = spec_of(bert_tags, TAGS, "int4", method="full", frozen_patterns=("block 1",))
    assert {matrix.unit for matrix in frozen_matrices(spec).values()} == {2}
    spec, _ = spec_of(bert_tags, TAGS, "int4", method="bitfit")
    assert len(frozen_matrices(spec)) == 3 * 6


def test_gpt2s_transposed_layers_and_falcons_own_class_are_frozen_too(save_model: Any) -> None:
    gpt2 = save_model("gpt2", TEXT, n_embd=32, n_layer=3, n_head=4, vocab_size=61, bos_token_id=1, eos_token_id=2)
    matrices = frozen_matrices(spec_of(gpt2, TEXT, "int8")[0])
    assert len(matrices) == 3 * 4
    assert all(matrix.transposed for matrix in matrices.values())
    falcon = save_model("falcon", TEXT)
    assert len(frozen_matrices(spec_of(falcon, TEXT, "int8")[0])) == 3 * 4


@pytest.mark.parametrize("dtype", SMALL)
def test_a_stage_holds_the_bytes_that_are_counted_for_it(tied_llama: Path, dtype: FrozenDtype) -> None:
    spec, weights = spec_of(tied_llama, TEXT, dtype)
    stage = build_stage(spec, 1, 3, weights)
    layers = [module for module in stage.module.modules() if isinstance(module, FrozenLinear)]
    held = [tensor for layer in layers for tensor in (layer.packed, layer.scales) if tensor is not None]
    held += stage.parameters().values()
    anatomy = describe(spec)
    names = anatomy.names_in(1, 3)
    assert sum(tensor.nbytes for tensor in held) == sum(held_bytes(spec, name, anatomy.shapes[name]) for name in names)
    assert not any(parameter.is_meta for parameter in stage.parameters().values())
    assert set(stage.parameters()) == set(names) - frozen_matrices(spec).keys()


def test_a_layer_without_adapter_is_frozen_as_one_with_it(bert_tags: Path) -> None:
    spec, weights = spec_of(bert_tags, TAGS, "int8", lora=LoraSpec(target_modules=("query",)))
    block = build_stage(spec, 1, 2, weights).module.bert.encoder.layer[0]
    assert isinstance(block.attention.self.query.base_layer, FrozenLinear)
    assert isinstance(block.attention.self.key, FrozenLinear)


def test_code_that_looks_at_the_weight_sees_it_unpacked() -> None:
    linear = nn.Linear(64, 32)
    layer = layer_of(linear, "int8")
    assert layer.weight.shape == (32, 64)
    assert not layer.weight.requires_grad
    assert torch.allclose(layer.weight, linear.weight, atol=1e-3)


def hostile(parts: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    changed = dict(parts)
    changed.pop(name)
    return changed if tensor is None else {**changed, name: tensor}


@pytest.mark.parametrize(
    ("ending", "tensor", "said"),
    [
        ("/packed", torch.zeros(511, dtype=torch.uint8), r"uint8 \(511,\), and int4 needs uint8 \(512,\)"),
        ("/packed", torch.zeros(512), "float32"),
        ("/scales", torch.zeros(17), r"float32 \(17,\)"),
        ("/scales", torch.zeros(16, dtype=torch.int64), "int64"),
        ("/scales", None, "missing"),
        ("/packed", None, "missing"),
    ],
    ids=["too short", "of another type", "one scale too many", "scales of another type", "no scales", "no codes"],
)
def test_parts_of_another_shape_or_type_are_refused(
    bert_tags: Path, ending: str, tensor: torch.Tensor | None, said: str
) -> None:
    spec, weights = spec_of(bert_tags, TAGS, "int4")
    given = weights.get(held_names(spec, describe(spec).names_in(1, 2)))
    name = next(iter(frozen_matrices(spec))) + ending
    with pytest.raises(ModelError, match=said):
        build_stage(spec, 1, 2, MappingWeights(hostile(given, name, tensor)))
    build_stage(spec, 1, 2, MappingWeights(given))


def test_a_whole_weight_in_place_of_its_parts_is_refused(bert_tags: Path) -> None:
    spec, weights = spec_of(bert_tags, TAGS, "int4")
    names = describe(spec).names_in(1, 2)
    whole = FolderWeights(open_model(bert_tags), spec).get(names)
    with pytest.raises(ModelError, match="missing"):
        build_stage(spec, 1, 2, MappingWeights(whole))
    assert weights.get(names).keys() == whole.keys()


def test_frozen_dtype_without_anything_frozen_is_refused(bert_tags: Path) -> None:
    with pytest.raises(RecipeError, match="full fine-tuning trains all") as caught:
        spec_of(bert_tags, TAGS, "int4", method="full")
    assert "lora" in caught.value.hint
    with pytest.raises(RecipeError, match="no linear layer"):
        spec_of(bert_tags, TAGS, "int4", method="full", frozen_patterns=("embedding",))


@pytest.mark.parametrize("dtype", SMALL)
def test_a_model_that_only_predicts_may_be_held_so_too(bert_tags: Path, dtype: FrozenDtype) -> None:
    source = open_model(bert_tags)
    spec = make_forward_spec(source, auto_class=TAGS, frozen_dtype=dtype)
    model = load_whole_model(spec, FolderWeights(source, spec)).eval()
    exact = make_forward_spec(source, auto_class=TAGS)
    ids = torch.arange(4, 16).reshape(2, 6)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = load_whole_model(exact, FolderWeights(source, exact)).eval()(input_ids=ids).logits
    assert 0 < (found - expected).norm() / expected.norm() < 0.1
    stage = build_stage(spec, 0, 5, PackedWeights(FolderWeights(source, spec), spec))
    stage.eval()
    with torch.no_grad():
        assert torch.equal(stage.forward({"input_ids": ids}, None, RandomKey(0, 0, 0)), found)
