import pytest

from coterie.metrics.records import (
    AnyRecord,
    DeviceSummary,
    EvaluationRecord,
    LinkSummary,
    StartRecord,
    StepRecord,
    SummaryRecord,
    WorkerStep,
)


def make_step(
    step: int, *, loss: float | None = 1.0, tokens: int = 100, seconds: float = 0.5, epoch: int = 0
) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss,
        tokens=tokens,
        loss_tokens=tokens // 2,
        seconds=seconds,
        learning_rate=1e-4,
        grad_norm=0.5,
        workers=(WorkerStep(worker="a", utilization=0.8, memory_bytes=512 << 20),),
    )


def make_evaluation(step: int, *, split: str = "dev", f1: float = 0.5) -> EvaluationRecord:
    return EvaluationRecord(
        split=split, step=step, epoch=1, loss=0.4, metrics={"f1": f1, "recall": 0.6}, main_metric="f1", seconds=2.0
    )


def make_start(*, first_step: int = 0, total_steps: int = 10) -> StartRecord:
    return StartRecord(
        run="r", package_version="0", model="m", total_steps=total_steps, steps_per_epoch=5, first_step=first_step
    )


@pytest.fixture
def records() -> tuple[AnyRecord, ...]:
    steps = tuple(make_step(step, loss=2 / (step + 1), epoch=step // 30) for step in range(60))
    return (make_start(total_steps=60), *steps, make_evaluation(60), make_evaluation(60, split="test"))


@pytest.fixture
def summary() -> SummaryRecord:
    devices = (
        DeviceSummary(
            worker="a",
            device_name="desk",
            units="embedding, block 0",
            predicted_peak_bytes=520 << 20,
            measured_peak_bytes=494 << 20,
            limit_bytes=600 << 20,
            utilization=0.84,
        ),
        DeviceSummary(
            worker="b",
            device_name="phone",
            units="block 1, output layer",
            predicted_peak_bytes=280 << 20,
            measured_peak_bytes=288 << 20,
        ),
    )
    return SummaryRecord(
        model="m",
        method="full",
        schedule="flush",
        steps=60,
        epochs=2,
        seconds=30.0,
        tokens=6000,
        first_loss=2.0,
        last_loss=None,
        predicted_step_s=0.45,
        measured_step_s=0.5,
        one_device_step_s=0.9,
        one_device_peak_bytes=800 << 20,
        devices=devices,
        links=(
            LinkSummary(source="desk", target="phone", forward_bytes=60 << 20, backward_bytes=60 << 20, path="direct"),
        ),
        quality=(make_evaluation(60, f1=0.723),),
        output="runs/latest",
        counts={"rows cut to the context": 3},
    )
