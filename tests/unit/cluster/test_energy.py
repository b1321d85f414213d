"""The end of a battery's charge, and the moment to move layers away; all times are arguments."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster.energy import (
    BatterySample,
    EnergyPolicy,
    end_of_charge_s,
    should_hand_over,
)

POLICY = EnergyPolicy()


def discharge(*, start=0.8, per_s=0.0002, seconds=600, every=10, on_power=False, whole_percents=True):
    """A battery that falls evenly, told as devices tell it."""
    samples = []
    for at_s in range(0, seconds + 1, every):
        charge = start - per_s * at_s
        told = round(charge, 2) if whole_percents else charge
        samples.append(BatterySample(at_s=float(at_s), charge=told, on_power=on_power))
    return samples


def test_an_even_fall_is_followed_to_the_reserve():
    history = discharge(whole_percents=False)
    assert end_of_charge_s(history) == pytest.approx((0.8 - 0.0002 * 600 - 0.2) / 0.0002)
    assert end_of_charge_s(history, reserve=0.0) == pytest.approx((0.8 - 0.0002 * 600) / 0.0002)


@given(st.floats(0.5, 1.0), st.floats(0.00008, 0.0004))
def test_whole_percents_change_the_prediction_by_a_quarter_at_most(start, per_s):
    history = discharge(start=start, per_s=per_s, seconds=900)
    true_s = max((start - per_s * 900 - 0.2) / per_s, 0.0)
    found = end_of_charge_s(history)
    assert found is not None
    assert found == pytest.approx(true_s, rel=0.25, abs=0.01 / per_s)


def test_plugged_in_it_never_ends():
    assert end_of_charge_s(discharge(on_power=True)) is None


def test_a_battery_that_does_not_fall_or_was_just_unplugged_says_nothing():
    assert end_of_charge_s(discharge(per_s=0.0)) is None
    assert end_of_charge_s(discharge(per_s=-0.0002)) is None
    assert end_of_charge_s(discharge()[:2]) is None
    assert end_of_charge_s([]) is None


def test_only_the_time_since_it_was_unplugged_counts():
    plugged = [BatterySample(at_s=at_s - 600.0, charge=0.8, on_power=True) for at_s in range(0, 600, 10)]
    assert end_of_charge_s(plugged + discharge()) == end_of_charge_s(discharge())


def test_readings_out_of_line_change_little():
    """A driver that tells 0 or 100 % now and then: the median of slopes does not follow it."""
    rng = random.Random(1)
    history = discharge(whole_percents=False)
    wild = [
        BatterySample(at_s=sample.at_s, charge=rng.choice([0.0, 1.0]), on_power=False)
        if 0 < number < len(history) - 1 and rng.random() < 0.1
        else sample
        for number, sample in enumerate(history)
    ]
    assert wild != history
    assert end_of_charge_s(wild) == pytest.approx(end_of_charge_s(history), rel=0.15)


def test_a_device_at_its_reserve_has_no_time_left():
    assert end_of_charge_s([BatterySample(at_s=0.0, charge=0.19, on_power=False)]) == 0.0


def decisions(history, policy=POLICY, *, run_s, move_s):
    """At which sample layers are handed over, as a coordinator would ask: after each sample, once."""
    found = []
    handed_over = False
    for number, sample in enumerate(history, start=1):
        decision = should_hand_over(
            history[:number], policy, remaining_s=run_s - sample.at_s, move_s=move_s, handed_over=handed_over
        )
        if decision is not None:
            handed_over = True
            found.append((sample.at_s, decision))
    return found


def test_layers_leave_once_before_the_predicted_end_with_time_for_the_move():
    history = discharge(start=0.6, seconds=2500, every=5)  # the reserve is reached after 2000 s
    ((at_s, decision),) = decisions(history, run_s=10_000, move_s=60.0)
    assert decision.left_s == pytest.approx(180.0, abs=60.0)
    assert 2000 - at_s > 60.0 * 1.5
    assert "its battery" in decision.reason
    assert "20%" in decision.reason


@given(st.floats(0.3, 1.0), st.floats(0.0001, 0.002), st.floats(0.0, 40.0), st.floats(100.0, 20_000.0))
def test_nothing_is_handed_over_twice_and_a_move_ends_before_the_battery_does(start, per_s, move_s, run_s):
    reserve_at_s = (start - POLICY.reserve) / per_s
    history = [
        BatterySample(at_s=float(at_s), charge=max(round(start - per_s * at_s, 2), 0.0), on_power=False)
        for at_s in range(0, int(reserve_at_s) + 100, 15)
    ]
    found = decisions(history, run_s=run_s, move_s=move_s)
    assert len(found) <= 1
    if found and found[0][1].left_s > 0:
        charge_then = start - per_s * (found[0][0] + move_s)
        assert (
            charge_then > POLICY.reserve / 2
        )  # whole percents at a fast fall cost some of the lead, never the battery


def test_a_run_that_ends_before_the_battery_keeps_the_device():
    assert decisions(discharge(start=0.6, seconds=1000), run_s=1200, move_s=30.0) == []


def test_only_on_power_leaves_at_once_when_unplugged():
    policy = EnergyPolicy(only_on_power=True)
    plugged = BatterySample(at_s=0.0, charge=0.9, on_power=True)
    unplugged = BatterySample(at_s=1.0, charge=0.9, on_power=False)
    assert should_hand_over([plugged], policy, remaining_s=1e9, move_s=1.0) is None
    decision = should_hand_over([plugged, unplugged], policy, remaining_s=10.0, move_s=1.0)
    assert decision is not None
    assert decision.left_s == 0.0
    assert should_hand_over([plugged, unplugged], policy, remaining_s=10.0, move_s=1.0, handed_over=True) is None
