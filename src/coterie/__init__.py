"""Fine-tune a transformer together, on the devices you already own."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.api import evaluate, finetune, generate, predict, train

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "finetune", "generate", "predict", "train"]


def __getattr__(name: str) -> object:
    """The functions of `coterie.api`, loaded when first used: they import torch, which takes seconds."""
    if name in __all__:
        return getattr(importlib.import_module("coterie.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
