"""The trained tensors of a stage as they travel: by unit, parameters beside the optimizer's state of them."""

from collections.abc import Mapping

from torch import Tensor

from coterie.cluster.messages import OPTIMIZER, PARAMETER, Assign, UnitBody, pack
from coterie.ids import WorkerId
from coterie.models.stage import StageModule
from coterie.pipeline.optimizer import ParameterState
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.units import MIB

CLONE_LIMIT_BYTES = 64 * MIB
"""Trained state up to this size is copied at once, and the stage computes on: all adapters, and small models.

More is sent as it is: then the next update waits until it is out, which costs time instead of memory."""

UnitTensors = dict[int, dict[str, Tensor]]
"""Per unit, its tensors by the names that they travel under; they are the live ones."""


def by_unit(stage: StageModule, parameters: Mapping[str, Tensor], state: Mapping[str, ParameterState]) -> UnitTensors:
    """Sort a stage's trained parameters and the optimizer's state of them by unit, in unit order."""
    units: UnitTensors = {}
    for name, parameter in parameters.items():
        if name == stage.tied_name and not stage.is_first:
            continue  # both ends hold equal copies; the first one's is kept
        tensors = units.setdefault(stage.unit_of(name), {})
        tensors[PARAMETER + name] = parameter.detach()
        tensors |= {f"{OPTIMIZER}{name}/{field}": value for field, value in state.get(name, {}).items()}
    return dict(sorted(units.items()))


def copied(units: UnitTensors) -> UnitTensors:
    """The same in memory of their own, where the processor can read it."""
    return {
        unit: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()} for unit, tensors in units.items()
    }


def size_bytes(units: UnitTensors) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensors in units.values() for tensor in tensors.values())


def unit_frame(
    kind: str, route: tuple[WorkerId, WorkerId], assign: Assign, place: tuple[int, int], tensors: Mapping[str, Tensor]
) -> Frame:
    """One unit's tensors as a frame; what lies in the processor's memory is not copied.

    Args:
        kind: Of the frame.
        route: Who sends it to whom.
        assign: Of which run and plan.
        place: Step and unit.
        tensors: Of the unit, by the names that they travel under.
    """
    parts = [encode(tensor, name, "raw") for name, tensor in tensors.items()]
    header = FrameHeader(
        kind=kind,
        source=route[0],
        target=route[1],
        run=assign.run,
        plan_version=assign.plan.version,
        step=place[0],
        body=pack(UnitBody(unit=place[1])),
        tensors=tuple(spec for spec, _ in parts),
    )
    return Frame(header, tuple(buffer for _, buffer in parts))
