"""The summary: every figure of the record is shown."""

import io

import msgspec

from coterie.metrics.summary import print_summary, summary_line


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
