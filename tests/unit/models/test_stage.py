import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models import FolderWeights, RandomKey, StageModule, build_stage, make_model_spec, open_model

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"
KEY = RandomKey(seed=1, step=0, micro_batch=0)
Inputs = dict[str, torch.Tensor]


def made(folder: Path, auto_class: str, **wishes: object) -> tuple[ModelSpec, FolderWeights]:
    source = open_model(folder)
    spec = make_model_spec(source, auto_class=auto_class, config_overrides={}, seed=1, **wishes)  # type: ignore[arg-type]
    return spec, FolderWeights(source, spec)


@pytest.fixture
def bert(bert_tags: Path) -> tuple[ModelSpec, FolderWeights]:
    return made(bert_tags, TAGS)


@pytest.fixture
def llama(tied_llama: Path) -> tuple[ModelSpec, FolderWeights]:
    return made(tied_llama, TEXT)


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    real = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    return sum(real.values())


@pytest.mark.parametrize("units", [(0, 1), (0, 2), (1, 2), (2, 4), (1, 5), (4, 5)])
def test_a_stage_holds_memory_for_its_own_parameters_only(
    llama: tuple[ModelSpec, FolderWeights], units: tuple[int, int]
) -> None:
    stage = build_stage(llama[0], *units, llama[1])
    own = sum(parameter.nbytes for parameter in stage.parameters().values())
    held = storage_bytes(stage.module.parameters())
    assert own <= held <= own + 4
    assert storage_bytes(stage.module.buffers()) < 1000


def test_borders_and_ends_are_told(bert: tuple[ModelSpec, FolderWeights]) -> None:
    first, middle, last = (build_stage(bert[0], a, b, bert[1]) for a, b in ((0, 1), (1, 4), (4, 5)))
    assert (first.is_first, first.is_last, middle.is_first, middle.is_last) == (True, False, False, False)
    assert (last.is_first, last.is_last, last.first_unit, last.stop_unit, last.unit_count) == (False, True, 4, 5, 5)
    assert first.tied_name is middle.tied_name is last.tied_name is None


def test_parameters_come_in_unit_order_and_know_their_unit(bert: tuple[ModelSpec, FolderWeights]) -> None:
    stage = build_stage(bert[0], 0, 5, bert[1])
    units = [stage.unit_of(name) for name in stage.parameters()]
    assert units == sorted(units)
    assert set(units) == {0, 1, 2, 3, 4}


def test_both_ends_of_a_trained_tied_matrix_are_told_and_share_its_name(llama: tuple[ModelSpec, FolderWeights]) -> None:
    first, middle, last = (build_stage(llama[0], a, b, llama[1]) for a, b in ((0, 2), (2, 4), (4, 5)))
    name = "model.embed_tokens.weight"
    assert first.tied_name == last.tied_name == name
    assert middle.tied_name is None
    assert (first.unit_of(name), last.unit_of(name)) == (0, 4)
    assert torch.equal(first.parameters()[name], last.parameters()[name])


def test_a_tied_matrix_on_one_stage_is_one_parameter_and_needs_no_exchange(
    llama: tuple[ModelSpec, FolderWeights],
) -> None:
    stage = build_stage(llama[0], 0, 5, llama[1])
    assert stage.tied_name is None
    assert stage.module.lm_head.weight is stage.module.model.embed_tokens.weight


def test_a_frozen_tied_matrix_needs_no_exchange(tied_llama: Path) -> None:
    spec, weights = made(tied_llama, TEXT, frozen_patterns=["embedding"])
    stage = build_stage(spec, 0, 2, weights)
    assert stage.tied_name is None
    assert not stage.parameters()["model.embed_tokens.weight"].requires_grad
    assert "model.embed_tokens.weight" not in stage.trainable()


def test_swapped_parameters_are_used_by_the_next_forward_in_both_tied_places(
    llama: tuple[ModelSpec, FolderWeights], inputs: Inputs
) -> None:
    stage = build_stage(llama[0], 0, 5, llama[1])
    old = stage.parameters()
    before = stage.forward(inputs, None, KEY)
    zeros = {name: torch.nn.Parameter(torch.zeros_like(parameter)) for name, parameter in old.items()}
    stage.swap_parameters(zeros)
    assert stage.parameters()["model.embed_tokens.weight"] is zeros["model.embed_tokens.weight"]
    assert stage.module.lm_head.weight is zeros["model.embed_tokens.weight"]
    assert not stage.forward(inputs, None, KEY).any()
    stage.swap_parameters(old)
    assert torch.equal(stage.forward(inputs, None, KEY), before)


def test_inputs_that_the_model_does_not_know_are_left_out(
    llama: tuple[ModelSpec, FolderWeights], inputs: Inputs
) -> None:
    stage = build_stage(llama[0], 0, 5, llama[1])
    more = {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"]), "labels": inputs["input_ids"]}
    assert torch.equal(stage.forward(more, None, KEY), stage.forward(inputs, None, KEY))


def test_eval_switches_dropout_off(bert: tuple[ModelSpec, FolderWeights], inputs: Inputs) -> None:
    stage = build_stage(bert[0], 0, 5, bert[1])
    other = KEY._replace(step=9)
    assert not torch.equal(stage.forward(inputs, None, KEY), stage.forward(inputs, None, other))
    stage.eval()
    assert torch.equal(stage.forward(inputs, None, KEY), stage.forward(inputs, None, other))


@pytest.mark.parametrize("units", [(0, 2), (2, 4), (2, 5)])
def test_a_forward_keeps_nothing_alive_but_what_its_backward_needs(
    bert: tuple[ModelSpec, FolderWeights], inputs: Inputs, units: tuple[int, int]
) -> None:
    stage = build_stage(bert[0], *units, bert[1])
    hidden = None if stage.is_first else torch.randn(2, 6, 32)
    seen: list[weakref.ref[torch.Tensor]] = []
    block = stage.module.bert.encoder.layer[stage.stop_unit - 2 if not stage.is_last else 2]
    block.attention.register_forward_hook(lambda _m, _a, output: seen.append(weakref.ref(output[0])))
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            output = stage.forward(inputs, hidden, KEY)
        kept = weakref.ref(output)
        del output, hidden
        assert seen
        assert [reference() for reference in [*seen, kept]] == [None] * (len(seen) + 1)
    finally:
        gc.enable()


def test_a_stage_on_the_meta_device_has_shapes_and_no_values(llama: tuple[ModelSpec, FolderWeights]) -> None:
    stage = build_stage(llama[0], 1, 5, None, device="meta")
    assert all(parameter.is_meta for parameter in stage.parameters().values())
    assert stage.parameters()["model.norm.weight"].shape == (32,)
    assert storage_bytes(stage.module.buffers()) == 0


def test_rows_and_lengths_may_change_from_one_forward_to_the_next(bert: tuple[ModelSpec, FolderWeights]) -> None:
    stages = [build_stage(bert[0], a, b, bert[1]) for a, b in ((0, 2), (2, 5))]
    for rows, tokens in ((2, 6), (1, 1), (3, 40), (2, 7)):
        ids = torch.ones(rows, tokens, dtype=torch.long)
        logits = _through(stages, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert logits.shape == (rows, tokens, 5)


def _through(stages: list[StageModule], inputs: Inputs) -> torch.Tensor:
    hidden = None
    for stage in stages:
        hidden = stage.forward(inputs, hidden, KEY)
    assert hidden is not None
    return hidden


def test_stages_with_adapters_built_by_several_threads_at_once_have_all_their_values(bert_tags: Path) -> None:
    lora = LoraSpec(rank=2, alpha=4, target_modules=("query", "value"))
    spec, weights = made(bert_tags, TAGS, method="lora", lora=lora)
    register, interval = torch.nn.Module.register_parameter, sys.getswitchinterval()
    built: list[StageModule] = []

    def build() -> None:
        built.extend(build_stage(spec, 0, 5, weights) for _ in range(3))

    threads = [threading.Thread(target=build) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert torch.nn.Module.register_parameter is register, "PEFT's own has stayed"
    assert len(built) == 9
    assert not any(parameter.is_meta for stage in built for parameter in stage.parameters().values())
