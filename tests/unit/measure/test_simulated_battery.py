"""The text of a simulated battery."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import UsageError
from coterie.measure.simulated_battery import SimulatedState, parse_battery


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("80%", SimulatedState(charge=0.8)),
        ("80%,-60%/h", SimulatedState(charge=0.8, per_s=-0.6 / 3600)),
        ("7.5%, +0.5%/s, plugged", SimulatedState(charge=0.075, per_s=0.005, on_power=True)),
        ("100%,-2%/min,4.5W,-3C", SimulatedState(charge=1.0, per_s=-0.02 / 60, watts=4.5, celsius=-3.0)),
    ],
)
def test_a_battery_is_written_in_words(text: str, state: SimulatedState) -> None:
    assert parse_battery(text) == state


@pytest.mark.parametrize("text", ["", "80", "101%", "-1%", "80%,fast", "80%,2", "80%,-2%/day", "80%,"])
def test_what_is_no_battery_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_battery(text)
    assert "simulated:80%,-2%/min" in raised.value.hint


@given(st.text(max_size=20))
def test_any_other_text_is_refused_and_never_a_crash(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 0 <= parse_battery(text).charge <= 1
