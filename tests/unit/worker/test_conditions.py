"""The owner's terms: leaving, and yielding."""

import pytest

from coterie.worker.conditions import (
    BUSY_S,
    GRACE_S,
    IDLE_AGAIN_S,
    OwnerConditions,
    OwnerState,
    Seen,
    Verdict,
    broken_term,
    consider,
    describe,
)

TERMS = OwnerConditions(only_on_power=True, min_battery=0.2, max_celsius=70.0)


@pytest.mark.parametrize(
    ("seen", "term"),
    [
        (Seen(), ""),
        (Seen(battery=0.9, on_power=True, celsius=69.0), ""),
        (Seen(battery=0.9, on_power=False), "not plugged in"),
        (Seen(battery=0.2, on_power=None), "battery is down to 20%"),
        (Seen(battery=0.01, on_power=True), ""),
        (Seen(celsius=71.0), "71 °C hot"),
    ],
)
def test_what_nobody_can_tell_breaks_no_term(seen: Seen, term: str) -> None:
    found = broken_term(TERMS, seen)
    assert term in found
    assert bool(term) == bool(found)


def test_without_terms_nothing_breaks_one() -> None:
    assert broken_term(OwnerConditions(), Seen(battery=0.0, on_power=False, celsius=99.0)) == ""


def test_a_device_leaves_when_a_term_stays_broken_and_not_when_a_plug_is_moved() -> None:
    unplugged, plugged = Seen(battery=0.9, on_power=False), Seen(battery=0.9, on_power=True)
    state, verdict = consider(OwnerState(), TERMS, unplugged, 100.0)
    assert verdict.leave == ""
    moved, verdict = consider(state, TERMS, plugged, 105.0)
    assert (moved.broken_since_s, verdict.leave) == (None, "")
    _, verdict = consider(state, TERMS, unplugged, 100.0 + GRACE_S)
    assert "not plugged in" in verdict.leave


def test_the_worker_yields_while_somebody_types_and_takes_its_share_again_when_nobody_has_for_a_minute() -> None:
    terms = OwnerConditions(share=0.8, yields_to=0.25)
    state, verdict = consider(OwnerState(), terms, Seen(idle_s=2.0), 100.0)
    assert verdict == Verdict(share=0.25, yields=True)
    state, verdict = consider(state, terms, Seen(idle_s=100.0), 99.0 + IDLE_AGAIN_S)
    assert verdict.yields
    state, verdict = consider(state, terms, Seen(idle_s=200.0), 101.0 + IDLE_AGAIN_S)
    assert verdict == Verdict(share=0.8)


def test_other_programs_count_as_work_when_they_are_busy_for_a_while() -> None:
    terms = OwnerConditions(yields_to=0.25)
    state, verdict = consider(OwnerState(), terms, Seen(others_cores=1.0), 10.0)
    assert verdict == Verdict()
    rested, verdict = consider(state, terms, Seen(others_cores=0.1), 11.0)
    assert (rested.busy_since_s, verdict.yields) == (None, False)
    _, verdict = consider(state, terms, Seen(others_cores=1.0), 10.0 + BUSY_S)
    assert verdict == Verdict(share=0.25, yields=True)


def test_an_owner_who_did_not_ask_for_it_is_not_yielded_to() -> None:
    _, verdict = consider(OwnerState(), OwnerConditions(share=0.5), Seen(idle_s=0.0, others_cores=8.0), 0.0)
    assert verdict == Verdict(share=0.5)


def test_yielding_never_takes_more_than_the_owner_allows_at_all_times() -> None:
    _, verdict = consider(OwnerState(), OwnerConditions(share=0.1, yields_to=0.25), Seen(idle_s=0.0), 0.0)
    assert verdict == Verdict(share=0.1, yields=True)


def test_only_changes_are_worth_a_word() -> None:
    assert describe(Verdict(), Verdict()) == ""
    assert "25%" in describe(Verdict(share=0.25, yields=True), Verdict())
    assert "100%" in describe(Verdict(), Verdict(share=0.25, yields=True))
