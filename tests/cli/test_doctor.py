"""`coterie doctor` looks at the real machine; what is missing is made missing."""

import argparse
import json
import re
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from coterie.backends import catalog
from coterie.cli import doctor
from coterie.cli.main import main
from coterie.measure import power


@pytest.fixture(autouse=True)
def quick_backends(monkeypatch):
    """Drivers take seconds to start; most of these tests are about other things."""
    monkeypatch.setattr(catalog, "MODULES", {"numpy": catalog.MODULES["numpy"]})


@pytest.fixture
def findings(capsys):
    """Runs the doctor and gives its findings by topic, with the exit code."""

    def run() -> tuple[int, dict[str, dict[str, str]]]:
        code = main(["doctor", "--json"])
        shown = json.loads(capsys.readouterr().out)
        return code, {finding["topic"]: finding for finding in shown["findings"]}

    return run


def test_a_machine_that_runs_these_tests_is_healthy(findings):
    code, found = findings()
    assert code == 0
    assert found["packages"]["state"] == "ok"
    assert f"torch {metadata.version('torch')}" in found["packages"]["found"]
    assert "cpu" in found["compute devices"]["found"]
    assert found["memory"]["found"].startswith("a worker may use ")


def test_the_text_has_one_line_per_finding_and_a_verdict(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("coterie ")
    assert lines[-1] == "This machine can run coterie."
    assert any(line.split()[:2] == ["ok", "Python"] for line in lines)


def test_a_missing_package_is_a_problem_with_the_command_that_installs_it(findings, monkeypatch):
    monkeypatch.setattr(doctor, "_REQUIRED", ("msgspec", "no-such-package"))
    code, found = findings()
    assert code == 1
    assert found["packages"] == {
        "topic": "packages",
        "state": "problem",
        "found": "missing: no-such-package",
        "advice": "pip install no-such-package",
    }


def test_a_missing_optional_package_is_a_note_only(findings, monkeypatch):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "does wonders"})
    code, found = findings()
    assert code == 0
    assert found["no-such-package (optional)"]["state"] == "note"
    assert "does wonders" in found["no-such-package (optional)"]["found"]


def test_a_cache_folder_that_cannot_be_written_is_a_problem(findings, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    code, found = findings()
    assert code == 1
    assert found["cache folder"]["state"] == "problem"
    assert "COTERIE_CACHE" in found["cache folder"]["advice"]


def test_backends_are_listed_with_their_error_and_absent_ones_with_the_reason(findings, monkeypatch):
    modules = {"numpy": catalog.MODULES["numpy"], "far": "coterie.backends.no_such_module"}
    monkeypatch.setattr(catalog, "MODULES", modules)
    code, found = findings()
    assert code == 0
    assert found["backend numpy"]["state"] == "ok"
    assert re.search(
        r"^processor \(cpu\), NumPy [\d.]+, \d+ threads?, self-test error \d\.\de-0[67]$",
        found["backend numpy"]["found"],
    )
    assert found["backend far"]["state"] == "note"
    assert "absent: ModuleNotFoundError" in found["backend far"]["found"]


def test_little_memory_is_noted(findings, monkeypatch):
    monkeypatch.setattr(doctor, "_SMALL_BUDGET_BYTES", 1 << 60)
    _, found = findings()
    assert found["memory"]["state"] == "note"


def test_a_limit_that_is_said_to_be_enforced_is_enforced(findings):
    _, found = findings()
    assert found["memory limits"]["state"] == ("ok" if doctor._limit_is_enforced() else "note")


def test_an_unhealthy_machine_is_told_where_to_look(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_REQUIRED", ("no-such-package",))
    assert doctor.run(argparse.Namespace(json=False)) == 1
    out = capsys.readouterr().out
    assert "FAIL  packages" in out
    assert "try: pip install no-such-package" in out
    assert out.endswith("Something is missing: see the lines marked FAIL.\n")


def test_every_sense_of_the_device_is_named_or_the_reason_why_it_is_absent(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    monkeypatch.setattr(power, "POWERCAP", tmp_path)
    code, found = findings()
    assert code == 0
    assert "termux-battery-status" in found["battery"]["found"]
    assert "not readable" in found["temperature"]["found"]
    for topic in ("battery", "temperature"):
        assert found[topic]["state"] == "note"
    assert "more now" in found["memory pressure"]["found"]
    assert {"energy", "owner's work", "keeping awake"} <= set(found)


def test_a_laptops_battery_and_temperature_are_shown(findings, monkeypatch):
    laptop = SimpleNamespace(percent=64, power_plugged=True)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: laptop, raising=False)
    chip = {"coretemp": [SimpleNamespace(current=51.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chip, raising=False)
    _, found = findings()
    assert found["battery"]["found"] == "the system's: 64%, plugged in: yes"
    assert found["temperature"]["found"] == "the hottest sensor: 51 °C"
