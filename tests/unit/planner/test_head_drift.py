"""Shares are dealt out anew when backends drift apart, and when one is gone; else they stay."""

import msgspec
import pytest

from coterie.planner.head_allocation import allocate
from coterie.planner.head_drift import WINDOW_JOBS, Dealt, Work, dealt_anew
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, ShareTiming, Together

GROUPS, NEURONS = 12, 128


def timings(total, seconds):
    counts = range(1, total + 1) if total == GROUPS else range(16, total + 1, 16)
    return tuple(
        ShareTiming(count=count, seconds=seconds * count / total, fused_s=seconds * count / total) for count in counts
    )


@pytest.fixture
def dealt():
    """Two equal backends and one of half their speed."""
    backends = tuple(
        BackendProfile(name=name, device="d", attention=timings(GROUPS, s), neurons=timings(NEURONS, s), threads=1)
        for name, s in (("torch", 1.0), ("opencl", 1.0), ("numpy", 2.0))
    )
    profiles = DeviceBackends(key="k", groups=GROUPS, neurons=NEURONS, rows=8, tokens=128, backends=backends, cores=2)
    return Dealt(profiles=profiles, allocation=allocate(profiles))


def work(dealt, jobs=WINDOW_JOBS, **factors):
    """What backends did if each took so many times its predicted seconds."""
    parts = (dealt.allocation.attention, dealt.allocation.neurons)
    found = {}
    for name, factor in factors.items():
        own = [share.predicted_s for part in parts for share in part.shares if share.backend == name]
        found[name] = Work(jobs=jobs, busy_s=factor * sum(own) * jobs / (2 * len(own)))
    return found


def counts(allocation):
    return {share.backend: share.count for share in allocation.attention.shares}


def test_backends_that_keep_their_times_keep_their_shares(dealt):
    assert counts(dealt.allocation) == {"torch": 6, "opencl": 6}
    assert dealt_anew(dealt, work(dealt, torch=1.1, opencl=0.9)) is None


def test_what_slows_all_alike_changes_nothing(dealt):
    assert dealt_anew(dealt, work(dealt, torch=3.0, opencl=3.2)) is None


def test_one_that_has_become_slower_gets_less_and_then_keeps_that(dealt):
    anew = dealt_anew(dealt, work(dealt, torch=1.0, opencl=2.0))
    assert counts(anew.allocation) == {"torch": 8, "opencl": 4}
    assert sum(share.count for share in anew.allocation.neurons.shares) == NEURONS
    assert dealt_anew(anew, work(anew, torch=1.0, opencl=1.0)) is None


def test_few_jobs_say_nothing(dealt):
    assert dealt_anew(dealt, work(dealt, jobs=WINDOW_JOBS - 1, torch=1.0, opencl=9.0)) is None


def test_the_share_of_one_that_is_gone_is_dealt_out_at_once(dealt):
    anew = dealt_anew(dealt, work(dealt, jobs=3, torch=1.0, opencl=1.0), frozenset({"opencl"}))
    assert counts(anew.allocation) == {"torch": 8, "numpy": 4}
    assert dealt_anew(anew, {}, frozenset({"opencl"})) is None


def test_with_one_gone_the_others_keep_what_they_took_beside_it(dealt):
    tried = Together(part="attention", backends=("torch", "opencl", "numpy"), slowed={"torch": 3.0, "opencl": 1.0})
    profiles = msgspec.structs.replace(dealt.profiles, cores=3, together=(tried,))
    before = Dealt(profiles=profiles, allocation=allocate(profiles))
    anew = dealt_anew(before, {}, frozenset({"numpy"}))
    assert counts(anew.allocation) == {"torch": 3, "opencl": 9}


def test_a_clock_that_stood_still_is_no_drift(dealt):
    assert dealt_anew(dealt, work(dealt, torch=0.0, opencl=0.0)) is None
    still = msgspec.structs.replace(dealt.allocation, attention=None, neurons=None)
    for part in ("attention", "neurons"):
        of = getattr(dealt.allocation, part)
        shares = tuple(msgspec.structs.replace(share, predicted_s=0.0) for share in of.shares)
        still = msgspec.structs.replace(still, **{part: msgspec.structs.replace(of, shares=shares)})
    assert dealt_anew(Dealt(profiles=dealt.profiles, allocation=still), work(dealt, torch=1.0, opencl=2.0)) is None


def test_with_all_of_them_gone_there_is_nothing_to_deal(dealt):
    assert dealt_anew(dealt, {}, frozenset({"torch", "opencl", "numpy"})) is None
