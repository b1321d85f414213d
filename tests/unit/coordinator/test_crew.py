"""What is known of devices while they come, go and change."""

import pytest

from coterie.cluster.energy import BatterySample
from coterie.coordinator.crew import MOST_SAMPLES, Crew
from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile, UnitTiming

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def device(worker):
    timing = UnitTiming(kind="block", forward_per_row_s=1.0, backward_per_row_s=2.0)
    return DeviceProfile(
        worker=worker, name=worker, memory_bytes=1000, base_bytes=10, flops_per_s=1e9, timings=(timing,)
    )


def link(source, target, rate):
    return LinkProfile(source=source, target=target, bytes_per_s=rate, latency_s=0.001)


@pytest.fixture
def crew():
    links = (link(A, B, 100.0), link(B, A, 80.0))
    return Crew(ClusterProfile(devices=(device(A), device(B)), links=links))


def test_a_newcomer_is_known_with_its_links_once_it_is_measured(crew):
    crew.add(ClusterProfile(devices=(device(C),), links=(link(C, A, 5.0), link(A, C, 6.0))))
    assert crew.workers == {A, B, C}
    assert crew.slowest_link([A, B, C]).bytes_per_s == 5.0
    assert crew.slowest_link([A, B]).bytes_per_s == 80.0
    assert [found.worker for found in crew.cluster([A, C]).devices] == [A, C]
    assert {(found.source, found.target) for found in crew.cluster([A, C]).links} == {(A, C), (C, A)}


def test_of_who_is_gone_nothing_is_left_that_its_successor_would_inherit(crew):
    crew.limit(B, 5)
    crew.note_battery(B, BatterySample(at_s=0.0, charge=0.5))
    crew.forget(B)
    assert crew.workers == {A}
    assert crew.cluster([A, B]).links == ()
    crew.add(ClusterProfile(devices=(device(B),)))
    assert crew.device(B).memory_bytes == 1000
    assert len(crew.note_battery(B, BatterySample(at_s=1.0, charge=0.4))) == 1


def test_a_limit_holds_for_the_plans_after_it(crew):
    crew.limit(A, 300)
    assert [found.memory_bytes for found in crew.cluster([A, B]).devices] == [300, 1000]


def test_the_battery_of_a_long_run_does_not_fill_the_memory(crew):
    for second in range(MOST_SAMPLES + 5):
        history = crew.note_battery(A, BatterySample(at_s=float(second), charge=0.5))
    assert len(history) == MOST_SAMPLES
    assert history[-1].at_s == MOST_SAMPLES + 4


def test_a_process_that_has_held_a_stage_is_planned_with_less_until_it_is_a_new_one():
    crew = Crew(ClusterProfile(devices=(device(A), device(B))))
    crew.have_held([A])
    assert [found.memory_bytes for found in crew.cluster([A, B]).devices] == [950, 1000]
    assert [found.memory_bytes for found in crew.cluster([A, B]).devices] == [950, 1000]
    crew.add(ClusterProfile(devices=(device(A),)))
    assert sorted(found.memory_bytes for found in crew.cluster([A, B]).devices) == [1000, 1000]
