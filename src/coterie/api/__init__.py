"""The Python front door."""

from coterie.api.forward import (
    Evaluation,
    Prediction,
    evaluate,
    predict,
    run_evaluation,
    run_prediction,
)
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
    "Prediction",
    "QuietObserver",
    "evaluate",
    "finetune",
    "predict",
    "run_evaluation",
    "run_prediction",
    "train",
]
