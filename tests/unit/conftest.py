"""Plans for tests that need no planner."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from coterie.ids import WorkerId
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment

NOTHING = MemoryEstimate(
    base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
)


def _stage(number: int, worker: str, first: int, stop: int) -> StageAssignment:
    return StageAssignment(
        stage=number,
        worker=WorkerId(worker),
        device_name=worker,
        first_unit=first,
        stop_unit=stop,
        in_flight=1,
        recompute=False,
        allocator="default",
        send_codec="fp32",
        memory=NOTHING,
        memory_limit=0,
        forward_s=0,
        backward_s=0,
        update_s=0,
        send_s=0,
    )


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """Makes a plan of parts (worker, first unit, stop unit) that cost nothing; its other fields can be given."""

    def make(*parts: tuple[str, int, int], **fields: Any) -> Plan:
        plan = Plan(
            version=1,
            schedule="flush",
            objective="time",
            batch_rows=4,
            micro_batches=4,
            units=parts[-1][2],
            stages=tuple(_stage(number, *part) for number, part in enumerate(parts)),
            left_out=(),
            predicted_step_s=1,
            one_device_step_s=1,
            one_device_peak=0,
        )
        return msgspec.structs.replace(plan, **fields)

    return make
