"""The recipe of a run in which nothing is trained. Only what concerns such runs counts in it."""

from collections.abc import Mapping
from pathlib import Path

from coterie.config.loading import load_recipe
from coterie.config.recipe import Recipe

FORWARD_ROWS = 32
"""Rows of a batch where nothing is trained: enough to keep a core busy."""


def forward_recipe(model: str | Path, data: object, options: Mapping[str, object]) -> Recipe:
    """The recipe for predicting or evaluating `data` by `model`.

    Args:
        model: A trained model's folder or hub name.
        data: A path, or anything else for rows in memory.
        options: As `load_recipe` takes them.

    Raises:
        RecipeError: An option is wrong; all of them are named.
    """
    named = str(data) if isinstance(data, str | Path) and str(data) else "rows in memory"
    fixed = {"model.name": str(model), "data.train": named, "train.batch_rows": FORWARD_ROWS}
    return load_recipe(None, {**fixed, **options})
