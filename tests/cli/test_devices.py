"""`coterie devices`: list, forget, rename."""

import time

import pytest

from coterie.coordinator.device_list import DeviceList, KnownDevice


@pytest.fixture
def known(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CONFIG", str(tmp_path))
    now_s = time.time()
    devices = DeviceList()
    for name, digit, ago_s in (("laptop", "a", 90.0), ("phone", "b", 7200.0)):
        devices.saw(
            KnownDevice(
                identity=digit * 64,
                name=name,
                first_seen_s=1.0,
                last_seen_s=now_s - ago_s,
                threads=4,
                memory_bytes=3 << 30,
                flops_per_s=2.5e10 if name == "laptop" else 0.0,
            )
        )
    return devices


@pytest.mark.usefixtures("known")
def test_devices_are_listed_the_latest_first(told):
    code, out, _ = told("devices")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["device", "laptop", "phone"]
    _, laptop, phone = out.splitlines()
    assert "aaaaaaaaaaaa" in laptop
    assert "1 time" in laptop
    assert "3.00 GiB" in laptop
    assert "cpu, 4 threads" in laptop
    assert laptop.endswith("25 GFLOP/s")
    assert "2 h 00 min ago" in phone
    assert phone.endswith("not measured")


@pytest.mark.usefixtures("known")
def test_a_device_is_renamed_and_forgotten(told, answer):
    assert told("devices", "rename", "phone", "kitchen")[:2] == (
        0,
        "phone (bbbbbbbbbbbb…) is called kitchen from now on\n",
    )
    assert "kitchen (phone)" in told("devices")[1]
    code, out, _ = told("devices", "forget", "kitchen")
    assert code == 0
    assert "is forgotten" in out
    code, found = answer("devices")
    assert [device["name"] for device in found["devices"]] == ["laptop"]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("forget",), "`devices forget` takes 1 name, and 0 came"),
        (("rename", "phone"), "`devices rename` takes 2 names, and 1 came"),
        (("list", "phone"), "`devices list` takes 0 names, and 1 came"),
        (("forget", "tablet"), "no known device is called 'tablet'"),
        (("remove", "phone"), "invalid choice: 'remove'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_to_write_it(told, words, message):
    code, _, err = told("devices", *words)
    assert code == 2
    assert message in err


def test_before_anybody_has_joined_the_list_says_how_one_does(told, tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CONFIG", str(tmp_path))
    assert "coterie train recipe.toml --workers 2" in told("devices")[1]
