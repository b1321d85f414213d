"""The recipe of a run in which nothing is trained. Only what concerns such runs counts in it."""

import typing
from collections.abc import Mapping
from pathlib import Path

from coterie.checkpoint.export_record import ExportRecord, read_record
from coterie.config.loading import load_recipe
from coterie.config.model_look import read_json_object, task_of_config
from coterie.config.recipe import Recipe, TaskName

FORWARD_ROWS = 32
"""Rows of a batch where nothing is trained: enough to keep a core busy."""


def forward_recipe(model: str | Path, data: object, options: Mapping[str, object]) -> Recipe:
    """The recipe for predicting or evaluating `data` by `model`.

    Task, prompt and longest row are those that the model was trained with, unless options name others.

    Args:
        model: A trained model's folder or hub name.
        data: A path, or anything else for rows in memory.
        options: As `load_recipe` takes them.

    Raises:
        RecipeError: An option is wrong; all of them are named.
    """
    named = str(data) if isinstance(data, str | Path) and str(data) else "rows in memory"
    folder = Path(model)
    fixed: dict[str, object] = {"model.name": str(model), "data.train": named, "train.batch_rows": FORWARD_ROWS}
    record = read_record(folder)
    wished = options.get("data.task") or options.get("task")
    if record is not None and wished in {None, record.task}:
        fixed |= {"data.prompt": record.prompt or None, "data.max_tokens": record.max_tokens}
    fixed["data.task"] = _trained_task(folder, record)
    return load_recipe(None, {**fixed, **options})


def _trained_task(folder: Path, record: ExportRecord | None) -> str | None:
    """What the model in `folder` was trained for: as its export recorded it, else as its class says; None: unknown."""
    task = record.task if record is not None else ""
    task = task or task_of_config(read_json_object(folder / "config.json")) or ""
    return task if task in typing.get_args(TaskName) else None
