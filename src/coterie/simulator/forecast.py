"""Run a plan's schedule on virtual devices."""

import msgspec

from coterie.planner.decide import as_candidate
from coterie.planner.plan import Plan
from coterie.planner.problem import CODEC_SIZE, Problem
from coterie.planner.request import PlanRequest
from coterie.planner.timing import stage_times
from coterie.schedules.checks import check
from coterie.schedules.orders import make_schedule
from coterie.schedules.timeline import simulate_times


class StageForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over the simulated steps.

    Attributes:
        busy_share: Part of the time spent computing, 0 to 1.
        sent_bytes: On the link to the next stage, both directions together; 0 for the last stage.
    """

    device_name: str
    busy_share: float
    sent_bytes: int


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment of `steps` optimizer steps would take, from an empty pipeline to an empty one."""

    steps: int
    total_s: float
    stages: tuple[StageForecast, ...]


def simulate_plan(plan: Plan, request: PlanRequest, *, steps: int) -> Forecast:
    """Make the plan's schedule, check it against the planned depths, and run it with the profiles' seconds.

    Args:
        plan: A plan made from `request`.
        request: Holds the profiles.
        steps: Optimizer steps of the segment.

    Raises:
        ScheduleError: The plan's depths do not make a schedule that passes the check.
    """
    in_flight = tuple(stage.in_flight for stage in plan.stages)
    schedule = make_schedule(
        plan.schedule, stages=len(plan.stages), micro_batches=plan.micro_batches, steps=steps, in_flight=in_flight
    )
    check(schedule, in_flight=in_flight)
    candidate = as_candidate(plan, request)
    timeline = simulate_times(schedule, stage_times(candidate))
    problem, stages = candidate.problem, candidate.stages
    exchange_s = problem.exchange_s(stages[0].device, stages[-1].device)
    total_s = timeline.end_s + exchange_s * steps
    transfers = steps * plan.micro_batches
    return Forecast(
        steps=steps,
        total_s=total_s,
        stages=tuple(
            StageForecast(
                device_name=stage.device_name,
                busy_share=busy_s / total_s if total_s > 0 else 0.0,
                sent_bytes=round(
                    _ways(problem, stage.stop_unit)
                    * transfers
                    * float(problem.sent_bytes[stage.stop_unit - 1])
                    * CODEC_SIZE[stage.send_codec]
                )
                if stage.stage + 1 < len(stages)
                else 0,
            )
            for stage, busy_s in zip(plan.stages, timeline.busy_s, strict=True)
        ),
    )


def _ways(problem: Problem, cut: int) -> int:
    """Does anything come back over the link at this cut? A gradient, where something is trained before it."""
    return 1 if problem.kind == "forward" or cut <= problem.first_backward_unit else 2
