"""The allocation of heads and neurons against plain enumeration, and what it says of backends it leaves out."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.planner.head_allocation import allocate, allocate_part, groups_of
from coterie.planner.paper_search import allocate_by_binary_search
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, ShareTiming, Together

NAMES = ("torch", "opencl", "mnn", "webgpu")


def timings(*seconds: float | None, counts: tuple[int, ...] | None = None) -> tuple[ShareTiming, ...]:
    """Timings of counts 1, 2, …; None: not measured."""
    numbers = counts or tuple(range(1, len(seconds) + 1))
    pairs = zip(numbers, seconds, strict=True)
    return tuple(ShareTiming(count=count, seconds=s, fused_s=s) for count, s in pairs if s is not None)


def linear(total: int, per_head: float, fixed: float = 0.0) -> tuple[ShareTiming, ...]:
    return timings(*(fixed + per_head * count for count in range(1, total + 1)))


def brute_force(
    profiles: dict[str, tuple[ShareTiming, ...]],
    total: int,
    dealing_s: float = 0.0,
    slowed: dict[str, float] | None = None,
) -> float:
    factors = slowed or {}
    choices = [
        [(0, 0.0), *((t.count, t.seconds * (1 if t.count == total else factors.get(name, 1))) for t in found)]
        for name, found in profiles.items()
    ]
    return min(
        max(seconds for _, seconds in chosen) + (dealing_s if sum(count > 0 for count, _ in chosen) > 1 else 0.0)
        for chosen in itertools.product(*choices)
        if sum(count for count, _ in chosen) == total
    )


@st.composite
def profiles_of(draw: st.DrawFn) -> tuple[dict[str, tuple[ShareTiming, ...]], int]:
    """Rising or not, with gaps; the first backend has the whole part."""
    total = draw(st.integers(1, 9))
    found = {}
    for name in NAMES[: draw(st.integers(1, 4))]:
        values = draw(st.lists(st.integers(1, 40), min_size=total, max_size=total))
        rising = itertools.accumulate(values) if draw(st.booleans()) else values
        gaps = draw(st.sets(st.integers(0, total - 2))) if total > 1 else set()
        seconds = [None if index in gaps else value / 1000 for index, value in enumerate(rising)]
        if found and draw(st.booleans()):
            seconds[-1] = None
        found[name] = timings(*seconds)
    return found, total


@settings(max_examples=100, deadline=None)
@given(
    profiles_of(), st.sampled_from([0.0, 0.004, 0.03]), st.lists(st.sampled_from([0.7, 1, 1.6]), min_size=4, max_size=4)
)
def test_without_a_threshold_no_allocation_is_faster_with_what_dealing_out_costs(case, dealing_s, factors):
    profiles, total = case
    slowed = dict(zip(NAMES, factors, strict=True))
    found = allocate_part(profiles, total, least_gain=0.0, dealing_s=dealing_s, slowed=slowed)
    assert found.predicted_s == pytest.approx(brute_force(profiles, total, dealing_s, slowed), rel=1e-12)
    assert sum(share.count for share in found.shares) == total


@settings(max_examples=60, deadline=None)
@given(profiles_of(), st.sampled_from([0.0, 0.03, 0.5]))
def test_shares_add_up_cost_what_was_measured_and_are_never_slower_than_the_best_single(case, least_gain):
    profiles, total = case
    found = allocate_part(profiles, total, least_gain=least_gain)
    assert sum(share.count for share in found.shares) == total
    for share in found.shares:
        assert share.predicted_s in [t.seconds for t in profiles[share.backend] if t.count == share.count]
    assert found.predicted_s == max(share.predicted_s for share in found.shares)
    assert found.predicted_s <= found.best_single_s
    assert found.best_single_s == min(of[-1].seconds for of in profiles.values() if of and of[-1].count == total)
    assert {share.backend for share in found.shares} | found.left_out.keys() == profiles.keys()
    assert not {share.backend for share in found.shares} & found.left_out.keys()
    if len(found.shares) > 1:
        assert found.best_single_s >= found.predicted_s * (1 + least_gain)


@settings(max_examples=60, deadline=None)
@given(profiles_of())
def test_every_backend_that_stays_saves_the_threshold(case):
    profiles, total = case
    found = allocate_part(profiles, total, least_gain=0.1)
    kept = {share.backend: profiles[share.backend] for share in found.shares}
    for name in kept if len(kept) > 1 else ():
        others = {other: of for other, of in kept.items() if other != name}
        if any(of[-1].count == total for of in others.values()):
            assert brute_force(others, total) >= found.predicted_s * 1.1


@settings(max_examples=60, deadline=None)
@given(profiles_of())
def test_the_papers_search_is_never_faster_than_the_exact_one(case):
    profiles, total = case
    searched = allocate_by_binary_search(profiles, total)
    if searched is not None:
        assert sum(share.count for share in searched.shares) == total
        assert searched.predicted_s >= allocate_part(profiles, total, least_gain=0.0).predicted_s


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_neurons_between_measured_widths_are_interpolated(seed, backends):
    draw = random.Random(seed)
    widths, total, step = (8, 24, 48), 48, 4
    profiles = {
        name: timings(*sorted(draw.uniform(0.1, 1) for _ in widths), counts=widths) for name in NAMES[:backends]
    }

    def seconds(of: tuple[ShareTiming, ...], count: int) -> float:
        if count <= widths[0]:
            return of[0].seconds
        low, high = next((a, b) for a, b in itertools.pairwise(of) if a.count <= count <= b.count)
        return low.seconds + (high.seconds - low.seconds) * (count - low.count) / (high.count - low.count)

    dense = {
        name: timings(
            *(seconds(of, c) for c in range(step, total + 1, step)), counts=tuple(range(step, total + 1, step))
        )
        for name, of in profiles.items()
    }
    found = allocate_part(profiles, total, step=step, least_gain=0.0)
    assert found.predicted_s == pytest.approx(brute_force(dense, total))
    assert all(share.count % step == 0 for share in found.shares)


def test_equal_backends_share_evenly_and_the_fast_one_gets_more():
    even = allocate_part({"torch": linear(12, 1.0), "opencl": linear(12, 1.0)}, 12)
    assert [(share.backend, share.count) for share in even.shares] == [("torch", 6), ("opencl", 6)]
    uneven = allocate_part({"torch": linear(12, 2.0), "opencl": linear(12, 1.0)}, 12)
    assert [(share.backend, share.count) for share in uneven.shares] == [("torch", 4), ("opencl", 8)]


def test_the_surplus_is_taken_from_the_slowest():
    found = allocate_part({"torch": linear(8, 1.0), "opencl": linear(8, 2.0), "mnn": linear(8, 3.5)}, 8, least_gain=0.0)
    assert {share.backend: share.count for share in found.shares} == {"torch": 5, "opencl": 2, "mnn": 1}
    assert found.predicted_s == 5.0


def test_a_backend_that_hardly_helps_is_left_out_and_the_figures_say_why():
    slow = linear(50, 0.9, fixed=48.0)
    found = allocate_part({"torch": linear(50, 1.0), "webgpu": slow}, 50)
    assert [(share.backend, share.count) for share in found.shares] == [("torch", 50)]
    assert found.left_out == {"webgpu": "with it 49 s, without it 50 s: it gains 2.0%, less than 3%"}
    assert found.predicted_s == found.best_single_s == 50.0
    kept = allocate_part({"torch": linear(50, 1.0), "webgpu": slow}, 50, least_gain=0.01)
    assert len(kept.shares) == 2


def test_a_backend_too_slow_for_one_head_is_left_out_with_its_seconds():
    found = allocate_part({"torch": linear(4, 0.001), "webgpu": timings(0.13)}, 4)
    assert found.left_out == {"webgpu": "its smallest share takes 130 ms, the others all of it 4 ms"}


def test_a_backend_without_timings_of_this_part_is_named():
    found = allocate_part({"torch": linear(4, 0.001), "mnn": ()}, 4)
    assert found.left_out == {"mnn": "it was not measured with this part"}


def test_dropping_one_backend_after_another_never_ends_slower_than_the_best_alone():
    profiles = {
        "torch": timings(200.0, 200.0, 100.0),
        "opencl": timings(98.0, 150.0, 101.0),
        "mnn": timings(300.0, 99.0, 300.0),
    }
    found = allocate_part(profiles, 3)
    assert [(share.backend, share.count) for share in found.shares] == [("torch", 3)]
    assert found.predicted_s == 100.0
    assert found.left_out.keys() == {"opencl", "mnn"}


def test_the_strategy_of_the_measured_count_is_kept():
    each = ShareTiming(count=2, seconds=1.0, strategy="each", fused_s=1.5, each_s=1.0)
    found = allocate_part({"torch": (*timings(0.9), each)}, 2)
    assert found.shares[0].strategy == "each"


def test_both_parts_are_allocated_and_an_absent_one_is_not():
    backends = (
        BackendProfile(
            name="torch", device="cpu", attention=linear(3, 1.0), neurons=timings(1.0, 4.0, counts=(16, 64))
        ),
        BackendProfile(name="opencl", device="gpu", attention=linear(3, 0.5), neurons=()),
    )
    device = DeviceBackends(key="k", groups=3, neurons=64, rows=1, tokens=8, backends=backends)
    found = allocate(device)
    assert found.attention is not None
    assert {share.backend: share.count for share in found.attention.shares} == {"torch": 1, "opencl": 2}
    assert found.neurons is not None
    assert [(share.backend, share.count) for share in found.neurons.shares] == [("torch", 64)]
    assert found.neurons.left_out == {"opencl": "it was not measured with this part"}
    alone = DeviceBackends(key="k", groups=0, neurons=64, rows=1, tokens=8, backends=backends)
    assert allocate(alone).attention is None


def on_processor(cores: int, *threads: int, seconds: tuple[float, ...] = (1.0, 1.0, 0.5)) -> DeviceBackends:
    backends = tuple(
        BackendProfile(name=name, device="cpu", attention=linear(6, each), threads=count)
        for name, count, each in zip(NAMES, threads, seconds, strict=False)
    )
    return DeviceBackends(key="k", groups=6, neurons=0, rows=1, tokens=8, backends=backends, cores=cores)


def test_no_more_backends_share_the_processor_than_it_has_cores_for():
    found = allocate(on_processor(2, 1, 1, 1)).attention
    assert found is not None
    assert [(share.backend, share.count) for share in found.shares] == [("torch", 2), ("mnn", 4)]
    assert found.left_out == {"opencl": "the processor has 2 cores, which torch and mnn use"}
    assert (found.best_single, found.best_single_s) == ("mnn", 3.0)


def test_a_backend_that_takes_no_core_comes_on_top_and_with_cores_enough_all_share():
    beside = allocate(on_processor(1, 1, 0, 1)).attention
    assert beside is not None
    assert {share.backend for share in beside.shares} == {"opencl", "mnn"}
    enough = allocate(on_processor(3, 1, 1, 1, seconds=(1.0, 1.0, 1.0))).attention
    assert enough is not None
    assert len(enough.shares) == 3


def test_a_backend_with_more_threads_than_cores_may_still_compute_alone():
    found = allocate(on_processor(2, 4, 4, 4)).attention
    assert found is not None
    assert [(share.backend, share.count) for share in found.shares] == [("mnn", 6)]
    assert found.predicted_s == found.best_single_s


@st.composite
def devices_tried_together(draw: st.DrawFn) -> DeviceBackends:
    """Backends of which some groups were tried side by side, with any luck; also groups that are none any more."""
    profiles, total = draw(profiles_of())
    backends = tuple(
        BackendProfile(name=name, device="cpu", attention=found, threads=draw(st.integers(0, 2)))
        for name, found in profiles.items()
    )
    device = DeviceBackends(
        key="k", groups=total, neurons=0, rows=1, tokens=8, backends=backends, cores=draw(st.integers(0, 4))
    )
    tried = [*groups_of(device, "attention"), ("torch", "gone"), ("torch",)]
    factors = st.floats(0.01, 100)
    together = tuple(
        Together(part="attention", backends=group, slowed=draw(st.dictionaries(st.sampled_from(group), factors)))
        for group in tried
        if draw(st.booleans())
    )
    return msgspec.structs.replace(device, together=together)


@settings(max_examples=150, deadline=None)
@given(devices_tried_together())
def test_whatever_backends_took_side_by_side_shares_add_up_and_the_best_single_is_never_beaten_in_slowness(device):
    found = allocate(device).attention
    assert found is not None
    timings_of = {backend.name: backend.attention for backend in device.backends}
    chosen = [share.backend for share in found.shares]
    assert sum(share.count for share in found.shares) == device.groups
    assert found.predicted_s == max(share.predicted_s for share in found.shares)
    assert found.predicted_s <= found.best_single_s
    wholes = [of[-1].seconds for of in timings_of.values() if of and of[-1].count == device.groups]
    assert found.best_single_s == min(wholes)
    if len(chosen) == 1:
        assert (chosen, found.predicted_s) == ([found.best_single], found.best_single_s), "nobody is beside it"
    assert sorted(chosen + list(found.left_out)) == sorted(timings_of)
    threads = {backend.name: backend.threads for backend in device.backends}
    assert not device.cores or len(chosen) == 1 or sum(threads[name] for name in chosen) <= device.cores


def test_a_backend_that_seemed_faster_beside_others_is_not_promised_to_be_so_alone():
    device = on_processor(2, 1, 1, seconds=(1.0, 1.0))
    lucky = Together(part="attention", backends=("torch", "opencl"), slowed={"torch": 0.1, "opencl": 9.0})
    found = allocate(msgspec.structs.replace(device, together=(lucky,))).attention
    assert found is not None
    assert [(share.backend, share.predicted_s) for share in found.shares] == [("torch", 6.0)]
    assert found.predicted_s == found.best_single_s == 6.0


def test_who_is_not_in_the_chosen_group_is_told_cores_only_where_they_are_in_use():
    device = on_processor(2, 1, 1, 1, seconds=(1.0, 1.0, 1.1))
    slowed = {"torch": 3.0, "opencl": 3.0, "mnn": 3.0}
    tried = tuple(Together(part="attention", backends=group, slowed=slowed) for group in groups_of(device, "attention"))
    found = allocate(msgspec.structs.replace(device, together=tried)).attention
    assert found is not None
    assert [share.backend for share in found.shares] == ["torch"]
    assert found.left_out == {"opencl": "with it 9 s, without it 6 s", "mnn": "with it 9.9 s, without it 6 s"}


def test_the_papers_search_finds_the_even_split_and_none_where_two_backends_jump_together():
    even = allocate_by_binary_search({"torch": linear(12, 1.0), "opencl": linear(12, 2.0)}, 12)
    assert even is not None
    assert {share.backend: share.count for share in even.shares} == {"torch": 8, "opencl": 4}
    assert allocate_by_binary_search({"torch": linear(3, 1.0), "opencl": linear(3, 1.0)}, 3) is None


def test_the_papers_search_bypasses_what_is_far_from_the_others():
    profiles = {"torch": linear(4, 1.0), "opencl": linear(4, 1.05), "mnn": timings(0.1, 9.0, 9.0, 9.0)}
    found = allocate_by_binary_search(profiles, 4)
    assert found is not None
    assert [share.backend for share in found.shares] == ["torch", "opencl"]
    assert "away from the mean" in found.left_out["mnn"]


def test_a_part_is_not_shared_where_dealing_out_costs_what_sharing_gains():
    backends = tuple(BackendProfile(name=name, device="d", attention=linear(6, 0.001)) for name in ("torch", "opencl"))
    device = DeviceBackends(key="k", groups=6, neurons=0, rows=1, tokens=8, backends=backends)
    shared = allocate(msgspec.structs.replace(device, dealing_s={"attention": 0.002})).attention
    assert shared is not None
    assert [(share.backend, share.count) for share in shared.shares] == [("torch", 3), ("opencl", 3)]
    assert shared.predicted_s == pytest.approx(0.003 + 0.002)
    alone = allocate(msgspec.structs.replace(device, dealing_s={"attention": 0.003})).attention
    assert alone is not None
    assert [(share.backend, share.count) for share in alone.shares] == [("torch", 6)]
    assert alone.left_out == {"opencl": "the others take 6 ms without it, as they would with it"}
