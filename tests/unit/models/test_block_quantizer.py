import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.models.block_quantizer import (
    BLOCK_OF_INT4,
    BLOCK_OF_INT8,
    dequantize_int4,
    dequantize_int8,
    int8_levels,
    quantize_int4,
    quantize_int8,
)

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
WIDEST_GAP_OF_NF4 = 0.304
"""Between its levels -1 and -0.696, of a block's largest weight."""


def matrix(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def largest_of_block(weight: torch.Tensor, block: int) -> torch.Tensor:
    """For each weight, the largest of its block in size."""
    flat = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % block)).view(-1, block)
    return flat.abs().amax(1, keepdim=True).expand_as(flat).reshape(-1)[: weight.numel()].view(weight.shape)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(0, 3))
def test_int8_is_off_by_at_most_half_a_level_of_its_block(shape: tuple[int, int], seed: int) -> None:
    weight = matrix(shape, seed)
    codes, scales = quantize_int8(weight)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, weight.shape, (-(-weight.numel() // 128),))
    back = dequantize_int8(codes, scales, int8_levels(), torch.float32)
    # The kernel's search takes the neighbour where a weight lies a hair beyond the middle of two levels.
    assert ((back - weight).abs() <= largest_of_block(weight, BLOCK_OF_INT8) * (0.5 / 127) * 1.01).all()


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(0, 3))
def test_int4_is_off_by_at_most_half_a_gap_of_nf4_whatever_the_shape(shape: tuple[int, int], seed: int) -> None:
    weight = matrix(shape, seed)
    codes, scales = quantize_int4(weight)
    assert codes.numel() == scales.numel() * BLOCK_OF_INT4 // 2
    back = dequantize_int4(codes, scales, shape, torch.float32)
    assert back.shape == weight.shape
    assert ((back - weight).abs() <= largest_of_block(weight, BLOCK_OF_INT4) * WIDEST_GAP_OF_NF4 / 2).all()


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_the_result_depends_on_the_values_alone(quantize) -> None:
    """Neither on threads nor on what else is quantized: blocks stand for themselves."""
    weight = matrix((300, 128))
    alone = quantize(weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        again = quantize(weight.clone())
    finally:
        torch.set_num_threads(threads)
    first_rows = quantize(weight[:100].clone())
    for whole, same, part in zip(alone, again, first_rows, strict=True):
        assert torch.equal(whole, same)
        assert torch.equal(whole[: len(part)], part)


def test_a_block_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 64)
    assert not dequantize_int8(*quantize_int8(weight), int8_levels(), torch.float32).any()
    assert not dequantize_int4(*quantize_int4(weight), (2, 64), torch.float32).any()


def test_int4_is_qloras_nf4() -> None:
    """A block that holds the sixteen levels of NF4 comes back as it was."""
    levels = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
    levels += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
    weight = torch.tensor(levels * 4)
    assert torch.allclose(dequantize_int4(*quantize_int4(weight), (64,), torch.float32), weight, atol=1e-7)


def test_the_library_is_loaded_without_torchs_compiler_and_without_a_network() -> None:
    """Its plain import, and PEFT's of it, would load 500 modules more; `kernels` would fetch code over the network."""
    program = (
        "import sys, torch, transformers.modeling_utils\n"
        "from coterie.models.block_quantizer import load_before_peft\n"
        "compiler, before = torch.compile, set(sys.modules)\n"
        "load_before_peft()\n"
        "import bitsandbytes\n"
        "assert torch.compile is compiler\n"
        "assert sys.modules.get('kernels', compiler) is not None\n"
        "print(sum(not name.startswith('bitsandbytes') for name in set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20
    assert not done.stderr
