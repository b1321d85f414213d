"""k stages under `flush` and `gpipe` train exactly what one device trains: losses and parameters, dropout on."""

from typing import Any

import pytest

from coterie.jobs.optimizer_spec import OptimizerSpec

STEPS = 7
ADAMW = OptimizerSpec(
    name="adamw", learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.0, warmup_samples=12, total_samples=60
)
SGD = OptimizerSpec(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.01, max_grad_norm=0.0)
CLIPPED = OptimizerSpec(name="adamw", learning_rate=3e-3, max_grad_norm=0.05, lr_schedule="cosine", total_samples=60)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw with warm-up", "sgd with momentum"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_flush_over_any_number_of_stages_equals_one_device_bit_for_bit(
    lab: Any, method: str, optimizer: OptimizerSpec
) -> None:
    case = lab.bert() if method == "full" else lab.bert_lora()
    expected = lab.Reference(case, optimizer)
    start = expected.parameters()
    expected.run(STEPS)
    for stages in (1, 2, 3, 4) if optimizer is ADAMW else (3,):
        got = lab.Pipeline(case, case.cuts(stages), optimizer).run("flush", STEPS)
        assert got.losses == expected.losses
        assert lab.equal(got.parameters(), expected.parameters())
        assert not lab.equal(got.parameters(), start)


def test_clipping_by_the_global_norm_equals_one_devices_to_rounding(lab: Any) -> None:
    case = lab.bert()
    expected = lab.Reference(case, CLIPPED).run(STEPS)
    got = lab.Pipeline(case, case.cuts(3), CLIPPED).run("flush", STEPS)
    assert min(norm for step, norm in enumerate(expected.norms) if step != lab.masked_step) > CLIPPED.max_grad_norm
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert lab.max_relative_difference(got.parameters(), expected.parameters()) < 1e-6
    for reports in got.reports:
        assert [report.grad_norm for report in reports] == pytest.approx(expected.norms, rel=1e-5)
        assert [report.grad_norm_is_global for report in reports] == [s != lab.masked_step for s in range(STEPS)]


def test_clipping_gives_the_same_bits_for_every_cut(lab: Any) -> None:
    case = lab.bert()
    one, four = (lab.Pipeline(case, case.cuts(stages), CLIPPED).run("flush", STEPS) for stages in (1, 4))
    assert four.losses == one.losses
    assert lab.equal(four.parameters(), one.parameters())


CHOSEN = ("block 2..3", "output layer")


@pytest.mark.parametrize(
    ("trainable", "stages", "optimizer"),
    [((), 2, ADAMW), ((), 3, CLIPPED), (CHOSEN, 2, CLIPPED), (CHOSEN, 3, ADAMW)],
    ids=["full, 2 stages", "full, 3 stages, clipped", "chosen, 2 stages, clipped", "chosen, 3 stages"],
)
def test_tied_embeddings_on_two_stages_train_as_one_matrix(
    lab: Any, stages: int, optimizer: OptimizerSpec, trainable: tuple[str, ...]
) -> None:
    case = lab.llama(trainable_patterns=trainable)
    expected = lab.Reference(case, optimizer).run(STEPS)
    got = lab.Pipeline(case, case.cuts(stages), optimizer).run("flush", STEPS)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert lab.max_relative_difference(got.parameters(), expected.parameters()) < 1e-5
    live = [norm for step, norm in enumerate(expected.norms) if step != lab.masked_step]
    if optimizer.max_grad_norm:
        assert [r.grad_norm for r in got.reports[0] if r.updates] == pytest.approx(live, rel=1e-5)


def test_gpipe_gives_the_same_bits_as_flush(lab: Any) -> None:
    case = lab.bert()
    flush = lab.Pipeline(case, case.cuts(4), ADAMW).run("flush", STEPS)
    gpipe = lab.Pipeline(case, case.cuts(4), ADAMW).run("gpipe", STEPS)
    assert gpipe.losses == flush.losses
    assert lab.equal(gpipe.parameters(), flush.parameters())


@pytest.mark.parametrize(
    ("method", "kind"),
    [("full", "flush"), ("full", "stash"), ("full", "2bw"), ("lora", "stash"), ("frozen embedding", "flush")],
)
def test_recomputation_changes_nothing(lab: Any, method: str, kind: str) -> None:
    case = {
        "full": lab.bert,
        "lora": lab.bert_lora,
        "frozen embedding": lambda: lab.bert(frozen_patterns=("embedding",)),
    }[method]()
    kept, recomputed = (
        lab.Pipeline(case, case.cuts(3), ADAMW, recompute=recompute).run(kind, 4) for recompute in (False, True)
    )
    assert recomputed.losses == kept.losses
    assert lab.equal(recomputed.parameters(), kept.parameters())


def test_bfloat16_compute_gives_the_same_bits_for_every_cut(lab: Any) -> None:
    case = lab.bert(compute_dtype="bfloat16")
    exact = lab.Pipeline(lab.bert(), case.cuts(1), ADAMW).run("flush", 4)
    one, three = (lab.Pipeline(case, case.cuts(stages), ADAMW).run("flush", 4) for stages in (1, 3))
    assert three.losses == one.losses
    assert lab.equal(three.parameters(), one.parameters())
    assert one.losses != exact.losses
    assert one.losses == pytest.approx(exact.losses, rel=0.1)


def test_a_step_without_any_label_moves_neither_weights_nor_moments(lab: Any) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW).run("flush", lab.masked_step)
    weights, moments = pipeline.parameters(), pipeline.optimizer_state()
    pipeline.run("flush", 1, first_step=lab.masked_step)
    assert lab.equal(pipeline.parameters(), weights)
    after = pipeline.optimizer_state()
    assert all(lab.equal(after[name], moments[name]) for name in moments)
    assert pipeline.losses[-lab.micro_batches :] == [0.0] * lab.micro_batches
    assert pipeline.reports[0][-1].updates == 0


def test_one_segment_of_many_steps_equals_many_segments_of_one(lab: Any) -> None:
    case = lab.bert()
    whole = lab.Pipeline(case, case.cuts(3), CLIPPED).run("flush", STEPS)
    parts = lab.Pipeline(case, case.cuts(3), CLIPPED)
    for step in range(STEPS):
        parts.run("flush", 1, first_step=step)
    assert parts.losses == whole.losses
    assert lab.equal(parts.parameters(), whole.parameters())
