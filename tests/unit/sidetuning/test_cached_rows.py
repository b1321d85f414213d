"""Positions as bytes, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.sidetuning.cached_rows import RowCoder

DTYPES = ["float32", "float16", "int8", "int4"]
WIDTHS = st.sampled_from([1, 3, 16, 63, 64, 65, 100, 128])


def taps_of(tokens, layers, width, exponent=0.0, seed=0):
    return torch.randn(tokens, layers, width, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [("float32", 6 * 384 * 4), ("float16", 6 * (4 + 384 * 2)), ("int8", 6 * (4 + 384)), ("int4", 6 * (24 + 192))],
)
def test_a_position_takes_the_bytes_that_the_table_says(dtype, row_bytes):
    assert RowCoder(6, 384, dtype).row_bytes == row_bytes


@given(width=WIDTHS, layers=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_rows_of_any_width_start_where_a_float32_may(width, layers, dtype):
    coder = RowCoder(layers, width, dtype)
    assert coder.row_bytes % 4 == 0
    assert coder.encode(taps_of(2, layers, width)).shape == (2, coder.row_bytes)


@given(tokens=st.integers(0, 3), layers=st.integers(1, 3), width=WIDTHS, exponent=st.integers(-30, 35))
def test_float32_comes_back_bit_for_bit(tokens, layers, width, exponent):
    taps = taps_of(tokens, layers, width, exponent)
    coder = RowCoder(layers, width, "float32")
    assert torch.equal(coder.decode(coder.encode(taps)), taps)


@given(layers=st.integers(1, 3), width=WIDTHS, exponent=st.floats(-30, 35), seed=st.integers(0, 99))
def test_float16_keeps_eleven_bits_at_any_scale(layers, width, exponent, seed):
    taps = taps_of(3, layers, width, exponent, seed)
    coder = RowCoder(layers, width, "float16")
    largest = taps.double().abs().amax(2, keepdim=True)
    bound = taps.double().abs() * 2**-11 + largest * 2**-16
    assert bool(((coder.decode(coder.encode(taps)).double() - taps.double()).abs() <= bound).all())


def test_float16_of_ordinary_activations_is_plain_float16():
    taps = taps_of(5, 2, 64)
    coder = RowCoder(2, 64, "float16")
    assert torch.equal(coder.decode(coder.encode(taps)), taps.half().float())


def test_a_massive_activation_is_no_infinity_in_float16():
    taps = taps_of(1, 2, 64)
    taps[0, 1, 7] = 3e5
    coder = RowCoder(2, 64, "float16")
    assert torch.allclose(coder.decode(coder.encode(taps))[0, 1, 7], torch.tensor(3e5), rtol=1e-3)
    assert torch.equal(coder.decode(coder.encode(taps))[0, 0], taps[0, 0].half().float())


@given(width=WIDTHS, exponent=st.floats(-30, 35), seed=st.integers(0, 99), dtype=st.sampled_from(["int8", "int4"]))
def test_levels_err_by_at_most_half_of_one(width, exponent, seed, dtype):
    taps = taps_of(3, 2, width, exponent, seed)
    coder = RowCoder(2, width, dtype)
    error = (coder.decode(coder.encode(taps)).double() - taps.double()).abs()
    group, levels = (width, 127) if dtype == "int8" else (64, 7)
    for first in range(0, width, group):
        part = slice(first, first + group)
        bound = taps[..., part].double().abs().amax(2, keepdim=True) * 0.5001 / levels
        assert bool((error[..., part] <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_positions_bytes_do_not_depend_on_those_beside_it(dtype):
    taps = taps_of(6, 3, 100)
    coder = RowCoder(3, 100, dtype)
    assert torch.equal(coder.encode(taps)[2:4], coder.encode(taps[2:4] * 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stages_layers_are_stored_as_they_would_be_alone(dtype):
    taps = taps_of(4, 3, 100)
    whole, part = RowCoder(3, 100, dtype), RowCoder(2, 100, dtype)
    assert torch.equal(whole.decode(whole.encode(taps))[:, 1:], part.decode(part.encode(taps[:, 1:])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_layers_are_no_bytes(dtype):
    coder = RowCoder(0, 8, dtype)
    assert coder.decode(coder.encode(torch.empty(3, 0, 8))).shape == (3, 0, 8)
