"""Randomness that belongs to (seed, step, micro-batch, unit), so that dropout masks do not depend on where a cut is.

Before each unit's forward torch's generators are seeded from the key and the unit; any number of devices, a resume, a
recomputation or a re-partition then draws the same numbers. Masks made on a CPU and on an accelerator differ: mixed
devices agree statistically, not bit for bit.
"""

import hashlib
import struct
from typing import NamedTuple

import torch


class RandomKey(NamedTuple):
    """What a forward's randomness depends on, beside the unit."""

    seed: int
    step: int
    micro_batch: int


def seed_for(key: RandomKey, unit: int) -> int:
    """The generator seed of one unit in one forward: equal on every machine, spread over 63 bits."""
    packed = struct.pack("<4q", key.seed, key.step, key.micro_batch, unit)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_for_name(seed: int, name: str) -> int:
    """The generator seed that initialises the new parameter `name`, whichever stage holds it."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=struct.pack("<q", seed)).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds torch's CPU generator and, for a stage on an accelerator, that device's.

    `torch.manual_seed` would visit every accelerator library (and queue calls for those not started) at each block.
    """
    torch.default_generator.manual_seed(seed)
    match device.type:
        case "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        case "mps":
            torch.mps.manual_seed(seed)
        case "xpu":
            torch.xpu.manual_seed(seed)
        case _:
            pass
