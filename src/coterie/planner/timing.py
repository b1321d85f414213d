"""A candidate's step as the schedule's simulation sees it: what the formula bounds, this counts."""

from coterie.planner.problem import is_continuous
from coterie.planner.search import Candidate
from coterie.schedules.orders import make_schedule
from coterie.schedules.timeline import StageTimes, simulate_times

STEADY_MICRO_BATCHES = 64
"""Simulated for schedules that stay full, at least four steps of them, so that filling and draining do not count."""


def stage_times(candidate: Candidate) -> list[StageTimes]:
    """Seconds of each stage's actions and of the link after it."""
    problem, stages = candidate.problem, candidate.stages
    times = []
    for number, stage in enumerate(stages):
        forward, backward, update = problem.compute_s(stage)
        there = back = latency = 0.0
        if number + 1 < len(stages):
            target = stages[number + 1].device
            there, back = problem.transfer_s(stage.device, target, stage.stop_unit, stage.codec)
            latency = problem.round_trip_latency_s(stage.device, target)
            latency = latency if problem.kind == "forward" else latency / 2
        times.append(
            StageTimes(
                forward_s=forward,
                backward_s=backward,
                update_s=update * problem.micro_batches / problem.updates_per_step,
                send_s=there,
                send_back_s=back,
                latency_s=latency,
            )
        )
    return times


def simulated_step_s(candidate: Candidate) -> float:
    """Seconds per optimizer step: one step from empty to empty, or a middle one of a full pipeline."""
    problem, stages = candidate.problem, candidate.stages
    count = problem.micro_batches
    steps = max(-(-STEADY_MICRO_BATCHES // count), 4) if is_continuous(problem.kind) else 1
    in_flight = tuple(max(problem.in_flight(stage.depth), 1) for stage in stages)
    schedule = make_schedule(problem.kind, stages=len(stages), micro_batches=count, steps=steps, in_flight=in_flight)
    timeline = simulate_times(schedule, stage_times(candidate))
    own = timeline.steady_step_s if is_continuous(problem.kind) else timeline.end_s
    return own + problem.exchange_s(stages[0].device, stages[-1].device)
