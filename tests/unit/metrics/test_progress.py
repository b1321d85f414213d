"""The progress display: figures from records, plain lines in a pipe, a redrawn block in a terminal."""

import io

import msgspec
import pytest
from rich.console import Console

from coterie.clock import FakeClock
from coterie.metrics.progress import DeviceLine, ProgressDisplay, RunState, _render
from coterie.metrics.records import (
    EvaluationRecord,
    FaultRecord,
    MemoryRecord,
    PlanRecord,
    StageMemory,
    StageRecord,
    StartRecord,
    StepRecord,
    WorkerStep,
)


def step(number: int, *, seconds: float = 0.5, utilization: float = 0.8, loss: float | None = 1.25) -> StepRecord:
    worker = WorkerStep(worker="a", utilization=utilization, memory_bytes=300 << 20)
    return StepRecord(
        step=number,
        epoch=0,
        loss=loss,
        tokens=100,
        loss_tokens=50,
        seconds=seconds,
        learning_rate=0.1,
        workers=(worker,),
    )


def device() -> DeviceLine:
    return DeviceLine("a", "desk", 600 << 20, "embedding, blocks 0-2")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_figures_follow_the_records():
    state = RunState(10, (device(),))
    for number in range(4):
        state.take(step(number))
    assert state.tokens_per_s == pytest.approx(200)
    assert state.eta_s == pytest.approx(3.0)
    assert state.line == "step 4/10  epoch 1  loss 1.2500  200 tokens/s  3 s left | desk 80% 300 MiB / 600 MiB"


def test_one_slow_step_moves_the_estimate_only_a_little():
    state = RunState(100, ())
    for number in range(20):
        state.take(step(number, seconds=1.0))
    state.take(step(20, seconds=11.0))
    assert state.eta_s == pytest.approx(79 * 3.0)


def test_a_resumed_run_starts_at_its_first_step():
    state = RunState(10, ())
    state.take(StartRecord(run="r", package_version="0", model="m", total_steps=20, steps_per_epoch=5, first_step=15))
    assert (state.steps_done, state.total_steps, state.epoch) == (15, 20, 3)
    assert state.eta_text == "starting"
    state.take(step(15, seconds=2.0))
    assert state.eta_s == pytest.approx(4 * 2.0)


def test_heartbeats_update_memory_and_strangers_are_ignored():
    state = RunState(10, (device(),))
    state.take(MemoryRecord(worker="a", memory_bytes=599 << 20, limit_bytes=600 << 20))
    state.take(MemoryRecord(worker="stranger", memory_bytes=1, limit_bytes=1))
    assert state.devices["a"].fullness == pytest.approx(599 / 600)


def test_layers_that_have_moved_are_named_as_before():
    memory = StageMemory(base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0,
        buffers=0, total=0)  # fmt: skip
    stages = tuple(
        StageRecord(
            stage=number,
            worker=worker,
            device_name=worker,
            first_unit=first,
            stop_unit=stop,
            in_flight=1,
            recompute=False,
            allocator="default",
            send_codec="fp32",
            memory=memory,
            memory_limit=9,
            forward_s=0,
            backward_s=0,
            update_s=0,
            send_s=0,
        )
        for number, (worker, first, stop) in enumerate((("a", 0, 5), ("b", 5, 6)))
    )
    state = RunState(10, (device(),))
    state.take(PlanRecord(version=2, schedule="flush", objective="time", batch_rows=8, micro_batches=4, units=6,
        stages=stages, left_out=(), predicted_step_s=1, one_device_step_s=1, one_device_peak=1))  # fmt: skip
    assert [line.units for line in state.devices.values()] == ["embedding, blocks 0-3", "output layer"]


def test_a_device_without_a_limit_and_a_loss_that_is_not_finite_are_shown():
    state = RunState(10, (DeviceLine("a", "desk", 0, ""),))
    state.take(step(0, loss=None))
    assert "loss –" in state.line
    assert state.line.endswith("desk 80% 300 MiB")


def test_outside_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end():
    out, clock = io.StringIO(), FakeClock()
    with ProgressDisplay(9, (device(),), stream=out, clock=clock, plain_interval_s=10) as display:
        for number in range(9):
            display.write(step(number))
            clock.advance(4)
    lines = out.getvalue().splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["step 1/9", "step 4/9", "step 7/9", "step 9/9"]
    assert "\x1b" not in out.getvalue()


def test_evaluations_and_faults_of_a_worker_are_printed():
    out = io.StringIO()
    display = ProgressDisplay(9, stream=out)
    display.write(
        EvaluationRecord(split="dev", step=5, epoch=1, loss=0.4, metrics={"f1": 0.456}, main_metric="f1", seconds=2.0)
    )
    display.write(FaultRecord(slug="worker-lost", message="gone for 30 s", worker="phone"))
    display.write(FaultRecord(slug="storage", message="the disk is full"))
    assert out.getvalue().splitlines() == ["dev after epoch 1: f1 45.6%  loss 0.4000  (2 s)", "phone: gone for 30 s"]


def test_in_a_terminal_the_block_is_drawn_and_the_cursor_given_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with ProgressDisplay(9, (device(),), stream=out) as display:
        display.write(step(0))
        display.print("a note [with brackets]")
    text = out.getvalue()
    assert "a note [with brackets]" in text
    assert "embedding, blocks 0-2" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor must be visible again"
    display.close()


def test_the_terminal_is_given_back_after_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with pytest.raises(RuntimeError), ProgressDisplay(9, stream=out):
        raise RuntimeError
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_of_the_block_wraps_at_usual_widths(width):
    console_module = pytest.importorskip("rich.console")
    state = RunState(10_000, (device(), DeviceLine("b", "my-old-phone", 300 << 20, "blocks 3-5, output layer")))
    for number in range(4321, 4325):
        state.take(step(number, seconds=3.3))
    out = io.StringIO()
    console_module.Console(file=out, width=width).print(_render(state, width))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "…" not in out.getvalue()


def test_backends_are_shown_beside_their_device():
    state = RunState(10, (device(),))
    for busy in (0.5, 1.0):
        workers = (WorkerStep(worker="a", utilization=0.8, memory_bytes=1 << 20, backends={"torch": 0.9, "cl": busy}),)
        state.take(msgspec.structs.replace(step(0), workers=workers))
    assert "desk 80% (torch 90%, cl 60%)" in state.line
    terminal = Terminal()
    Console(file=terminal, width=140).print(_render(state, 140))
    assert "80% busy torch 90% cl 60%" in terminal.getvalue()
