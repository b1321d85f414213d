import functools
from collections.abc import Callable

import pytest
import torch

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.measure.live_bytes import SavedBytes
from coterie.measure.model_profile import profile_model
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.unit_cost import example_inputs, run_forward
from coterie.models import build_stage, describe
from coterie.profiles.model_profile import ModelProfile

Make = Callable[..., ModelSpec]


@functools.cache
def profile(spec: ModelSpec, tokens: int = 16) -> ModelProfile:
    return profile_model(spec, memory_tokens=tokens, typical_tokens=tokens, name="tiny")


def really_saved(spec: ModelSpec, first: int, stop: int, rows: int, tokens: int = 16) -> int:
    """Bytes that a real forward of units [first, stop) saves, inputs included."""
    stage = build_stage(spec, first, stop, StandInWeights(spec))
    inputs = example_inputs(rows, tokens)
    hidden = None if stage.is_first else torch.randn(rows, tokens, 32).requires_grad_()
    saved = SavedBytes([*stage.module.parameters(), *stage.module.buffers(), *inputs.values()])
    with saved.hooks():
        output = run_forward(stage, inputs, hidden)
    assert output.isfinite().all()
    return saved.total_bytes + sum(tensor.nbytes for tensor in inputs.values())


def predicted(model: ModelProfile, first: int, stop: int, rows: int) -> int:
    return sum(layer.saved.at(rows) for layer in model.layers[first:stop]) + model.shared.at(rows)


@pytest.mark.parametrize(("first", "stop"), [(0, 6), (0, 2), (2, 5), (3, 6)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_sum_over_units_is_what_a_real_stage_saves(bert: Make, first: int, stop: int, dropout: float) -> None:
    spec = bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    assert predicted(profile(spec), first, stop, rows=5) == pytest.approx(
        really_saved(spec, first, stop, rows=5), rel=0.02
    )


@pytest.mark.parametrize(("first", "stop"), [(0, 6), (1, 4), (3, 6)])
def test_a_llama_saves_what_its_profile_says(llama: Make, first: int, stop: int) -> None:
    spec = llama()
    assert predicted(profile(spec), first, stop, rows=5) == pytest.approx(
        really_saved(spec, first, stop, rows=5), rel=0.02
    )


def test_lora_saves_less_than_full_fine_tuning_and_as_much_as_a_real_stage(bert: Make) -> None:
    targets = tuple(f"bert.encoder.layer.{i}.attention.self.{p}" for i in range(4) for p in ("query", "value"))
    spec = bert(lora=LoraSpec(rank=2, target_modules=targets, modules_to_save=("classifier",)))
    model = profile(spec)
    assert model.layers[2].saved.at(4) < profile(bert()).layers[2].saved.at(4)
    assert predicted(model, 2, 5, rows=5) == pytest.approx(really_saved(spec, 2, 5, rows=5), rel=0.02)
    assert model.layers[2].trainable_bytes == 2 * (2 * 32 + 32 * 2) * 4
    assert model.layers[0].trainable_bytes == 0


def test_parameter_bytes_add_up_to_the_model(bert: Make) -> None:
    spec = bert()
    total = sum(4 * torch.Size(shape).numel() for shape in describe(spec).shapes.values())
    layers = profile(spec).layers
    assert sum(layer.parameter_bytes for layer in layers) == total
    assert [layer.name for layer in layers] == ["embedding", *(f"block {i}" for i in range(4)), "output layer"]


def test_a_frozen_embedding_saves_nothing_and_has_no_backward(bert: Make) -> None:
    spec = bert()
    names = tuple(name for name, unit in describe(spec).unit_of.items() if unit == 0)
    layer = profile(bert(frozen=names)).layers[0]
    assert layer.saved.at(4) == 0
    assert layer.trainable_bytes == layer.largest_trainable_bytes == layer.backward_flops_per_row == 0
    trained = profile(spec).layers[0]
    assert trained.largest_trainable_bytes == 101 * 32 * 4 or trained.largest_trainable_bytes == 512 * 32 * 4


def test_an_accumulated_gradient_needs_a_second_copy_of_the_largest_tensor(bert: Make) -> None:
    layer = profile(bert(vocab_size=5000)).layers[0]
    assert layer.transient.at(2) > 0.95 * 5000 * 32 * 4  # what the backward has freed by then is off
    assert layer.fresh_transient.at(2) < 5000 * 32 * 4


def test_tied_embeddings_count_on_both_ends(llama: Make) -> None:
    model = profile(llama())
    assert model.tied
    assert model.tied_bytes == 101 * 32 * 4
    assert model.layers[0].parameter_bytes == model.tied_bytes
    assert model.layers[-1].parameter_bytes >= model.tied_bytes
    assert model.layers[-1].trainable_bytes >= model.tied_bytes


def test_logits_dominate_the_output_layer_of_a_language_model(llama: Make) -> None:
    output = profile(llama(vocab_size=4000)).layers[-1]
    assert output.saved.at(3) >= 3 * 16 * 4000 * 4


def test_attention_without_dropout_is_counted_with_the_kernel_that_saves_no_attention_matrix(llama: Make) -> None:
    short, long = profile(llama(), tokens=16), profile(llama(), tokens=32)
    # The kernel keeps a float copy of the mask, one T x T matrix; the other one would keep several per head.
    masks = 4 * (32 * 32 - 2 * 16 * 16)
    assert long.layers[1].saved.per_row == pytest.approx(2 * short.layers[1].saved.per_row + masks, rel=0.01)


def test_flops_of_a_block_are_two_per_weight_and_token_and_twice_that_backward(bert: Make) -> None:
    block = profile(bert()).layers[1]
    weights = 4 * 32 * 32 + 2 * 32 * 64
    attention = 2 * 2 * 16 * 16 * 32
    assert block.forward_flops_per_row == 16 * 2 * weights + attention
    assert block.backward_flops_per_row == pytest.approx(2 * block.forward_flops_per_row, rel=0.01)


def test_attention_kernels_of_the_cpu_count_as_flops(llama: Make) -> None:
    short, long = profile(llama(), tokens=16), profile(llama(), tokens=32)
    grown = long.layers[1].forward_flops_per_row - 2 * short.layers[1].forward_flops_per_row
    assert grown == 2 * 2 * 32 * (32 * 32 - 2 * 16 * 16)


def test_times_and_memory_have_their_own_token_counts(bert: Make) -> None:
    spec = bert()
    mixed = profile_model(spec, memory_tokens=16, typical_tokens=8, name="tiny")
    assert mixed.layers[1].saved == profile(spec, tokens=16).layers[1].saved
    whole = profile(spec, tokens=16).layers[1].forward_flops_per_row
    attention = 2 * 2 * 32  # per pair of tokens
    assert mixed.layers[1].forward_flops_per_row == (whole - attention * 16 * 16) / 2 + attention * 8 * 8


def test_the_seed_changes_nothing(bert: Make) -> None:
    assert profile(bert(seed=1)) == profile(bert())


def test_a_mixture_of_experts_is_counted(mixtral: ModelSpec) -> None:
    model = profile(mixtral)
    assert len(model.layers) == 4
    assert model.layers[1].saved.at(4) > 0
    assert model.layers[1].forward_flops_per_row > 0
