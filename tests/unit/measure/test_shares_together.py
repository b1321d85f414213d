"""Backends side by side: what they take then decides who computes how much."""

import threading
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import AttentionShape, Gradients, Outputs
from coterie.errors import BackendError
from coterie.heads.pool import BackendPool
from coterie.measure.share_work import Conditions
from coterie.measure.shares_together import TogetherBench
from coterie.planner.head_allocation import allocate
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, ShareTiming

HEADS = AttentionShape(hidden=24, output=24, head_dim=2, heads=12, groups=12, scale=0.7)


class ThreadTicks:
    """A clock that a thread's own backend moves, for that thread."""

    def __init__(self) -> None:
        self._now: dict[int, float] = defaultdict(float)

    def __call__(self) -> float:
        return self._now[threading.get_ident()]

    def move(self, seconds: float) -> None:
        self._now[threading.get_ident()] += seconds


class Share:
    def __init__(self, count: int) -> None:
        self.count = count

    def release(self) -> None:
        pass


class Steady:
    """A backend that computes nothing and takes its time for each group."""

    def __init__(self, name: str, clock: ThreadTicks, each_s: float, *, fails: Exception | None = None) -> None:
        self.info = BackendInfo(name=name, device="made up", kind="cpu", driver="test 1", threads=1)
        self._clock, self._each_s, self._fails = clock, each_s, fails
        self.forwards = 0

    def load(self, shape, weights):
        assert weights
        return Share(shape.groups)

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        assert (inner, keep) == (False, True)
        self.forwards += 1
        if self._fails is not None:
            raise self._fails
        self._clock.move(self._each_s * loaded.count)
        return Outputs(y=np.zeros_like(inputs.x)), loaded

    def backward(self, saved, gradient, need, *, inner_gradient=None):
        assert isinstance(saved, Share)
        assert need.weights
        assert (gradient.shape[-1], inner_gradient) == (24, None)
        return Gradients()

    def trim(self) -> None:
        pass

    def close(self) -> None:
        pass


def profile_of(**each_s: float) -> DeviceBackends:
    """What was measured of each alone, in seconds a group."""
    return DeviceBackends(
        key="",
        groups=12,
        neurons=0,
        rows=2,
        tokens=3,
        cores=2,
        backends=tuple(
            BackendProfile(
                name=name,
                device="made up",
                threads=1,
                attention=tuple(ShareTiming(count=n, seconds=s * n, fused_s=s * n) for n in range(1, 13)),
            )
            for name, s in each_s.items()
        ),
    )


def bench_of(pool: BackendPool, clock: ThreadTicks, budget_s: float = 1e6) -> TogetherBench:
    run = Conditions(rows=2, tokens=3)
    return TogetherBench(pool, run, rounds=3, budget_s=budget_s, clock=clock, say=lambda _what: None)


def tried(profile: DeviceBackends, **each_s: float) -> DeviceBackends:
    """The profile with what its backends take side by side, in seconds a group."""
    clock = ThreadTicks()
    with BackendPool([Steady(name, clock, s) for name, s in each_s.items()]) as pool:
        found = bench_of(pool, clock).time_part(HEADS, profile)
    return msgspec.structs.replace(profile, together=found)


def dealt(profile: DeviceBackends) -> dict[str, int]:
    attention = allocate(profile).attention
    assert attention is not None
    return {share.backend: share.count for share in attention.shares}


def test_who_is_slower_beside_others_gets_less_and_the_prediction_says_so():
    alone = profile_of(a=1.0, b=1.0)
    assert dealt(alone) == {"a": 6, "b": 6}
    together = tried(alone, a=2.0, b=1.0)
    assert [one.slowed for one in together.together] == [{"a": pytest.approx(2.0), "b": pytest.approx(1.0)}]
    assert dealt(together) == {"a": 4, "b": 8}
    attention = allocate(together).attention
    assert attention is not None
    assert attention.predicted_s == pytest.approx(8.0)
    assert attention.best_single_s == 12.0, "alone it is as fast as it was measured alone"


def test_nothing_is_shared_where_both_slow_each_other_down_to_no_gain():
    together = tried(profile_of(a=1.0, b=1.0), a=2.0, b=2.0)
    assert dealt(together) == {"a": 12}
    attention = allocate(together).attention
    assert attention is not None
    assert (attention.predicted_s, attention.best_single) == (12.0, "a")


def test_the_group_that_is_fastest_side_by_side_is_chosen_although_another_was_fastest_alone():
    alone = profile_of(a=1.0, b=1.0, c=1.2)
    assert set(dealt(alone)) == {"a", "b"}
    together = tried(alone, a=1.0, b=3.0, c=1.2)
    assert [one.backends for one in together.together] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert dealt(together) == {"a": 7, "c": 5}


@pytest.mark.parametrize("fault", [BackendError("it does not work beside others"), MemoryError("no more")])
def test_a_backend_that_fails_beside_others_is_an_error_and_nobody_waits_for_it(fault):
    clock = ThreadTicks()
    backends = [Steady("a", clock, 1.0), Steady("b", clock, 1.0, fails=fault)]
    with BackendPool(backends) as pool:
        bench = bench_of(pool, clock)
        with pytest.raises(type(fault), match=str(fault)):
            bench.time_part(HEADS, profile_of(a=1.0, b=1.0))
        assert list(bench.failed) == (["b"] if isinstance(fault, BackendError) else [])


def test_large_layers_are_tried_in_fewer_rounds_and_groups_so_that_nobody_waits_for_hours():
    clock = ThreadTicks()
    backends = [Steady(name, clock, 1.0) for name in "abc"]
    with BackendPool(backends) as pool:
        found = bench_of(pool, clock, budget_s=20.0).time_part(HEADS, profile_of(a=1.0, b=1.0, c=1.0))
    assert [one.backends for one in found] == [("a", "b")]
    assert [one.forwards for one in backends] == [4, 4, 0], "a round to warm up and one that counts, twice"


def test_a_clock_that_does_not_move_corrects_nothing():
    together = tried(profile_of(a=1.0, b=1.0), a=0.0, b=0.0)
    assert all(one.slowed == {} for one in together.together)
    assert sum(dealt(together).values()) == 12


def test_a_part_that_nobody_could_compute_alone_is_not_tried():
    clock = ThreadTicks()
    incomplete = msgspec.structs.replace(profile_of(a=1.0), groups=0)
    with BackendPool([Steady("a", clock, 1.0)]) as pool:
        assert bench_of(pool, clock).time_part(HEADS, incomplete) == ()
