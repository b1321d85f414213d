"""The recipe of a run: read from TOML and flags with every mistake reported at once, and written back. No torch."""

from coterie.config.flags import add_recipe_flags, overrides_from
from coterie.config.forward import forward_recipe
from coterie.config.loading import load_recipe
from coterie.config.recipe import (
    ClusterSection,
    DataSection,
    LocalWorker,
    ModelSection,
    PlanSection,
    Recipe,
    RunSection,
    TrainSection,
)
from coterie.config.writing import recipe_to_toml

__all__ = [
    "ClusterSection",
    "DataSection",
    "LocalWorker",
    "ModelSection",
    "PlanSection",
    "Recipe",
    "RunSection",
    "TrainSection",
    "add_recipe_flags",
    "forward_recipe",
    "load_recipe",
    "overrides_from",
    "recipe_to_toml",
]
