import pytest

from coterie.units import counted, format_joules, format_rate, name_units, parse_memory, parse_rate, parse_seconds


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


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (1e4, "0.08 Mbit/s"),
        (12.5e6, "100 Mbit/s"),
        (124.9e6, "999 Mbit/s"),
        (124.99e6, "1.00 Gbit/s"),
        (142.5e6, "1.14 Gbit/s"),
        (1.5e9, "12.0 Gbit/s"),
        (25e9, "200 Gbit/s"),
    ],
)
def test_rates_are_shown_without_powers_of_ten(bytes_per_s: float, text: str) -> None:
    assert format_rate(bytes_per_s) == text


def test_a_number_and_its_noun_agree() -> None:
    assert [counted(n, "stage") for n in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(n, "address", "addresses") for n in (1, 3)] == ["1 address", "3 addresses"]


def test_a_memory_without_a_unit_is_no_handful_of_bytes() -> None:
    with pytest.raises(ValueError, match="'600' would be 600 bytes; did you mean 600MiB"):
        parse_memory("600")
    assert [parse_memory(text) for text in ("0", "600MiB", "512 KiB", "1048576")] == [0, 600 << 20, 512 << 10, 1 << 20]


@pytest.mark.parametrize(
    ("joules", "text"),
    [(0.0, "0 J"), (85.4, "85.4 J"), (640.2, "640 J"), (1234.0, "1.23 kJ"), (54_000.0, "15 Wh")],
)
def test_energy_is_shown_as_batteries_are_sold_when_it_is_much(joules: float, text: str) -> None:
    assert format_joules(joules) == text


@pytest.mark.parametrize(
    ("first", "stop", "words"),
    [
        (0, 1, "embedding"),
        (0, 3, "embedding, blocks 0-1"),
        (1, 2, "block 0"),
        (2, 7, "blocks 1-5"),
        (6, 8, "block 5, output layer"),
        (7, 8, "output layer"),
        (0, 8, "embedding, blocks 0-5, output layer"),
    ],
)
def test_units_are_named_as_people_count_blocks(first, stop, words):
    assert name_units(first, stop, 8) == words
