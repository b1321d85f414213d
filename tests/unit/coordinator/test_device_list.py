"""Devices that have joined: remembered by their identity, forgotten and renamed by their owner's wish."""

import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from coterie.clock import FakeClock
from coterie.cluster.messages import Hello
from coterie.coordinator.acquaintances import Acquaintances
from coterie.coordinator.device_list import DEVICES_FILE, MOST_DEVICES, DeviceList, KnownDevice, find
from coterie.coordinator.member import Member
from coterie.errors import StorageError, UsageError
from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.transport.stream_link import StreamLink

PHONE, LAPTOP = "ab" * 32, "cd" * 32


@pytest.fixture
def devices(tmp_path):
    return DeviceList(tmp_path / "settings")


def seen(identity=PHONE, name="phone", at_s=100.0, **changes):
    return KnownDevice(identity=identity, name=name, first_seen_s=at_s, last_seen_s=at_s, **changes)


def test_nobody_is_known_at_first_and_nothing_is_written_to_say_so(devices):
    assert devices.all() == ()
    assert not devices.path.exists()


def test_a_device_is_known_by_its_identity_whatever_it_is_called(devices):
    devices.saw(seen(memory_bytes=1))
    devices.saw(seen(LAPTOP, "laptop", at_s=200.0))
    devices.saw(seen(name="old phone", at_s=300.0, memory_bytes=2))
    phone, laptop = devices.all()
    assert (phone.name, phone.first_seen_s, phone.last_seen_s, phone.joined) == ("old phone", 100.0, 300.0, 2)
    assert phone.memory_bytes == 2
    assert laptop.joined == 1


def test_what_was_measured_is_kept_until_it_is_measured_anew(devices):
    devices.saw(seen())
    devices.measured(PHONE, flops_per_s=5e9, memory_bytes=7, at_s=50.0)
    devices.measured(LAPTOP, flops_per_s=9e9, memory_bytes=9, at_s=50.0)
    devices.saw(seen(at_s=200.0))
    (phone,) = devices.all()
    assert (phone.flops_per_s, phone.measured_at_s) == (5e9, 50.0)


def test_a_device_is_renamed_and_stays_so_when_it_joins_again(devices):
    devices.saw(seen())
    devices.saw(seen(LAPTOP, "laptop"))
    assert devices.rename("phone", "kitchen").title == "kitchen"
    devices.saw(seen(at_s=400.0))
    assert devices.all()[0].title == "kitchen"
    with pytest.raises(UsageError, match="another device is called 'laptop'"):
        devices.rename("kitchen", "laptop")
    assert devices.rename("kitchen", "").title == "phone"


def test_a_forgotten_device_begins_anew(devices):
    devices.saw(seen())
    assert devices.forget("phone").identity == PHONE
    assert devices.all() == ()
    devices.saw(seen(at_s=500.0))
    assert devices.all()[0].joined == 1


def test_of_two_devices_with_one_name_the_identity_tells_which():
    both = (seen(), seen(LAPTOP))
    with pytest.raises(UsageError, match="2 known devices are called 'phone'") as caught:
        find(both, "phone")
    assert PHONE[:12] in caught.value.hint
    assert find(both, LAPTOP[:12].upper()).identity == LAPTOP
    with pytest.raises(UsageError, match="no known device is called 'cd'") as caught:
        find(both, "cd")
    assert "known are: phone, phone" in caught.value.hint


def test_the_list_does_not_grow_for_ever(devices):
    devices._read = lambda: tuple(seen(f"{number:064x}", at_s=float(number)) for number in range(MOST_DEVICES))
    devices.saw(seen(at_s=1e6))
    found = DeviceList(devices.path.parent).all()
    assert len(found) == MOST_DEVICES
    assert found[0].identity == PHONE
    assert f"{0:064x}" not in {device.identity for device in found}


def test_many_may_write_at_once_and_nothing_is_lost(devices):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: devices.saw(seen(f"{number:064x}")), range(8)))
    assert len(devices.all()) == 8


def test_the_file_is_its_owners_and_a_damaged_one_is_named(devices):
    devices.saw(seen())
    if sys.platform != "win32":
        assert stat.S_IMODE(devices.path.stat().st_mode) == 0o600
    devices.path.write_text("{")
    with pytest.raises(StorageError, match=DEVICES_FILE) as caught:
        devices.all()
    assert "delete it" in caught.value.hint


def member(name, identity=PHONE):
    hello = Hello(
        wire_version=1,
        package_version="9",
        token="",
        name=name,
        device_type="cpu",
        threads=4,
        memory_bytes=77,
        host_id="",
        hosts=(),
        port=0,
        fingerprint="",
        identity=identity,
    )
    return Member(WorkerId(name), hello, StreamLink())


def test_devices_that_join_are_written_down_and_workers_that_the_run_starts_are_not(devices):
    clock = FakeClock(1000.0)
    met = Acquaintances(devices, lambda hello: hello.name == "here", clock)
    met.met([member("phone"), member("here", "1" * 64), member("nameless", "")])
    profile = DeviceProfile(
        worker=WorkerId("phone"), name="phone", memory_bytes=88, base_bytes=1, flops_per_s=3e9, measured_at_s=900.0
    )
    met.measured(member("phone"), profile)
    (known,) = devices.all()
    assert (known.name, known.threads, known.last_seen_s, known.package_version) == ("phone", 4, 1000.0, "9")
    assert (known.memory_bytes, known.flops_per_s, known.measured_at_s) == (88, 3e9, 900.0)


def test_a_device_was_seen_last_when_it_was_heard_of_last_and_not_when_it_joined(devices):
    clock = FakeClock(1000.0)
    met = Acquaintances(devices, lambda hello: hello.name == "here", clock)
    met.met([member("phone"), member("board", "2" * 64)])
    clock.advance(500.0)
    met.heard([member("phone"), member("here", "1" * 64), member("stranger", "3" * 64)])
    seen = {device.name: (device.first_seen_s, device.last_seen_s, device.joined) for device in devices.all()}
    assert seen == {"phone": (1000.0, 1500.0, 1), "board": (1000.0, 1000.0, 1)}


def test_a_list_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    acquaintances = Acquaintances(DeviceList(tmp_path / "file"), lambda _hello: False, FakeClock())
    acquaintances.met([member("phone")])
    acquaintances.heard([member("phone")])
    acquaintances.measured(
        member("phone"), DeviceProfile(worker=WorkerId("p"), name="p", memory_bytes=1, base_bytes=1, flops_per_s=1)
    )
    assert caplog.text.count("cannot be read or written") == 2
