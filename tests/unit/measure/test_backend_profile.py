"""Timing shares on backends: which counts, on a clock that the backends themselves move."""

import math
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import AttentionShape, Gradients, Need, NeuronShape, Outputs
from coterie.errors import BackendError
from coterie.heads.pool import BackendPool
from coterie.measure.backend_profile import ProfileSettings, profile_backends
from coterie.measure.share_bench import ROUNDS, group_counts, neuron_counts, rising
from coterie.measure.share_work import Conditions
from coterie.planner.head_allocation import allocate
from coterie.profiles.cache import ProfileCache

HEADS = AttentionShape(hidden=8, output=8, head_dim=2, heads=8, groups=4, scale=0.7, rotary="half", rotary_dims=2)
NEURONS = NeuronShape(hidden=8, output=8, neurons=32, gated=True)
RUN = Conditions(rows=2, tokens=3)


class Ticks:
    """A clock that only backends move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Part:
    """A loaded share, or a forward's memory."""

    def __init__(self, shape) -> None:
        self.shape = shape
        self.released = False

    def release(self) -> None:
        self.released = True


class Paced:
    """A backend that computes nothing and takes its time: a fixed cost for a share and one for each head or neuron."""

    def __init__(self, name: str, clock: Ticks, *, fixed: float, each: float, fails_at: int = 0) -> None:
        self.info = BackendInfo(name=name, device="made up", kind="cpu", driver="test 1")
        self.clock, self.fixed, self.each, self.fails_at = clock, fixed, each, fails_at
        self.loaded: list[Part] = []
        self.forwards: list[tuple[int, int]] = []
        self.needs: list[Need] = []
        self.inputs = []
        self.threads: set[int] = set()
        self.closed = False

    def load(self, shape, weights):
        for name, weight in weights.items():
            assert weight.dtype == np.float32, name
            assert weight.flags.c_contiguous, name
        self.loaded.append(Part(shape))
        return self.loaded[-1]

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        assert (inner, keep) == (False, True)
        self.threads.add(threading.get_ident())
        shape = loaded.shape
        count = shape.groups if isinstance(shape, AttentionShape) else shape.neurons
        if count == self.fails_at:
            raise BackendError(f"{count} were too many", hint="none")
        self.clock.now += self.fixed + self.each * count
        self.forwards.append((type(shape).__name__, count))
        self.inputs.append(inputs)
        return Outputs(y=np.zeros_like(inputs.x)), Part(shape)

    def backward(self, saved, gradient, need, *, inner_gradient=None):
        assert inner_gradient is None
        assert gradient.shape[-1] == 8
        self.needs.append(need)
        saved.release()
        return Gradients()

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> Ticks:
    return Ticks()


@pytest.fixture
def settings(clock, tmp_path) -> ProfileSettings:
    return ProfileSettings(clock=clock, cache=ProfileCache(tmp_path), budget_s=1e6, rounds_together=0)


def test_every_count_is_measured_fused_and_head_by_head_and_the_faster_one_counts(clock, settings):
    slow_alone = Paced("a", clock, fixed=1.0, each=2.0)
    cheap_alone = Paced("b", clock, fixed=-1.0, each=2.0)
    with BackendPool([slow_alone, cheap_alone]) as pool:
        found = profile_backends(pool, HEADS, None, RUN, settings)
    a, b = found.backends
    assert [(t.count, t.fused_s, t.each_s) for t in a.attention] == [(k, 1 + 2 * k, 3 * k) for k in (1, 2, 3, 4)]
    assert [t.strategy for t in a.attention] == ["fused"] * 4
    assert [t.seconds for t in b.attention] == [1, 2, 3, 4]
    assert [t.strategy for t in b.attention] == ["fused", "each", "each", "each"]
    assert (found.groups, found.neurons, a.neurons) == (4, 0, ())


def test_neurons_are_measured_on_a_grid_and_both_parts_can_be_allocated(clock, settings):
    backends = [Paced("a", clock, fixed=0.1, each=1.0), Paced("b", clock, fixed=0.1, each=2.0)]
    with BackendPool(backends) as pool:
        found = profile_backends(pool, HEADS, NEURONS, RUN, settings)
    assert [t.count for t in found.backends[0].neurons] == [2, 4, 8, 12, 16, 20, 24, 28, 32]
    assert all(t.each_s is None for t in found.backends[0].neurons)
    allocation = allocate(found)
    assert allocation.attention is not None
    assert allocation.neurons is not None
    assert {share.backend: share.count for share in allocation.attention.shares} == {"a": 3, "b": 1}
    assert sum(share.count for share in allocation.neurons.shares) == 32
    assert len(allocation.neurons.shares) == 2


def test_trained_weights_are_sent_for_each_micro_batch_and_frozen_ones_once_per_count(clock, settings):
    trained, frozen = (Paced("a", clock, fixed=1.0, each=1.0) for _ in range(2))
    with BackendPool([trained]) as pool:
        profile_backends(pool, HEADS, None, RUN, settings)
    with BackendPool([frozen]) as pool:
        need = Need(x=True, weights=False, added=True)
        profile_backends(pool, HEADS, None, Conditions(rows=2, tokens=3, need=need), settings)
    assert len(trained.loaded) == len(trained.forwards)
    assert len(frozen.loaded) == ROUNDS * ((1 + 2 + 3 + 4) + 3)  # fused for each count; head by head for 2, 3, 4
    assert all(part.released for part in (*trained.loaded, *frozen.loaded))
    assert set(frozen.needs) == {need}
    assert {name: array.shape for name, array in frozen.inputs[-1].added.items()} == {
        "q": (2, 3, 4),
        "k": (2, 3, 2),
        "v": (2, 3, 2),
    }
    assert trained.inputs[-1].added == {}


def test_inputs_have_the_shapes_of_a_run(clock, settings):
    backend = Paced("a", clock, fixed=1.0, each=1.0)
    with BackendPool([backend]) as pool:
        profile_backends(pool, HEADS, NEURONS, Conditions(rows=2, tokens=3, causal=True, dropout=True), settings)
    first = backend.inputs[0]
    assert first.x.shape == (2, 3, 8)
    assert first.bias.shape == (1, 1, 3, 3)
    assert first.bias[0, 0, 0].tolist() == [0.0, np.finfo(np.float32).min, np.finfo(np.float32).min]
    assert first.cos.shape == first.sin.shape == (1, 3, 2)
    assert first.keep.shape == (2, 2, 3, 3)
    assert first.keep.dtype == np.uint8


def test_each_backend_runs_in_one_thread_of_its_own_and_is_closed(clock, settings):
    backends = [Paced(name, clock, fixed=1.0, each=1.0) for name in ("a", "b")]
    with BackendPool(backends) as pool:
        profile_backends(pool, HEADS, NEURONS, RUN, settings)
    assert [len(backend.threads) for backend in backends] == [1, 1]
    assert backends[0].threads != backends[1].threads
    assert threading.get_ident() not in backends[0].threads | backends[1].threads
    assert all(backend.closed for backend in backends)


def test_a_hopelessly_slow_backend_is_measured_with_its_smallest_share_only_and_says_so(clock, settings):
    backends = [Paced("slow", clock, fixed=0.0, each=100.0), Paced("fast", clock, fixed=0.0, each=1.0)]
    with BackendPool(backends) as pool:
        found = profile_backends(pool, HEADS, None, RUN, settings)
    slow, fast = found.backends
    assert [t.count for t in slow.attention] == [1]
    assert len(fast.attention) == 4
    reason = "its smallest share is 100 times as slow as that of fast; it was measured no further"
    assert slow.notes == {"attention": reason}
    allocation = allocate(found)
    assert allocation.attention is not None
    assert reason in allocation.attention.left_out["slow"]


def test_a_backend_with_high_fixed_costs_is_not_hopeless_if_it_is_fast_with_many_heads(clock, settings):
    heads = AttentionShape(hidden=8, output=8, head_dim=2, heads=30, groups=30, scale=1.0)
    backends = [Paced("cpu", clock, fixed=0.0, each=1.0), Paced("gpu", clock, fixed=9.0, each=0.1)]
    with BackendPool(backends) as pool:
        found = profile_backends(pool, heads, None, RUN, settings)
    assert found.backends[1].attention[-1].count == 30
    assert found.backends[1].notes == {}


def test_the_budget_leaves_out_counts_between_but_never_the_whole(clock, settings):
    slow = Paced("slow", clock, fixed=0.0, each=5.0)
    with BackendPool([Paced("fast", clock, fixed=0.0, each=1.0), slow]) as pool:
        short = ProfileSettings(clock=clock, cache=settings.cache, budget_s=50.0)
        found = profile_backends(pool, HEADS, None, RUN, short)
    assert [t.count for t in found.backends[1].attention] == [1, 4]
    assert found.backends[1].notes == {"attention": "50 s were enough for 2 of 4 counts"}


def test_a_backend_that_fails_is_left_out_and_nothing_is_kept_in_the_cache(clock, settings):
    broken = Paced("broken", clock, fixed=0.0, each=1.0, fails_at=4)
    with BackendPool([broken, Paced("fine", clock, fixed=0.0, each=2.0)]) as pool:
        found = profile_backends(pool, HEADS, NEURONS, RUN, settings)
    assert found.backends[0].attention == found.backends[0].neurons == ()
    assert found.backends[0].notes == {"attention": "it failed: 4 were too many", "neurons": "it had failed"}
    assert (found.groups, found.neurons) == (4, 32)
    assert settings.cache is not None
    assert settings.cache.read(found.key, type(found)) is None


class Unsociable(Paced):
    """Fails as soon as another backend has begun to work beside it: from its n-th forward on."""

    def __init__(self, name: str, clock: Ticks, *, each: float, alone: int) -> None:
        super().__init__(name, clock, fixed=0.0, each=each)
        self.alone = alone

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        if len(self.forwards) >= self.alone:
            raise BackendError("the driver has gone", hint="none")
        return super().forward(loaded, inputs, inner=inner, keep=keep)


def test_a_backend_that_fails_beside_others_has_no_share_and_says_why_and_nothing_is_kept(clock, settings):
    def backends(alone: int) -> list[Paced]:
        return [
            Paced("a", clock, fixed=0.0, each=1.0),
            Unsociable("b", clock, each=1.0, alone=alone),
            Paced("c", clock, fixed=0.0, each=1.5),
        ]

    measured = backends(10**6)
    with BackendPool(measured) as pool:
        profile_backends(pool, HEADS, NEURONS, RUN, msgspec.structs.replace(settings, again=True))
    together = msgspec.structs.replace(settings, rounds_together=1, again=True)
    with BackendPool(backends(len(measured[1].forwards))) as pool:
        found = profile_backends(pool, HEADS, NEURONS, RUN, together)
    allocation = allocate(found)
    for part in (allocation.attention, allocation.neurons):
        assert part is not None
        assert "b" not in [share.backend for share in part.shares]
        assert part.left_out["b"].endswith("(it failed beside others: the driver has gone)")
    assert {one.part for one in found.together} == {"attention", "neurons"}
    assert settings.cache is not None
    assert settings.cache.read(found.key, type(found)) is None


def test_what_was_timed_alone_only_is_not_taken_for_what_was_timed_side_by_side(clock, settings):
    backend = Paced("a", clock, fixed=0.0, each=1.0)
    with BackendPool([backend]) as pool:
        profile_backends(pool, HEADS, None, RUN, settings)
        before = len(backend.forwards)
        profile_backends(pool, HEADS, None, RUN, msgspec.structs.replace(settings, rounds_together=1))
    assert len(backend.forwards) > before


def test_one_that_was_given_up_early_does_not_stand_for_a_whole_part_if_the_fastest_fails_later(clock, settings):
    fastest = Paced("fastest", clock, fixed=0.0, each=1.0, fails_at=3)
    slow = Paced("slow", clock, fixed=0.0, each=50.0)
    with BackendPool([fastest, slow]) as pool:
        found = profile_backends(pool, HEADS, None, RUN, msgspec.structs.replace(settings, rounds_together=1))
    assert found.groups == 0
    assert allocate(found).attention is None


def test_where_nobody_computes_the_whole_part_it_counts_as_not_splittable(clock, settings):
    with BackendPool([Paced("broken", clock, fixed=0.0, each=1.0, fails_at=4)]) as pool:
        found = profile_backends(pool, HEADS, None, RUN, settings)
    assert found.groups == 0
    assert allocate(found).attention is None


def test_profiles_are_cached_by_shapes_run_and_backends_and_measured_again_when_asked(clock, settings):
    def forwards(run: Conditions, *, driver_fixed: float = 1.0, name: str = "a", again: bool = False) -> int:
        backend = Paced(name, clock, fixed=driver_fixed, each=1.0)
        with BackendPool([backend]) as pool:
            profile_backends(pool, HEADS, None, run, ProfileSettings(clock=clock, cache=settings.cache, again=again))
        return len(backend.forwards)

    assert forwards(RUN) > 0
    assert forwards(RUN) == 0
    assert forwards(RUN, again=True) > 0
    assert forwards(Conditions(rows=2, tokens=4)) > 0
    assert forwards(Conditions(rows=2, tokens=3, need=Need(weights=False))) > 0
    assert forwards(RUN, name="b") > 0
    assert forwards(RUN) == 0


def test_progress_counts_every_measurement_and_ends_at_the_last(clock, settings):
    told: list[tuple[str, int, int]] = []
    tell = msgspec.structs.replace(settings, progress=lambda *step: told.append(step))
    with BackendPool([Paced(name, clock, fixed=0.0, each=1.0) for name in ("a", "b")]) as pool:
        profile_backends(pool, HEADS, NEURONS, RUN, tell)
    assert [number for _, number, _ in told] == list(range(1, 1 + ROUNDS * 26))
    assert {of for _, _, of in told} == {ROUNDS * 26}
    assert told[0][0] == "a, 1 of 4 KV groups"


class Stumbling(Paced):
    """Slower for a while: as long as the clock, which all backends move, says so."""

    def __init__(self, name: str, clock: Ticks, *, each: float, until_s: float) -> None:
        super().__init__(name, clock, fixed=0.0, each=each)
        self.until_s = until_s

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        before = self.clock.now
        made = super().forward(loaded, inputs, inner=inner, keep=keep)
        if before < self.until_s:
            self.clock.now += 4 * (self.clock.now - before)
        return made


def test_a_machine_that_is_slow_for_one_round_does_not_change_what_backends_are_worth(clock, settings):
    heads = AttentionShape(hidden=8, output=8, head_dim=2, heads=6, groups=6, scale=1.0)
    backends = [Stumbling(name, clock, each=each, until_s=300.0) for name, each in (("a", 1.0), ("b", 2.0))]
    with BackendPool(backends) as pool:
        found = profile_backends(pool, heads, None, RUN, settings)
    assert clock.now > 600.0, "most of the first round was slow, the rest was not"
    assert [t.seconds for t in found.backends[0].attention] == [1, 2, 3, 4, 5, 6]
    allocation = allocate(found)
    assert allocation.attention is not None
    assert {share.backend: share.count for share in allocation.attention.shares} == {"a": 4, "b": 2}


@given(st.lists(st.floats(0.001, 100), max_size=12))
def test_rising_figures_keep_their_sum_and_are_the_same_where_they_rose(seconds):
    found = rising(seconds)
    assert found == sorted(found)
    assert math.isclose(sum(found), sum(seconds), rel_tol=1e-9, abs_tol=1e-12)
    assert rising(sorted(seconds)) == sorted(seconds)
    assert np.allclose(rising(found), found, rtol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 16, 17, 20, 32, 71, 128])
def test_head_counts_begin_with_one_end_with_all_and_have_their_complements(groups):
    counts = group_counts(groups)
    assert counts == tuple(sorted(set(counts)))
    assert (counts[0], counts[-1]) == (1, groups)
    assert {groups - count for count in counts[:-1]} <= set(counts)
    assert len(counts) <= 34


@pytest.mark.parametrize(
    ("neurons", "counts"),
    [(1, (1,)), (3, (1, 2, 3)), (3072, (192, 384, 768, 1152, 1536, 1920, 2304, 2688, 3072))],
)
def test_neuron_counts_end_with_all(neurons, counts):
    assert neuron_counts(neurons) == counts
