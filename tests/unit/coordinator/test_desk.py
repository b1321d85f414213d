"""What a run's desk says of the run, and what becomes of wishes."""

import stat
import sys

import msgspec
import pytest

from coterie.clock import FakeClock
from coterie.coordinator.control import front_page
from coterie.coordinator.control_file import CONTROL_FILE, read_control, remove_control
from coterie.coordinator.desk import RunDesk, reachable
from coterie.coordinator.door import Door
from coterie.coordinator.members import Members
from coterie.coordinator.pausing import Pause
from coterie.coordinator.stopping import StopRequests
from coterie.errors import ControlRefusedError, StorageError
from coterie.ids import RunId
from coterie.metrics.records import StartRecord

START = StartRecord(run="r", package_version="0", model="m", total_steps=10, steps_per_epoch=5)


@pytest.fixture
def desk(tmp_path):
    desk = RunDesk(RunId("r"), tmp_path)
    clock = FakeClock()
    members = Members(RunId("r"), Door(clock=clock), clock, heartbeat_s=1, silence_limit_s=10)
    stop = StopRequests()
    stop.on_first = lambda: True
    desk.attach(front_page(), members, stop, Pause())
    return desk


class Loop:
    """Something that rests when it is told to."""

    is_paused = False

    def __init__(self) -> None:
        self.on_idle = lambda _idle: None


def test_the_control_file_is_its_owners_alone_and_goes_with_the_run(desk, tmp_path):
    desk.open("127.0.0.1", 4711, "f" * 64)
    control = read_control(tmp_path)
    assert (control.hosts, control.others, control.port) == (("127.0.0.1",), (), 4711)
    assert len(control.token) >= 43
    assert control.token not in repr(control)
    assert not control.is_gone
    if sys.platform != "win32":
        assert stat.S_IMODE((tmp_path / CONTROL_FILE).stat().st_mode) == 0o600
    desk.close()
    assert list(tmp_path.iterdir()) == []


def test_a_control_file_of_a_process_that_is_gone_is_told_by_its_beginning(desk, tmp_path):
    desk.open("127.0.0.1", 4711, "f" * 64)
    control = read_control(tmp_path)
    assert msgspec.structs.replace(control, began_s=control.began_s - 60).is_gone
    assert not msgspec.structs.replace(control, machine="another", began_s=0).is_gone, "nobody can tell from here"


def test_a_coordinator_takes_away_its_own_control_file_only(desk, tmp_path):
    desk.open("127.0.0.1", 4711, "f" * 64)
    remove_control(tmp_path, "of the coordinator before")
    assert read_control(tmp_path) is not None


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path):
    desk = RunDesk(RunId("r"), tmp_path / "gone")
    with pytest.raises(StorageError, match="gone"):
        desk.open("127.0.0.1", 4711, "f" * 64)


def test_from_other_machines_a_run_is_reached_only_where_it_listens_for_them():
    assert reachable("127.0.0.1") == (("127.0.0.1",), ())
    assert reachable("192.168.1.5") == (("192.168.1.5",), ("192.168.1.5",))
    here, others = reachable("0.0.0.0")  # noqa: S104 - nothing is bound
    assert here == ("127.0.0.1",)
    assert "127.0.0.1" not in others


def test_a_run_that_has_not_begun_cannot_rest_and_says_so(desk):
    assert desk.status().phase == "preparing"
    with pytest.raises(ControlRefusedError, match="it has not begun to train"):
        desk.pause()


def test_a_pause_is_asked_for_takes_effect_and_ends(desk):
    loop, heard = Loop(), []
    desk.note(START)
    desk._pausing.steer(loop, lambda: heard.append(loop.is_paused), on_rested=lambda: heard.append("rested"))
    phases = [desk.status().phase]
    loop.on_idle(False)
    desk.pause()
    desk.pause()
    phases.append(desk.status().phase)
    loop.on_idle(True)
    phases.append(desk.status().phase)
    desk.go_on()
    loop.on_idle(False)
    loop.on_idle(False)
    phases.append(desk.status().phase)
    assert phases == ["training", "pausing", "paused", "training"]
    assert heard == [True, False, "rested"]


def test_the_terminal_of_a_run_says_when_it_rests_and_when_it_goes_on():
    told = []
    pause, loop = Pause(told.append), Loop()
    pause.steer(loop, lambda: None, on_rested=lambda: None)
    for is_idle in (False, True, True, False, False):
        loop.on_idle(is_idle)
    assert told == [True, False]


def test_rests_are_counted_without_the_time_in_which_something_is_repaired():
    clock = FakeClock()
    pause, first, second = Pause(clock=clock), Loop(), Loop()
    pause.steer(first, lambda: None, on_rested=lambda: None)
    first.on_idle(True)
    clock.advance(10.0)
    assert pause.rested_s == 10.0
    pause.is_disturbed()  # a worker is lost meanwhile
    clock.advance(3.0)
    pause.steer(second, lambda: None, on_rested=lambda: None)
    second.on_idle(True)
    clock.advance(20.0)
    second.on_idle(True)
    second.on_idle(False)
    clock.advance(5.0)
    assert pause.rested_s == 30.0
    assert not pause.is_resting


def test_a_loop_that_takes_the_place_of_another_in_a_pause_rests_too():
    pause, first, second = Pause(), Loop(), Loop()
    pause.steer(first, lambda: None, on_rested=lambda: None)
    pause.ask()
    pause.steer(second, lambda: None, on_rested=lambda: None)
    assert second.is_paused
    pause.end()
    assert not second.is_paused


def test_a_run_that_can_rest_no_more_goes_on():
    pause = Pause()
    pause.steer(Loop(), lambda: None, on_rested=lambda: None)
    pause.ask()
    pause.refuse("it saves its model")
    assert not pause.is_asked
    with pytest.raises(ControlRefusedError, match="cannot be paused now: it saves its model"):
        pause.ask()


def test_to_ask_twice_for_a_clean_stop_stays_a_clean_stop(desk):
    desk._pausing.steer(Loop(), lambda: None, on_rested=lambda: None)
    desk.pause()
    desk.request_stop(now=False)
    assert not desk._pausing.is_asked, "a run that rests does not come to its end"
    desk.request_stop(now=False)
    assert desk.status().phase == "stopping"
    assert desk._stop._count == 1
    desk.request_stop(now=True)
    assert desk._stop._count == 2


def test_to_stop_at_once_takes_one_wish(desk):
    desk.request_stop(now=True)
    assert desk._stop._count == 2


def test_before_the_first_step_the_last_words_say_what_happens(desk, capsys):
    desk.hear("\nmeasuring laptop\nwith care")
    desk.hear("")
    assert desk.status().news == "measuring laptop"
    assert capsys.readouterr().out == ""
