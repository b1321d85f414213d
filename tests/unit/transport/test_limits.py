import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.transport.frame import FrameHeader, TensorSpec
from coterie.transport.limits import BEFORE_ACCEPT, Limits, check_header, check_preamble, check_tensor, wire_bytes
from coterie.units import MIB


def spec(**changes: object) -> TensorSpec:
    fields: dict[str, object] = {"name": "x", "dtype": "float32", "shape": (2, 3), "nbytes": 24}
    return TensorSpec(**{**fields, **changes})  # type: ignore[arg-type]


def test_sizes_on_the_wire_follow_from_dtype_shape_and_codec() -> None:
    assert wire_bytes("float32", (2, 3), "raw") == 24
    assert wire_bytes("bool", (5,), "raw") == 5
    assert wire_bytes("int64", (), "raw") == 8
    assert wire_bytes("float32", (2, 3), "fp16") == 4 + 12
    assert wire_bytes("float32", (2, 3), "int8") == 2 * 4 + 6
    assert wire_bytes("float32", (0, 3), "int8") == 0
    assert wire_bytes("float32", (2, 128), "int4") == 2 * (2 * 4 + 64)
    assert wire_bytes("float16", (2, 65), "int4") == 2 * (2 * 4 + 33)
    assert wire_bytes("float32", (), "int4") == 4 + 1
    assert wire_bytes("float32", (3, 0), "int4") == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "object"}, "dtype 'object' is not allowed"),
        ({"dtype": "complex64", "nbytes": 48}, "not allowed"),
        ({"shape": (-2, -3)}, "negative size"),
        ({"shape": (1,) * 9, "nbytes": 4}, "9 dimensions; at most 8"),
        ({"shape": (2, 4)}, "24 bytes announced, but float32 \\(2, 4\\) as raw takes 32"),
        ({"nbytes": -24}, "announced"),
        ({"codec": "zip"}, "codec 'zip' is not known"),
        ({"codec": "int8", "dtype": "int64", "nbytes": 14}, "codec int8 takes"),
        ({"codec": "int4", "dtype": "int64", "nbytes": 12}, "codec int4 takes"),
        ({"codec": "int4", "nbytes": 11}, "11 bytes announced, but float32 \\(2, 3\\) as int4 takes 12"),
        ({"shape": (2**40, 2**40), "nbytes": 2**82}, "at most 4.00 GiB"),
    ],
)
def test_a_tensor_that_breaks_a_limit_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check_tensor(spec(**changes), Limits())


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (0, 2**63), (2000, 3, 2**62, 0)])
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_an_empty_tensor_whose_other_sizes_no_tensor_can_have_is_refused(shape: tuple[int, ...], codec: str) -> None:
    with pytest.raises(ProtocolError, match=r"at most 4\.00 GiB"):
        check_tensor(spec(shape=shape, codec=codec, nbytes=wire_bytes("float32", shape, codec)), Limits())


def test_a_small_tensor_that_decoding_would_blow_up_is_refused() -> None:
    """Rows of one element: 5 bytes each under int4, and 256 once decoded."""
    rows = 2**20
    with pytest.raises(ProtocolError, match=r"256 MiB for float32 \(1048576, 1\) as int4; at most 128 MiB"):
        check_tensor(spec(shape=(rows, 1), codec="int4", nbytes=5 * rows), Limits(max_tensor_bytes=128 * MIB))


def test_a_header_whose_tensors_do_not_add_up_to_the_payload_is_refused() -> None:
    with pytest.raises(ProtocolError, match="25 payload bytes whose tensors add up to 24"):
        check_header(FrameHeader(kind="x", tensors=(spec(),)), 25, Limits())


def test_too_many_tensors_are_refused() -> None:
    header = FrameHeader(kind="x", tensors=(spec(),) * 3)
    with pytest.raises(ProtocolError, match="3 tensors; 2 are allowed"):
        check_header(header, 72, Limits(max_tensors=2))


def test_tensors_that_are_fine_alone_but_too_much_together_are_refused() -> None:
    header = FrameHeader(kind="x", tensors=(spec(),) * 3)
    with pytest.raises(ProtocolError, match="72 B of tensors; 50 B are allowed"):
        check_header(header, 72, Limits(max_frame_bytes=50))


def test_before_a_link_is_accepted_no_tensor_and_no_large_header_passes() -> None:
    check_preamble(64 * 1024, 0, BEFORE_ACCEPT)
    with pytest.raises(ProtocolError):
        check_preamble(64 * 1024 + 1, 0, BEFORE_ACCEPT)
    with pytest.raises(ProtocolError):
        check_preamble(100, 1, BEFORE_ACCEPT)
    with pytest.raises(ProtocolError):
        check_header(FrameHeader(kind="x", tensors=(spec(shape=(0,), nbytes=0),)), 0, BEFORE_ACCEPT)


@given(header_bytes=st.integers(0, 2**32 - 1), payload_bytes=st.integers(0, 2**64 - 1))
def test_no_preamble_over_the_limits_passes(header_bytes: int, payload_bytes: int) -> None:
    limits = Limits(max_header_bytes=1000, max_frame_bytes=10_000)
    if 0 < header_bytes <= 1000 and payload_bytes <= 10_000:
        check_preamble(header_bytes, payload_bytes, limits)
    else:
        with pytest.raises(ProtocolError):
            check_preamble(header_bytes, payload_bytes, limits)
