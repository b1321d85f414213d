"""Whose CPU seconds count where several backends work at once."""

import pytest

from coterie.backends.backend import BackendInfo
from coterie.heads.lead import JobTime, Lead

INFOS = [
    BackendInfo(name="torch", device="processor", kind="cpu", driver="torch", threads=1),
    BackendInfo(name="opencl", device="processor", kind="cpu", driver="PoCL", threads=1),
    BackendInfo(name="mnn", device="processor", kind="cpu", driver="MNN", threads=1),
    BackendInfo(name="gpu", device="a card", kind="gpu", driver="OpenCL"),
]


@pytest.mark.parametrize(
    ("times", "process_s", "seconds"),
    [
        ({"torch": (9.0, 3.0)}, 3.1, 0.0),
        ({"opencl": (9.0, 0.1)}, 4.1, 4.1),
        ({"torch": (9.0, 3.0), "opencl": (9.0, 0.1)}, 7.1, 1.1),
        ({"torch": (9.0, 3.0), "mnn": (2.0, 0.1)}, 3.1, 0.0),
        ({"torch": (9.0, 3.0), "mnn": (5.0, 0.1)}, 3.1, 2.0),
        ({"torch": (9.0, 3.0), "gpu": (4.0, 0.1)}, 3.1, 1.0),
        ({}, 1.0, 0.0),
    ],
    ids=["torch alone", "alone", "a driver with threads", "a short process", "a long process", "a card", "nobody"],
)
def test_what_the_slowest_backend_takes_beyond_the_callers_own_share_counts(times, process_s, seconds):
    now = iter([10.0, 10.0 + process_s])
    lead = Lead(INFOS, frozenset({"mnn"}), lambda: next(now))
    lead.begin()
    lead.end({name: JobTime(wall_s=wall_s, cpu_s=cpu_s) for name, (wall_s, cpu_s) in times.items()})
    assert lead.cpu_s == pytest.approx(seconds)


def test_calls_add_up():
    now = iter([0.0, 2.0, 5.0, 8.0])
    lead = Lead(INFOS, frozenset(), lambda: next(now))
    for _ in range(2):
        lead.begin()
        lead.end({"gpu": JobTime(wall_s=2.0, cpu_s=2.0)})
    assert lead.cpu_s == pytest.approx(4.0)
