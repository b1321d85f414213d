"""In what order each stage runs its forwards, backwards and updates. A schedule is data: checked, rendered, timed."""

from coterie.schedules.actions import Action, Schedule, ScheduleKind
from coterie.schedules.checks import check
from coterie.schedules.figures import last_uses, peak_in_flight, staleness, weight_versions
from coterie.schedules.orders import default_in_flight, make_schedule
from coterie.schedules.render import render
from coterie.schedules.timeline import StageTimes, Timeline, simulate_times

__all__ = [
    "Action",
    "Schedule",
    "ScheduleKind",
    "StageTimes",
    "Timeline",
    "check",
    "default_in_flight",
    "last_uses",
    "make_schedule",
    "peak_in_flight",
    "render",
    "simulate_times",
    "staleness",
    "weight_versions",
]
