"""What is kept, and for how long: weight versions, graphs, gradients, and what is never sent."""

import gc
import weakref
from typing import Any

import msgspec
import pytest
import torch

from coterie.errors import NonFiniteLossError, OutOfMemoryError, UnsupportedModelError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.pipeline.memory_ports import MemoryPipeline
from coterie.schedules import make_schedule, weight_versions

ADAMW = OptimizerSpec(learning_rate=1e-3, total_samples=10_000)
STEPS = 5


def _live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(tensor.numel() for tensor in tensors if tensor.device.type == "cpu")


@pytest.mark.parametrize(("kind", "steps"), [("flush", 80), ("stash", 48)])
def test_live_tensors_do_not_grow_over_many_steps(lab: Any, kind: str, steps: int) -> None:
    case = lab.bert(frozen_patterns=("bert.encoder.layer.[12].*",))
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW, batches=lambda step: _one_row(lab, step))
    counts = []
    for segment in range(4):
        pipeline.run(kind, steps // 4, first_step=steps // 4 * segment)
        counts.append(_live_tensors())
    assert counts[-1] == counts[0]


@pytest.mark.parametrize("kind", ["flush", "gpipe", "stash", "2bw"])
def test_each_stage_holds_as_many_weight_versions_as_the_schedule_says(lab: Any, kind: str) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(3), ADAMW, batches=lambda step: _all_labelled(lab, step))
    pipeline.run(kind, STEPS)
    schedule = make_schedule(kind, stages=3, micro_batches=lab.micro_batches, steps=STEPS)
    for stage, reports in enumerate(pipeline.reports):
        own = sum(parameter.nbytes for parameter in pipeline.stages[stage].trainable().values())
        versions = max(report.weight_versions for report in reports)
        assert versions == weight_versions(schedule, stage)
        assert max(report.stashed_bytes for report in reports) == (versions - 1) * own
        assert pipeline.executors[stage]._stash.live_versions == 1
        assert [report.step for report in reports] == list(range(STEPS))


def _one_row(lab: Any, step: int) -> Any:
    """A single row, so that three of the micro-batches are empty, of a length that changes."""
    return [
        msgspec.structs.replace(part, step=step, step_loss_tokens=part.micro_batch_loss_tokens)
        if part.micro_batch == 0
        else msgspec.structs.replace(part, step=step, rows=0, micro_batch_loss_tokens=0)
        for part in lab.make_batch(2 * (step % 2))
    ]


def _all_labelled(lab: Any, step: int) -> Any:
    """Skipped updates share their versions, so here every micro-batch has labels."""
    return [msgspec.structs.replace(part, step=step) for part in lab.make_batch(0)]


def test_flush_copies_no_weights_and_keeps_its_parameter_objects(lab: Any) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW)
    before = [{name: (id(p), p.data_ptr()) for name, p in stage.trainable().items()} for stage in pipeline.stages]
    pipeline.run("flush", STEPS)
    after = [{name: (id(p), p.data_ptr()) for name, p in stage.trainable().items()} for stage in pipeline.stages]
    assert after == before


def test_no_gradient_is_left_after_a_segment(lab: Any) -> None:
    case = lab.bert()
    for kind in ("flush", "stash", "2bw"):
        pipeline = lab.Pipeline(case, case.cuts(3), ADAMW).run(kind, STEPS)
        assert all(p.grad is None for stage in pipeline.stages for p in stage.parameters().values())
        assert pipeline.links._boxes == {}


class RecordingPipeline(MemoryPipeline):
    """Notes what crosses which link."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.sent: list[tuple[str, int]] = []
        self.outputs: list[weakref.ref[torch.Tensor]] = []

    def put(self, key: Any, tensor: torch.Tensor) -> None:
        self.sent.append((key[0], key[1]))
        super().put(key, tensor)


@pytest.mark.parametrize("kind", ["flush", "stash"])
def test_stages_below_everything_that_is_trained_get_no_gradient_and_keep_no_graph(lab: Any, kind: str) -> None:
    case = lab.bert_lora(target_modules=("bert.encoder.layer.3.attention.self.query",))
    assert not any(case.anatomy.trainable[:4])
    expected = lab.Pipeline(case, case.cuts(1), ADAMW)
    pipeline = lab.Pipeline(case, (0, 2, 3, 6), ADAMW, ports_class=RecordingPipeline)
    pipeline.run(kind, STEPS)
    assert {kind for kind, _ in pipeline.links.sent} == {"hidden"}
    if kind == "flush":
        expected.run("flush", STEPS)
        assert pipeline.losses == expected.losses
        assert lab.equal(pipeline.parameters(), expected.parameters())


def test_a_frozen_embedding_on_a_stage_of_its_own_gets_no_gradient(lab: Any) -> None:
    case = lab.bert(frozen_patterns=("embedding",))
    expected = lab.Reference(case, ADAMW).run(STEPS)
    pipeline = lab.Pipeline(case, (0, 1, 3, 6), ADAMW, ports_class=RecordingPipeline).run("flush", STEPS)
    assert {target for kind, target in pipeline.links.sent if kind == "gradient"} == {1}
    assert pipeline.losses == pytest.approx(expected.losses, rel=1e-6)


def test_forward_only_gives_predictions_and_losses_and_changes_nothing(lab: Any) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(3), ADAMW)
    before = pipeline.parameters()
    pipeline.run("forward", STEPS)
    model = lab.Reference(case, ADAMW).model.eval()
    rows = [part for step in range(STEPS) for part in lab.make_batch(step) if part.rows]
    assert set(pipeline.links.predictions) == {(part.step, part.micro_batch) for part in rows}
    for part in rows:
        with torch.no_grad():
            logits = model(**part.inputs).logits
        assert torch.equal(pipeline.links.predictions[part.step, part.micro_batch], logits.argmax(-1))
    assert lab.equal(pipeline.parameters(), before)


def test_dropout_is_off_in_evaluation_and_on_again_afterwards(lab: Any) -> None:
    case = lab.bert()
    evaluated = lab.Pipeline(case, case.cuts(2), ADAMW).run("forward", STEPS)
    model = lab.Reference(case, ADAMW).model.eval()
    for report in evaluated.links.losses:
        part = lab.make_batch(report.step)[report.micro_batch]
        with torch.no_grad():
            loss = lab.TokenLoss().loss_sum(model(**part.inputs).logits, part.labels) if part.rows else torch.zeros(())
        assert report.loss_sum == pytest.approx(loss.item(), rel=1e-6)
    evaluated.links.losses.clear()
    evaluated.run("flush", STEPS)
    assert evaluated.losses == lab.Pipeline(case, case.cuts(2), ADAMW).run("flush", STEPS).losses


def test_a_tied_trained_matrix_is_refused_without_a_flush(lab: Any) -> None:
    case = lab.llama()
    for kind in ("stash", "2bw"):
        with pytest.raises(UnsupportedModelError, match=rf"{kind} schedule cannot train .*embed_tokens.*tied"):
            lab.Pipeline(case, case.cuts(2), ADAMW).run(kind, 2)
    frozen = lab.llama(frozen_patterns=("*embed_tokens*",))
    lab.Pipeline(frozen, frozen.cuts(2), ADAMW).run("stash", 2)


@pytest.mark.parametrize("kind", ["flush", "stash"])
def test_a_non_finite_loss_stops_every_stage_before_its_update_and_is_named(lab: Any, kind: str) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW).run(kind, 1)
    with torch.no_grad():
        pipeline.stages[1].parameters()["classifier.bias"][0] = float("nan")
    before = pipeline.parameters()
    with pytest.raises(NonFiniteLossError, match=r"loss of step 2, micro-batch 1 is nan"):
        pipeline.run(kind, 2, first_step=1)
    after = pipeline.parameters()
    assert all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)
    for stage, executor in zip(pipeline.stages, pipeline.executors, strict=True):
        assert all(parameter.grad is None for parameter in stage.parameters().values())
        assert (executor._in_flight, executor._stash.live_versions) == ({}, 1)


def test_a_non_finite_gradient_norm_stops_all_stages_before_their_update(lab: Any) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW)
    embedding = pipeline.stages[0].trainable()["bert.embeddings.word_embeddings.weight"]
    embedding.register_hook(lambda gradient: gradient * float("inf"))
    before = pipeline.parameters()
    with pytest.raises(NonFiniteLossError, match="gradient norm of step 1"):
        pipeline.run("flush", 1)
    assert lab.equal(pipeline.parameters(), before)


def test_a_real_failed_allocation_in_a_forward_names_the_stage(lab: Any) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW)

    class Greedy(lab.TokenLoss):
        def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return logits.new_empty(1 << 58).sum() + labels.sum()

    pipeline.executors[1]._task = Greedy()
    with pytest.raises(OutOfMemoryError, match="stage 1 ran out of memory"):
        pipeline.run("flush", 1)
