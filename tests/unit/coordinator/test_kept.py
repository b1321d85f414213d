"""What people are told of a device that was not measured now."""

import pytest

from coterie.coordinator.kept import kept_note
from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import DeviceProfile


def profile(measured_at_s: float) -> DeviceProfile:
    return DeviceProfile(
        worker=WorkerId("b"), name="b", memory_bytes=1, base_bytes=1, flops_per_s=1.0, measured_at_s=measured_at_s
    )


@pytest.mark.parametrize(
    ("age_s", "words"),
    [(0.3, "1 second"), (59, "59 seconds"), (3599, "59 minutes"), (7300, "2 hours"), (3 * 86400 + 5, "3 days")],
)
def test_the_age_is_given_in_its_largest_unit(age_s, words):
    assert kept_note("board", profile(1.0), age_s) == (
        f"board: measured {words} ago, kept; --measure-again takes it anew"
    )


def test_figures_without_a_date_are_known_to_be_old():
    assert kept_note("board", profile(0.0), 1e9).startswith("board: measured before, kept;")
