"""Stages of fake tensors: shapes without values or memory, on which torch picks the kernels of a real CPU."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.jobs.model_spec import ModelSpec
from coterie.models import Anatomy, StageModule, build_stage

_FEW_ELEMENTS = 1 << 20
_FEW_PRODUCTS = 1 << 26
"""Up to so many elements of a tensor or unit, and multiply-adds per row and unit, computing takes less time than
pretending to: a fake operation takes longer than a small real one, and a process's first loads what traces programs."""


def is_tiny(anatomy: Anatomy, tokens: int) -> bool:
    """Whether every unit is computed in no time; experts are left to fake tensors, which notice where values matter."""
    sizes = dict.fromkeys(range(anatomy.unit_count), 0)
    for name, unit in anatomy.unit_of.items():
        sizes[unit] += torch.Size(anatomy.shapes[name]).numel()
    widest = max(max(shape) for shape in anatomy.shapes.values() if shape)
    largest = max(*sizes.values(), tokens * max(widest, tokens))
    is_quick = largest <= _FEW_ELEMENTS and largest * tokens <= _FEW_PRODUCTS
    return is_quick and not any("expert" in name for name in anatomy.shapes)


def build_fake_stage(spec: ModelSpec, first_unit: int, stop_unit: int, mode: FakeTensorMode) -> StageModule:
    """Units [first_unit, stop_unit) on a fake CPU. Call it outside of `mode`; the stage runs inside.

    The stage is built on the meta device, where that is fast, and its tensors are exchanged afterwards.

    Raises:
        UnsupportedModelError: The model cannot be cut.
    """
    stage = build_stage(spec, first_unit, stop_unit, None, device="meta")
    stage.device = torch.device("cpu")
    trained = {id(parameter) for parameter in stage.trainable().values()}
    parameters: dict[int, nn.Parameter] = {}
    with mode:
        for module in stage.module.modules():
            for leaf, parameter in module._parameters.items():  # noqa: SLF001 - places, tied ones too
                if parameter is not None:
                    if id(parameter) not in parameters:
                        fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                        parameters[id(parameter)] = nn.Parameter(fake, requires_grad=id(parameter) in trained)
                    module._parameters[leaf] = parameters[id(parameter)]  # noqa: SLF001 - see above
            for leaf, buffer in module._buffers.items():  # noqa: SLF001 - see above
                if buffer is not None:
                    module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")  # noqa: SLF001
    return stage
