"""The summary: every figure of the record is shown."""

import io

import msgspec
import pytest

from coterie.metrics.fault_records import EnergyRecord
from coterie.metrics.summary import energy_line, print_summary, speed_note, summary_line


def test_all_tables_are_printed_with_predicted_beside_measured(summary):
    out = io.StringIO()
    print_summary(summary, stream=out)
    text = out.getvalue()
    desk = next(line for line in text.splitlines() if "desk" in line)
    for part in ("embedding, block 0", "520 MiB", "494 MiB", "-5%", "600 MiB", "-38%", "84%"):
        assert part in desk
    for part in (
        "everything, whole batch",
        "800 MiB",
        "450 ms",
        "500 ms",
        "900 ms",
        "200",
        "60.0 MiB",
        "2.00 MiB",
        "72.3%",
    ):
        assert part in text
    assert "rows cut to the context: 3" in text
    assert "\x1b" not in text


def test_a_summary_without_links_and_quality_has_no_such_tables(summary):
    out = io.StringIO()
    print_summary(msgspec.structs.replace(summary, links=(), quality=()), stream=out)
    assert "Links" not in out.getvalue()
    assert "Quality" not in out.getvalue()


def test_the_run_fits_into_one_line(summary):
    assert summary_line(summary) == (
        "60 steps on 2 devices in 30 s: loss 2.0000 → –, dev f1 72.3%, fullest device 494 MiB "
        "(one device alone 800 MiB), model in runs/latest"
    )


def test_a_run_without_steps_divides_by_nothing(summary):
    empty = msgspec.structs.replace(summary, steps=0, tokens=0, seconds=0.0, one_device_peak_bytes=0)
    print_summary(empty, stream=io.StringIO())


def test_the_line_of_a_resumed_run_says_which_steps_it_did(summary):
    line = summary_line(msgspec.structs.replace(summary, first_step=9, steps=11))
    assert line.startswith("11 steps (10-20, resumed after step 9) on 2 devices")


@pytest.mark.parametrize(
    ("measured_s", "steps", "told"), [(1.3, 5, "2.6"), (0.1, 5, "0.2"), (0.9, 5, ""), (0.3, 5, ""), (1.3, 1, "")]
)
def test_a_prediction_that_is_far_off_is_told_with_what_to_do(summary, measured_s, steps, told):
    changed = msgspec.structs.replace(summary, predicted_step_s=0.5, measured_step_s=measured_s, steps=steps)
    note = speed_note(changed)
    assert bool(note) is bool(told)
    out = io.StringIO()
    print_summary(changed, stream=out)
    assert ("--measure-again" in out.getvalue()) is bool(told)
    assert f"{told} times as long as predicted" in note or not told


def test_the_memory_table_says_that_one_device_is_a_prediction_for_the_whole_batch(summary):
    out = io.StringIO()
    print_summary(summary, stream=out)
    for part in ("against one", "device, whole", "batch (predicted)"):
        assert part in out.getvalue()


def test_backends_are_told_with_how_busy_they_were_and_what_went_wrong(summary):
    first, second = summary.devices
    first = msgspec.structs.replace(
        first, backends={"torch": 0.71, "opencl": 0.64}, backends_left_out={"mnn": "it failed: its process has ended"}
    )
    out = io.StringIO()
    print_summary(msgspec.structs.replace(summary, devices=(first, second)), stream=out)
    text = out.getvalue()
    assert "desk: backends busy: torch 71%, opencl 64%" in text
    assert "desk: the backend mnn was left out during the run: it failed: its process has ended" in text
    assert "phone: backend" not in text


def test_energy_is_shown_with_who_measured_it(summary):
    assert energy_line(summary) == ""
    energy = (
        EnergyRecord(worker="a", device_name="phone", joules=1500.0, source="battery+model", battery=0.41),
        EnergyRecord(worker="b", device_name="desk", joules=85.0, source="rapl"),
        EnergyRecord(worker="c", device_name="new", joules=0.0, source=""),
    )
    changed = msgspec.structs.replace(summary, energy=energy)
    assert energy_line(changed) == (
        "energy: phone 1.5 kJ (measured: whole device and assumed: stated watts times busy time, battery at 41%); "
        "desk 85 J (measured: processor)"
    )
    out = io.StringIO()
    print_summary(changed, stream=out)
    assert "phone 1.5 kJ" in out.getvalue()
    assert "1,500 J" not in out.getvalue(), "told once"
