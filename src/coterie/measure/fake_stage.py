"""Stages of fake tensors: shapes without values or memory, on which torch picks the kernels of a real CPU."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.jobs.model_spec import ModelSpec
from coterie.models import StageModule, build_stage


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
