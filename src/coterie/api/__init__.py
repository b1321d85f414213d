"""The Python front door."""

from coterie.api.auditing import Audit, AuditWish, audit
from coterie.api.forward import (
    Evaluation,
    Prediction,
    evaluate,
    generate,
    predict,
    run_evaluation,
    run_prediction,
)
from coterie.api.planning import Planned, measure_facts, plan_run
from coterie.api.profiling import BackendsProfile, ProfileWish, profile_compute
from coterie.api.quiet import QuietObserver
from coterie.api.training import FinetuneResult, finetune, train
from coterie.coordinator.run_control import RunControl
from coterie.coordinator.run_folder import EVENTS, MODEL, PLOT, RECIPE, SUMMARY

__all__ = [
    "EVENTS",
    "MODEL",
    "PLOT",
    "RECIPE",
    "SUMMARY",
    "Audit",
    "AuditWish",
    "BackendsProfile",
    "Evaluation",
    "FinetuneResult",
    "Planned",
    "Prediction",
    "ProfileWish",
    "QuietObserver",
    "RunControl",
    "audit",
    "evaluate",
    "finetune",
    "generate",
    "measure_facts",
    "plan_run",
    "predict",
    "profile_compute",
    "run_evaluation",
    "run_prediction",
    "train",
]
