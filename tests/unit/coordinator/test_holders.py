"""Which copies of trained state workers keep, whom they send them to, and what they are asked for afterwards."""

import msgspec
import pytest

from coterie.coordinator.holders import COPIED_STEPS, COPY_ROOM_BYTES, HandedOut, Holders
from coterie.coordinator.replication import SMALL_BYTES, copy_peers
from coterie.ids import WorkerId
from coterie.planner.rebalance import UnitBytes

A, B, C, D = (WorkerId(letter) for letter in "abcd")
TRAINED = (1000, 10, 10, 10, 500, 2000)
UNITS = tuple(UnitBytes(frozen_bytes=7, trained_bytes=size) for size in TRAINED)


@pytest.fixture
def four(plan_of):
    """Four stages."""
    return plan_of((A, 0, 1), (B, 1, 3), (C, 3, 4), (D, 4, 6))


RATES = {(source, target): 1e6 for source in "abcde" for target in "abcde"}
ALONE = {"owners": (), "rates": RATES}


def test_every_stage_sends_to_the_next_one_and_the_last_to_the_one_before_it(four, plan_of):
    assert copy_peers(four, UNITS, 1, **ALONE) == {A: B, B: C, C: D, D: C}
    assert copy_peers(plan_of((A, 0, 3), (B, 3, 6)), UNITS, 1, **ALONE) == {A: B, B: A}
    assert copy_peers(plan_of((A, 0, 6)), UNITS, 1, **ALONE) == {}


def test_nobody_sends_where_there_is_no_direct_link_or_where_training_needs_its_time(four):
    without = {ends: rate for ends, rate in RATES.items() if ends != (A, B)}
    assert A not in copy_peers(four, UNITS, 1, owners=(), rates=without)
    # The copy of a's stage takes 0.2 s, those of b's and c's 4 and 2 ms, d's half a second.
    slow = dict.fromkeys(RATES, 5000)
    assert copy_peers(four, UNITS, 1, owners=(), rates=slow) == {A: B, B: C, C: D, D: C}
    busy = tuple(msgspec.structs.replace(stage, send_s=0.2) for stage in four.stages)  # 0.8 s of each second
    busy_plan = msgspec.structs.replace(four, stages=busy)
    assert copy_peers(busy_plan, UNITS, 1, owners=(), rates=slow) == {B: C, C: D}
    assert copy_peers(busy_plan, UNITS, 6, owners=(), rates=slow) == {A: B, B: C, C: D, D: C}


@pytest.mark.parametrize(
    ("owners", "expected"),
    [((A, D), {B: C, C: D}), ((A, B, D), {A: B, B: C, C: D}), ((A, C, D), {B: C, C: D, D: C})],
)
def test_where_data_stay_with_their_owner_the_ends_send_their_weights_to_no_other_device(owners, expected, four):
    kept = msgspec.structs.replace(four, keeps_data_local=True)
    assert copy_peers(kept, UNITS, 1, owners=owners, rates=RATES) == expected


def test_each_worker_is_told_whose_copies_come_to_it_and_how_much_room_they_have(four):
    terms = Holders(UNITS).hand_over(four, 1, **ALONE).terms
    assert {worker: term.peer for worker, term in terms.items()} == {A: B, B: C, C: D, D: C}
    assert {worker: term.sources for worker, term in terms.items()} == {A: (), B: (A,), C: (B, D), D: (C,)}
    most = {A: 1000, B: 1000, C: 2520, D: 2500}
    limits = {worker: COPIED_STEPS * size + COPY_ROOM_BYTES for worker, size in most.items()}
    assert {worker: term.limit_bytes for worker, term in terms.items()} == limits


def test_a_run_that_makes_no_replicas_keeps_no_copies(four):
    holders = Holders(UNITS)
    handover = holders.hand_over(four, 0, **ALONE)
    assert handover.terms == {}
    holders.stands(four, handover, with_disks=())
    assert not any(holders.hand_over(four, 0, **ALONE).trained.values())


def test_after_a_loss_the_others_are_asked_for_what_they_may_have_and_a_newcomer_for_nothing(four, plan_of):
    holders = Holders(UNITS)
    first = holders.hand_over(four, 1, **ALONE)
    assert not any(first.trained.values())
    assert not any(first.frozen.values())
    holders.stands(four, first, with_disks=())
    holders.forget(B)
    e = WorkerId("e")
    second = holders.hand_over(plan_of((A, 0, 2), (C, 2, 4), (e, 4, 5), (D, 5, 6)), 1, **ALONE)
    assert second.frozen == {A: {0}, C: {3}, e: frozenset(), D: {5}}
    assert second.trained == {A: {0}, C: {2, 3}, e: frozenset(), D: {5}}
    handed_out = {A: HandedOut(sent_bytes=10, trained=frozenset({0})), C: HandedOut(trained=frozenset({2}))}
    assert holders.kept_bytes(second, handed_out) == 3 * 7 + 1000 + 10


def test_a_worker_without_a_disk_is_not_asked_for_more_than_it_keeps_in_memory(plan_of):
    large = tuple(UnitBytes(frozen_bytes=0, trained_bytes=SMALL_BYTES if unit == 0 else 1) for unit in range(6))
    two = plan_of((A, 0, 2), (B, 2, 6))
    for disks, asked in (((), {A: {2, 3, 4, 5}}), ((A,), {A: set(range(6))})):
        holders = Holders(large)
        holders.stands(two, holders.hand_over(two, 1, **ALONE), with_disks=disks)
        holders.forget(B)
        assert holders.hand_over(plan_of((A, 0, 6)), 1, **ALONE).trained == asked
