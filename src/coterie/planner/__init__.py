"""Who runs what: cuts, device order and subset, memory, in-flight depth, codecs; and the sentences that explain it."""

from coterie.planner.decide import make_plan
from coterie.planner.explain import explain, plan_table
from coterie.planner.memory import MemorySettings, estimate_memory
from coterie.planner.plan import Plan, StageAssignment
from coterie.planner.request import FixedStage, PlanRequest

__all__ = [
    "FixedStage",
    "MemorySettings",
    "Plan",
    "PlanRequest",
    "StageAssignment",
    "estimate_memory",
    "explain",
    "make_plan",
    "plan_table",
]
