"""bitsandbytes: whole numbers with a scale per block of weights, and back. The only module that knows the library.

Its kernels take and give plain tensors, which is all that is used of it: neither its layers nor its state objects.
Quantizing happens on the CPU only and treats each block by itself, so the result depends on the values alone.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from coterie.errors import MissingPackageError

BLOCK_OF_INT8 = 128
"""Weights that share a float32 scale: 8.25 bits a weight in all."""

BLOCK_OF_INT4 = 64
"""As in QLoRA: 4.5 bits a weight. Its second quantization, of the scales, is left out: it would save 0.37 bits."""

_BLOCKS_AT_ONCE = 1 << 14
"""Blocks quantized to 4 bits in one go: the library makes several copies of them meanwhile."""


def int8_levels() -> torch.Tensor:
    """What the 256 codes of int8 stand for [256]: k / 127 for k from -127 to 127, zero twice, as the kernel wants it.

    Not by `linspace`, whose last bits depend on the processor.
    """
    return torch.tensor([k / 127 for k in (*range(-127, 1), *range(128))], dtype=torch.float32)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [as `weight`] and float32 scales [blocks] of a float32 tensor on the CPU."""
    load_bitsandbytes()
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(weight.contiguous(), int8_levels(), BLOCK_OF_INT8)
    return codes, scales


def dequantize_int8(
    codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [as `codes`] in `dtype`; `levels` are `int8_levels` on the same device."""
    result: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(codes, scales, levels, BLOCK_OF_INT8, dtype)
    return result


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NF4 codes uint8 [half the weights], two a byte, and float32 scales [blocks] of a float32 tensor on the CPU.

    The last block is filled up with zeros, so that every block is whole: kernels differ in what else they take.
    """
    load_bitsandbytes()
    flat = weight.reshape(-1)
    missing = -flat.numel() % BLOCK_OF_INT4
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    step = _BLOCKS_AT_ONCE * BLOCK_OF_INT4
    parts = [
        torch.ops.bitsandbytes.quantize_4bit(flat[start : start + step], BLOCK_OF_INT4, "nf4", torch.uint8)
        for start in range(0, flat.numel(), step)
    ]
    return torch.cat([codes.reshape(-1) for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def dequantize_int4(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The weights [`shape`] in `dtype`.

    The kernel is told of rows of one block each. Told of the matrix's own rows, the one for AVX-512 finds wrong scales
    where a row is not a whole number of blocks.
    """
    rows = [scales.numel(), BLOCK_OF_INT4]
    whole: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK_OF_INT4, "nf4", rows, dtype)
    return whole.view(-1)[: torch.Size(shape).numel()].view(shape)


def load_bitsandbytes() -> None:
    """Register the library's kernels with torch.

    When imported it wraps some functions by `torch.compile`, which loads torch's compiler: 41 MiB and two seconds on
    every worker, for functions that never run on its devices, and that do without where compiling fails. It also looks
    for a package that would fetch a compiled kernel over the network; neither happens here.

    Raises:
        MissingPackageError: It is not installed.
    """
    if "bitsandbytes" in sys.modules:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            "frozen weights in 8 or 4 bits need the package `bitsandbytes`, on every device",
            hint='pip install "coterie[bitsandbytes]", or use frozen_dtype = "bfloat16"',
        )
    compiler = torch.compile
    fetcher = sys.modules.get("kernels")
    library_log = logging.getLogger("bitsandbytes")
    level = library_log.level
    torch.compile = _as_it_is  # type: ignore[assignment] # put back below
    sys.modules["kernels"] = None  # type: ignore[assignment] # Python's way to say that there is no such package
    library_log.setLevel(logging.ERROR)
    try:
        importlib.import_module("bitsandbytes")
    finally:
        torch.compile = compiler
        library_log.setLevel(level)
        del sys.modules["kernels"]
        if fetcher is not None:
            sys.modules["kernels"] = fetcher


def load_before_peft() -> None:
    """Load bitsandbytes as above if it is installed: PEFT would import it anyway, compiler and all, needed or not."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        load_bitsandbytes()


def _as_it_is(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """In place of `torch.compile`."""
    return function
