import pytest

from coterie.units import parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100Mbit/s", 12.5e6),
        ("1 Gbit/s", 125e6),
        ("800bit/s", 100),
        ("2MB/s", 2e6),
        ("1MiB/s", 1048576),
        ("9kbit/s", 1125),
    ],
)
def test_rates_are_read_in_bits_and_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "100", "100Mbit", "fast", "0Mbit/s", "-1Mbit/s", "5MB"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|size"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 5e-3), ("0.2 s", 0.2), ("300us", 3e-4), ("1S", 1.0)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "5 minutes", "-5ms"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_seconds(text)
