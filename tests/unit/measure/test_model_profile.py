import functools
from collections.abc import Callable

import msgspec
import pytest
import torch

from coterie.jobs.model_spec import FrozenDtype, LoraSpec, ModelSpec
from coterie.measure import fake_stage, model_profile
from coterie.measure.live_bytes import SavedBytes
from coterie.measure.model_profile import profile_model
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.unit_cost import example_inputs, run_forward
from coterie.models import build_stage, describe
from coterie.planner.memory import stage_sizes
from coterie.profiles.model_profile import ModelProfile

Make = Callable[..., ModelSpec]


@pytest.fixture(autouse=True)
def _on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model of usual size is counted; the tiny ones of these tests would be computed."""
    monkeypatch.setattr(fake_stage, "_FEW_PRODUCTS", 0)


@functools.cache
def profile(spec: ModelSpec, tokens: int = 16) -> ModelProfile:
    return profile_model(spec, memory_tokens=tokens, typical_tokens=tokens, name="tiny")


def really_saved(
    spec: ModelSpec, first: int, stop: int, rows: int, tokens: int = 16, *, receives_gradient: bool = True
) -> int:
    """Bytes that a real forward of units [first, stop) saves, inputs included."""
    stage = build_stage(spec, first, stop, StandInWeights(spec))
    inputs = example_inputs(rows, tokens)
    hidden = None if stage.is_first else torch.randn(rows, tokens, 32).requires_grad_(receives_gradient)
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


def adapters_on(*blocks: int) -> LoraSpec:
    targets = tuple(f"bert.encoder.layer.{i}.attention.self.{p}" for i in blocks for p in ("query", "value"))
    return LoraSpec(rank=2, target_modules=targets)


@pytest.mark.parametrize("trained", [(1, 2, 3), (2, 3), (3,)])
@pytest.mark.parametrize(("first", "stop"), [(0, 6), (0, 2), (0, 4), (2, 5), (3, 6), (4, 6), (5, 6), (3, 5)])
def test_below_what_is_trained_nothing_is_saved_and_at_its_edge_no_more_than_is_needed(
    bert: Make, trained: tuple[int, ...], first: int, stop: int
) -> None:
    spec = bert(lora=adapters_on(*trained))
    model = profile(spec)
    lowest = trained[0] + 1
    assert model.first_backward_unit == describe(spec).first_backward_unit == lowest
    expected = really_saved(spec, first, stop, rows=5, receives_gradient=first > lowest) if stop > lowest else 0
    assert stage_sizes(model, first, stop, 5).saved == pytest.approx(expected, rel=0.02)


def test_below_what_is_trained_there_is_no_backward_and_the_lowest_block_has_less_of_it(bert: Make) -> None:
    below, lowest, above, last = profile(bert(lora=adapters_on(1, 2, 3))).layers[1:5]
    assert below.backward_flops_per_row == below.saved.at(4) == 0
    assert below.transient.at(4) > 0
    assert 0 < lowest.backward_flops_per_row < above.backward_flops_per_row
    assert lowest.saved.at(4) <= above.saved.at(4)
    assert above == msgspec.structs.replace(last, name=above.name)
    assert len({below.kind, lowest.kind, above.kind}) == 3


def test_a_frozen_block_above_what_is_trained_passes_gradients_on_without_making_any(bert: Make) -> None:
    names = tuple(name for name, unit in describe(bert()).unit_of.items() if unit == 3)
    frozen, trained = (profile(spec).layers[3] for spec in (bert(frozen=names), bert()))
    weights = 4 * 32 * 32 + 2 * 32 * 64
    assert frozen.backward_flops_per_row == trained.backward_flops_per_row - 16 * 2 * weights
    assert frozen.kind != trained.kind


def test_dora_is_counted(bert: Make) -> None:
    lora = adapters_on(0, 1, 2, 3)
    plain, dora = (profile(bert(lora=msgspec.structs.replace(lora, variant=v))).layers[2] for v in ("lora", "dora"))
    assert dora.trainable_bytes == plain.trainable_bytes + 2 * 32 * 4
    assert dora.saved.at(4) > plain.saved.at(4)


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


def test_the_loss_over_a_large_vocabulary_makes_one_more_array_of_the_logits_size_and_keeps_none(llama: Make) -> None:
    output = profile(llama(vocab_size=50_000), tokens=64).layers[-1]
    logits = 8 * 64 * 50_000 * 4
    assert output.saved.at(8) < 1.02 * logits
    assert logits < output.transient.at(8) < 1.5 * logits


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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_frozen_weights_count_in_the_bits_that_they_are_held_in(bert: Make, dtype: FrozenDtype) -> None:
    targets = tuple(f"bert.encoder.layer.{i}.attention.self.{p}" for i in range(4) for p in ("query", "value"))
    lora = LoraSpec(rank=2, target_modules=targets, modules_to_save=("classifier",))
    spec = msgspec.structs.replace(bert(lora=lora), frozen_dtype=dtype)
    model, exact = profile(spec), profile(bert(lora=lora))
    assert model.notes == ()
    linear = 4 * 32 * 32 + 2 * 32 * 64
    held = {"bfloat16": 2.0, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 64}[dtype]
    for block, plain in zip(model.layers[1:-1], exact.layers[1:-1], strict=True):
        assert block.parameter_bytes == plain.parameter_bytes - linear * (4 - held)
        assert block.trainable_bytes == plain.trainable_bytes
        # The weight that is unpacked for a product: at most the largest one, 32 x 64 in float32.
        assert plain.transient.at(4) <= block.transient.at(4) <= plain.transient.at(4) + 32 * 64 * 4
    assert model.layers[0].parameter_bytes == exact.layers[0].parameter_bytes
    for first, stop in ((2, 5), (0, 6)):
        assert predicted(model, first, stop, rows=5) == pytest.approx(really_saved(spec, first, stop, rows=5), rel=0.02)


@pytest.mark.parametrize("kind", ["all trained", "adapters above frozen blocks", "4 bits", "a decoder"])
def test_a_tiny_model_is_computed_and_has_the_figures_of_fake_tensors(
    bert: Make, llama: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {
        "all trained": bert(),
        "adapters above frozen blocks": bert(lora=adapters_on(2, 3)),
        "4 bits": msgspec.structs.replace(bert(lora=adapters_on(0, 1, 2, 3)), frozen_dtype="int4"),
        "a decoder": llama(),
    }[kind]
    faked = profile(spec)
    monkeypatch.undo()

    def forbidden(*_: object) -> None:
        raise AssertionError("a stage of fake tensors was built")

    monkeypatch.setattr(model_profile, "build_fake_stage", forbidden)
    before = torch.get_rng_state()
    assert profile_model(spec, memory_tokens=16, typical_tokens=16, name="tiny") == faked
    assert torch.equal(torch.get_rng_state(), before)
