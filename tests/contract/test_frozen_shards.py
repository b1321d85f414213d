"""What the coordinator sends of frozen weights in 8 and 4 bits, and what a worker makes of it, or refuses."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coterie.cluster.messages import PARAMETER
from coterie.coordinator.shards import ShardSource
from coterie.errors import ModelError
from coterie.jobs.model_spec import FrozenDtype, LoraSpec, ModelSpec
from coterie.models import FolderWeights, MappingWeights, build_stage, describe, make_model_spec, open_model
from coterie.models.frozen_linear import FrozenLinear
from coterie.models.frozen_weights import frozen_matrices, held_bytes
from coterie.tensors.codecs import decode, encode
from coterie.transport.frame import Buffer, TensorSpec
from coterie.transport.limits import Limits, check_tensor

TEXT = "AutoModelForCausalLM"
Sent = list[tuple[TensorSpec, Buffer]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=61,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def spec_of(folder: Path, dtype: FrozenDtype) -> ModelSpec:
    return make_model_spec(
        open_model(folder),
        auto_class=TEXT,
        config_overrides={},
        seed=0,
        method="lora",
        lora=LoraSpec(rank=2),
        frozen_dtype=dtype,
    )


def sent(folder: Path, spec: ModelSpec, unit: int) -> Sent:
    """One unit as it leaves the coordinator."""
    source = ShardSource(spec, FolderWeights(open_model(folder), spec), None)
    return [encode(tensor, name, "raw") for name, tensor in source.read(unit).items()]


def received(frames: Sent) -> MappingWeights:
    """What a worker hands to its stage."""
    return MappingWeights(
        {layout.name.removeprefix(PARAMETER): decode(layout, bytearray(buffer)) for layout, buffer in frames}
    )


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8.25), ("int4", 4.5)])
def test_frozen_weights_travel_in_the_bits_that_they_are_held_in(folder: Path, dtype: FrozenDtype, bits: float) -> None:
    spec = spec_of(folder, dtype)
    anatomy = describe(spec)
    linear = frozen_matrices(spec_of(folder, "int4"))
    for unit in range(anatomy.unit_count):
        names = anatomy.names_in(unit, unit + 1)
        frozen = sum(torch.Size(linear[name].shape).numel() for name in names if name in linear)
        others = sum(4 * torch.Size(anatomy.shapes[name]).numel() for name in names if name not in linear)
        total = sum(layout.nbytes for layout, _ in sent(folder, spec, unit))
        assert total == sum(held_bytes(spec, name, anatomy.shapes[name]) for name in names)
        assert total == frozen * bits / 8 + others


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_link_carries_them_within_its_limits_and_a_worker_holds_what_was_sent(
    folder: Path, dtype: FrozenDtype
) -> None:
    spec = spec_of(folder, dtype)
    frames = sent(folder, spec, 1)
    for layout, _ in frames:
        check_tensor(layout, Limits())
    stage = build_stage(spec, 1, 2, received(frames))
    layers = [module for module in stage.module.modules() if isinstance(module, FrozenLinear)]
    assert len(layers) == 7
    by_name = {layout.name: bytes(buffer) for layout, buffer in frames}
    for layer in layers:
        for part, tensor in (("/packed", layer.packed), ("/scales", layer.scales)):
            if tensor is not None:
                held = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                assert held == by_name[PARAMETER + layer.matrix.name + part]


def test_what_is_sent_does_not_depend_on_the_time_or_on_the_other_units(folder: Path) -> None:
    spec = spec_of(folder, "int4")
    first, again = ({layout.name: bytes(b) for layout, b in sent(folder, spec, 2)} for _ in range(2))
    assert first == again


def test_a_shard_in_another_form_than_the_spec_says_is_refused_by_the_worker(folder: Path) -> None:
    forms: tuple[FrozenDtype, ...] = ("float32", "bfloat16", "int8", "int4")
    shards = {dtype: sent(folder, spec_of(folder, dtype), 1) for dtype in forms}
    for said, given in itertools.permutations(forms, 2):
        with pytest.raises(ModelError):
            build_stage(spec_of(folder, said), 1, 2, received(shards[given]))


def test_scales_that_are_no_numbers_reach_the_loss_and_nothing_else(folder: Path) -> None:
    """Values cannot be told from right ones; but a wrong one shows: as a loss that is not finite, which ends a run."""
    spec = spec_of(folder, "int4")
    tensors = {name.removeprefix(PARAMETER): decode(layout, bytearray(buffer))
               for layout, buffer in sent(folder, spec, 1) for name in (layout.name,)}  # fmt: skip
    tensors[next(name for name in tensors if name.endswith("/scales"))].fill_(float("nan"))
    stage = build_stage(spec, 1, 2, MappingWeights(tensors))
    layer = next(module for module in stage.module.modules() if isinstance(module, FrozenLinear))
    assert layer(torch.ones(1, layer.in_features)).isnan().all()
