"""A device looked after in a run: real decisions and sources, a stage that notes what it is told."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coterie.clock import FakeClock
from coterie.cluster.fault_messages import Leaving, MemoryLow
from coterie.cluster.messages import Assign, Goodbye
from coterie.ids import RunId, WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.absent import Absent
from coterie.measure.process_memory import peak_rss_bytes
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.units import MIB
from coterie.worker.conditions import GRACE_S, OwnerConditions
from coterie.worker.keep_awake import KeepAwake
from coterie.worker.memory_watch import CALM_S
from coterie.worker.own_device import OwnDevice
from coterie.worker.settings import WorkerSettings
from coterie.worker.vitals import OwnVitals
from coterie.worker.watch import PATIENCE_S, DeviceWatch


class Stage:
    """Notes how it is adapted."""

    def __init__(self, memory_bytes: int) -> None:
        self.assign = assign(memory_bytes)
        self.recomputes = False
        self.adapted: list[tuple[bool, int]] = []
        self.speeds: list[float] = []

    def adapt(self, *, recompute: bool, in_flight: int) -> None:
        self.adapted.append((recompute, in_flight))

    def set_speed(self, speed: float) -> None:
        self.speeds.append(speed)


def assign(memory_bytes: int) -> Assign:
    memory = dict.fromkeys(
        ("weights", "gradients", "optimizer", "weight_versions", "activations", "transient", "buffers"), 0
    )
    stage = StageAssignment(
        stage=0,
        worker=WorkerId("board"),
        device_name="board",
        first_unit=0,
        stop_unit=3,
        in_flight=2,
        recompute=False,
        allocator="default",
        send_codec="fp32",
        memory=MemoryEstimate(base=memory_bytes, **memory),
        memory_limit=memory_bytes,
        forward_s=0.1,
        backward_s=0.1,
        update_s=0.1,
        send_s=0.0,
    )
    plan = Plan(
        version=1,
        schedule="flush",
        objective="time",
        batch_rows=4,
        micro_batches=2,
        units=3,
        stages=(stage,),
        left_out=(),
        predicted_step_s=1.0,
        one_device_step_s=1.0,
        one_device_peak=1,
    )
    return Assign(
        run=RunId("r"),
        plan=plan,
        stage=0,
        spec=ModelSpec(config_json="{}", auto_class="AutoModel"),
        optimizer=OptimizerSpec(),
        task="token-classification",
        gradient_below=False,
        tied_peer=WorkerId(""),
    )


class Looked:
    """A watch over a made-up device whose clock jumps."""

    def __init__(self, **settings: object) -> None:
        self.clock = FakeClock()
        self.said: list[str] = []
        self.settings = WorkerSettings(name="board", **{"battery": "none", **settings})
        self.device = OwnDevice(self.settings, self.said.append)
        awake = KeepAwake(Absent(reason="a test"))
        self.watch = DeviceWatch(self.device, OwnVitals(self.settings, self.clock), awake, self.clock)
        self.watch.joined()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Looked]]:
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    made: list[Looked] = []

    def make(**settings: object) -> Looked:
        made.append(Looked(**settings))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()
        one.device.close()


def test_a_device_with_everything_it_needs_says_nothing(looked: Callable[..., Looked]) -> None:
    here = looked()
    stage = Stage(peak_rss_bytes() + MIB)
    assert here.watch.look(stage, computes=True) == ()
    assert (stage.adapted, stage.speeds, here.said) == ([], [1.0], [])
    assert here.watch.vitals is not None


def test_memory_that_is_taken_is_told_and_memory_that_comes_back_too(
    looked: Callable[..., Looked], tmp_path: Path
) -> None:
    file = tmp_path / "memory"
    here = looked(memory_file=file)
    stage = Stage(peak_rss_bytes() + MIB)
    assert here.watch.look(stage, computes=True) == ()
    file.write_text("100MiB")
    (told,) = here.watch.look(stage, computes=True)
    assert isinstance(told, MemoryLow)
    assert (told.limit_bytes, str(file) in told.reason) == (100 * MIB, True)
    assert here.watch.look(stage, computes=True) == ()
    file.unlink()
    smaller = Stage(MIB)  # another plan has come meanwhile
    assert here.watch.look(smaller, computes=True) == ()
    here.clock.advance(CALM_S)
    (told,) = here.watch.look(smaller, computes=True)
    assert isinstance(told, MemoryLow)
    assert told.limit_bytes > 200 * MIB


def test_a_device_that_runs_down_asks_to_leave_once_and_goes_at_last(looked: Callable[..., Looked]) -> None:
    here = looked(battery="simulated:21%,-1%/min", terms=OwnerConditions(min_battery=0.2))
    stage = Stage(peak_rss_bytes() + MIB)
    assert here.watch.look(stage, computes=True) == ()
    here.clock.advance(60.0)
    assert here.watch.look(stage, computes=True) == ()
    here.clock.advance(GRACE_S)
    (asked,) = here.watch.look(stage, computes=True)
    assert isinstance(asked, Leaving)
    assert "battery is down to 20%" in asked.reason
    here.clock.advance(PATIENCE_S - 1.0)
    assert here.watch.look(stage, computes=True) == ()
    here.clock.advance(1.0)
    (gone,) = here.watch.look(stage, computes=True)
    assert isinstance(gone, Goodbye)


def test_a_device_on_which_nobody_relies_just_goes(looked: Callable[..., Looked]) -> None:
    here = looked(battery="simulated:90%", terms=OwnerConditions(only_on_power=True))
    here.watch.look(None, computes=False)
    here.clock.advance(GRACE_S)
    (gone,) = here.watch.look(None, computes=False)
    assert isinstance(gone, Goodbye)


def test_before_it_joins_the_terms_are_looked_at_too(looked: Callable[..., Looked], tmp_path: Path) -> None:
    file = tmp_path / "battery"
    file.write_text("90%")
    here = looked(battery=f"simulated:file:{file}", terms=OwnerConditions(only_on_power=True))
    assert "not plugged in" in here.watch.forbids()
    file.write_text("90%,plugged")
    assert here.watch.forbids() == ""


def test_the_owners_share_and_the_speed_multiply(looked: Callable[..., Looked]) -> None:
    here = looked(speed=0.5, terms=OwnerConditions(share=0.5))
    stage = Stage(peak_rss_bytes() + MIB)
    here.watch.look(stage, computes=True)
    assert stage.speeds == [0.25]
    assert here.watch.speed == 0.25
