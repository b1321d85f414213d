import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.planner.plan import Codec as PlannedCodec
from coterie.tensors.codecs import Codec, decode, encode
from coterie.transport.limits import Limits, check_tensor

ALL_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def through_a_link(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    spec, buffer = encode(tensor, "x", codec)
    check_tensor(spec, Limits())
    return decode(spec, memoryview(bytearray(buffer)))


@given(dtype=st.sampled_from(ALL_DTYPES), shape=SHAPES, seed=st.integers(0, 1000))
def test_raw_gives_back_exactly_what_was_sent(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    sent = tensor_of(dtype, shape, seed)
    received = through_a_link(sent, "raw")
    assert received.dtype == dtype
    assert received.shape == sent.shape
    assert torch.equal(received, sent)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_raw_encoding_of_a_contiguous_tensor_shares_its_memory(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, (4, 6))
    _, buffer = encode(tensor, "x", "raw")
    tensor.zero_()
    assert bytes(buffer) == bytes(tensor.numel() * dtype.itemsize)


def test_raw_decoding_shares_the_received_memory_and_can_be_written() -> None:
    spec, buffer = encode(torch.ones(3, 4), "x", "raw")
    received = bytearray(buffer)
    tensor = decode(spec, memoryview(received))
    tensor.fill_(0.0)
    assert received == bytes(48)


def test_raw_decoding_copies_a_read_only_or_badly_aligned_buffer() -> None:
    spec, buffer = encode(torch.arange(4), "x", "raw")
    shifted = memoryview(bytearray(b"x" + bytes(buffer)))[1:]
    assert decode(spec, shifted).tolist() == [0, 1, 2, 3]
    assert decode(spec, bytes(buffer)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("codec", "error"), [("raw", 0.0), ("fp16", 0.02), ("int8", 0.02), ("int4", 0.4)])
def test_tensors_that_are_not_contiguous_or_need_a_gradient_are_sent_by_value(codec: str, error: float) -> None:
    base = torch.randn(6, 4, requires_grad=True)
    for view in (base.t(), base[:, ::2], base[0].expand(3, 4), base[1:]):
        assert torch.allclose(through_a_link(view, codec), view.detach(), atol=error)


@given(
    shape=SHAPES,
    exponent=st.integers(-37, 37),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_fp16_keeps_eleven_bits_of_each_element_at_any_scale(
    shape: tuple[int, ...], exponent: int, dtype: torch.dtype, seed: int
) -> None:
    sent = (tensor_of(torch.float32, shape, seed) * 10.0 ** (exponent - 1)).clamp(-3e38, 3e38).to(dtype)
    received = through_a_link(sent, "fp16")
    assert received.dtype == dtype
    largest = float(sent.abs().max()) if sent.numel() else 0.0
    bound = sent.double().abs() * 2**-11 + largest * 2**-38
    assert bool(((received.double() - sent.double()).abs() <= bound).all())


def test_fp16_alone_would_lose_gradients_that_the_scaled_codec_keeps() -> None:
    gradient = torch.tensor([3e-9, -1e-9])
    assert gradient.half().tolist() == [0.0, 0.0]
    assert torch.allclose(through_a_link(gradient, "fp16"), gradient, rtol=1e-3, atol=0)
    large = torch.tensor([3e9, -1e5])
    assert torch.allclose(through_a_link(large, "fp16"), large, rtol=1e-3, atol=0)


@given(
    shape=SHAPES,
    exponent=st.integers(-30, 37),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_int8_errs_by_at_most_half_a_level_of_each_row(
    shape: tuple[int, ...], exponent: int, dtype: torch.dtype, seed: int
) -> None:
    sent = (tensor_of(torch.float32, shape, seed) * 10.0 ** (exponent - 1)).to(dtype).nan_to_num(posinf=1, neginf=-1)
    received = through_a_link(sent, "int8")
    assert received.shape == sent.shape
    if sent.numel() == 0:
        return
    rows = sent.double().reshape(1, 1) if sent.dim() == 0 else sent.double()
    largest = rows.abs().amax(-1, keepdim=True)
    rounding = torch.finfo(dtype).eps  # of the result's own dtype
    bound = largest * (0.5 / 127 + rounding) * 1.0001
    assert bool(((received.double().reshape(rows.shape) - rows).abs() <= bound).all())


@given(
    rows=st.integers(0, 3),
    width=st.sampled_from([1, 2, 3, 63, 64, 65, 127, 128, 200]),
    exponent=st.integers(-30, 37),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_int4_errs_by_at_most_half_a_level_of_each_group_of_64(
    rows: int, width: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    sent = tensor_of(torch.float32, (rows, width), seed) * 10.0 ** (exponent - 1)
    sent = sent.to(dtype).nan_to_num(posinf=1, neginf=-1)
    received = through_a_link(sent, "int4")
    assert received.shape == sent.shape
    assert received.dtype == dtype
    rounding = torch.finfo(dtype)  # of the result's own dtype
    for first in range(0, width, 64):
        group = sent[:, first : first + 64].double()
        bound = group.abs().amax(1, keepdim=True) * (0.5 / 7 + rounding.eps) * 1.0001
        bound += rounding.smallest_normal * rounding.eps
        assert bool(((received[:, first : first + 64].double() - group).abs() <= bound).all())


@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_int4_takes_tensors_of_any_rank(shape: tuple[int, ...], seed: int) -> None:
    sent = tensor_of(torch.float32, shape, seed)
    received = through_a_link(sent, "int4")
    assert received.shape == sent.shape
    assert bool(((received - sent).abs() <= float(sent.abs().max() if sent.numel() else 0) / 13).all())


def test_int4_of_a_row_does_not_depend_on_its_neighbours() -> None:
    sent = tensor_of(torch.float32, (5, 100))
    assert torch.equal(through_a_link(sent, "int4")[2:4], through_a_link(sent[2:4] * 1.0, "int4"))


@given(width=st.integers(1, 130), codec=st.sampled_from(["int8", "int4"]), seed=st.integers(0, 1000))
def test_rounding_to_levels_a_second_time_changes_a_last_bit_at_most(width: int, codec: str, seed: int) -> None:
    """What crossed a link in a codec may be kept in the same one."""
    once = through_a_link(tensor_of(torch.float32, (3, width), seed), codec)
    assert torch.allclose(through_a_link(once, codec), once, rtol=3e-7, atol=0)


def test_the_planner_knows_no_four_bit_links() -> None:
    """Rounding a hidden state or its gradient to 15 levels is for a side network's inputs only."""
    assert "int4" in get_args(Codec)
    assert "int4" not in get_args(PlannedCodec)


@settings(max_examples=20)
@given(value=st.sampled_from([math.inf, -math.inf, math.nan]), codec=st.sampled_from(["fp16", "int8", "int4"]))
def test_what_is_not_finite_never_arrives_as_a_finite_number(value: float, codec: str) -> None:
    tensor = torch.ones(3, 4)
    tensor[1, 2] = value
    received = through_a_link(tensor, codec)
    assert not bool(received[1, 2].isfinite())
    if codec != "fp16":
        assert torch.equal(received[[0, 2]], tensor[[0, 2]])


def test_rows_of_zeros_stay_zeros() -> None:
    assert torch.equal(through_a_link(torch.zeros(2, 3), "int8"), torch.zeros(2, 3))
    assert torch.equal(through_a_link(torch.zeros(2, 3), "fp16"), torch.zeros(2, 3))
    assert torch.equal(through_a_link(torch.zeros(2, 3), "int4"), torch.zeros(2, 3))


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float64])
def test_lossy_codecs_refuse_what_is_no_activation(codec: str, dtype: torch.dtype) -> None:
    with pytest.raises(ProtocolError, match=f"codec {codec} takes bfloat16, float16, float32"):
        encode(tensor_of(dtype, (2, 2)), "ids", codec)


def test_a_dtype_that_may_not_cross_a_link_is_refused() -> None:
    with pytest.raises(ProtocolError, match="complex64"):
        encode(torch.zeros(2, dtype=torch.complex64), "x", "raw")


def test_a_buffer_of_another_length_than_its_spec_is_refused() -> None:
    spec, buffer = encode(torch.zeros(4), "x", "raw")
    with pytest.raises(ProtocolError, match="takes 16 bytes, announced 16, got 12"):
        decode(spec, bytes(buffer)[:12])


def test_bools_of_a_hostile_peer_are_refused() -> None:
    spec, _ = encode(torch.zeros(4, dtype=torch.bool), "mask", "raw")
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        decode(spec, bytes([0, 1, 2, 0]))
