"""The Python front door."""

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
from coterie.api.quiet import QuietObserver
from coterie.api.training import EVENTS, MODEL, PLOT, RECIPE, SUMMARY, FinetuneResult, finetune, train

__all__ = [
    "EVENTS",
    "MODEL",
    "PLOT",
    "RECIPE",
    "SUMMARY",
    "Evaluation",
    "FinetuneResult",
    "Planned",
    "Prediction",
    "QuietObserver",
    "evaluate",
    "finetune",
    "generate",
    "measure_facts",
    "plan_run",
    "predict",
    "run_evaluation",
    "run_prediction",
    "train",
]
