"""A trained model at work: `evaluate` and `predict` in a line each, `run_…(recipe, …)` for programs."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from coterie.api.quiet import QuietObserver
from coterie.checkpoint.export_record import read_record
from coterie.config.checks import TASKS_WITH
from coterie.config.forward import forward_recipe
from coterie.config.recipe import Recipe
from coterie.coordinator.answering import answers, generated_texts, with_answers
from coterie.coordinator.evaluation import score
from coterie.coordinator.forward import ForwardRun, Predicted, predict_here
from coterie.coordinator.forward_job import prepare_forward_job
from coterie.coordinator.job import Job
from coterie.coordinator.observer import RunObserver
from coterie.errors import UsageError
from coterie.local import LocalFront
from coterie.metrics.records import EvaluationRecord
from coterie.planner.plan import Plan
from coterie.tasks.examples import Example
from coterie.tasks.readers.options import DataSource
from coterie.tasks.readers.plain_text import split_words
from coterie.tasks.rows import TEXT_FIELD
from coterie.tasks.task import Task

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Bare texts, or pairs of them, for a model to answer on."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What `evaluate` found; `plan` is set if it ran over workers."""

    record: EvaluationRecord
    rows: int
    plan: Plan | None


class Prediction(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model's answers, the task that can write them, and how long they took; `plan` as in `Evaluation`.

    Attributes:
        texts: Of a task in which text is written: what was generated for each row.
    """

    rows: tuple[Example, ...]
    task: Task
    seconds: float
    plan: Plan | None
    texts: tuple[str, ...] | None = None


def evaluate(
    model: str | Path, data: DataSource, *, split: str = "test", observer: RunObserver | None = None, **options: object
) -> Evaluation:
    """Compare a trained model's answers with the right ones.

    Args:
        model: A folder that a run exported (plain or PEFT adapter), any such folder, or a hub name.
        data: A data file or folder, or rows in memory.
        split: `train`, `dev` or `test`, where the data hold several.
        observer: Told what happens; nobody by default.
        options: Fields of the recipe by name: how to read the data (`label_column`), `batch_rows`, and over which
            devices to run (`workers=3`, `local_workers=(...)`); without any it runs in this process.

    Raises:
        CoterieError: Model, data or options are not usable, or a worker was lost.
    """
    recipe = forward_recipe(model, data, options)
    return run_evaluation(recipe, data, split, observer or QuietObserver())


def predict(
    model: str | Path,
    data: DataSource | Texts,
    *,
    split: str = "test",
    observer: RunObserver | None = None,
    **options: object,
) -> tuple[Example, ...]:
    """A trained model's answers, a row each (for token classification: `row.words`, `row.tags`).

    Args:
        model: As for `evaluate`.
        data: A data file or folder, rows in memory, or sentences as plain text, or pairs of them.
        split: As for `evaluate`.
        observer: Told what happens; nobody by default.
        options: As for `evaluate`.

    Raises:
        CoterieError: Model, data or options are not usable, or a worker was lost.
    """
    recipe = forward_recipe(model, data, options)
    return run_prediction(recipe, data, split, observer or QuietObserver()).rows


def generate(
    model: str | Path,
    data: DataSource | Texts,
    *,
    split: str = "test",
    observer: RunObserver | None = None,
    **options: object,
) -> tuple[str, ...]:
    """The text that a causal model writes for each row, and nothing else of the row.

    Args:
        model: As for `evaluate`.
        data: As for `predict`.
        split: As for `evaluate`.
        observer: Told what happens; nobody by default.
        options: As for `evaluate`, and how to write: `max_new_tokens`, `temperature` (0: the likeliest token), `top_p`,
            `seed`.

    Raises:
        UsageError: The model's task is none in which text is written.
        CoterieError: Model, data or options are not usable, or a worker was lost.
    """
    recipe = forward_recipe(model, data, options)
    found = run_prediction(recipe, data, split, observer or QuietObserver())
    if found.texts is None:
        raise UsageError(
            f"{found.task.name} models write no text", hint="use predict, or name a task such as causal-lm"
        )
    return found.texts


def run_evaluation(recipe: Recipe, data: DataSource, split: str, observer: RunObserver) -> Evaluation:
    """`evaluate` with a recipe made by `forward_recipe`."""
    job = prepare_forward_job(recipe, data, split=split, tagged=True, tell=observer.notice)
    predicted = _predict(job, split, observer)
    record = score(job, split, predicted.rows, predicted.loss_sum)
    if job.prompts is not None:
        record = with_answers(record, job, predicted.generated)
    return Evaluation(
        record=msgspec.structs.replace(record, seconds=predicted.seconds),
        rows=len(predicted.rows),
        plan=predicted.plan,
    )


def run_prediction(recipe: Recipe, data: DataSource | Texts, split: str, observer: RunObserver) -> Prediction:
    """`predict` with a recipe made by `forward_recipe`."""
    job = prepare_forward_job(recipe, _rows_of(data, recipe), split=split, tagged=False, tell=observer.notice)
    predicted = _predict(job, split, observer)
    is_written = job.prompts is not None
    return Prediction(
        rows=answers(job, predicted.generated) if is_written else _decoded(job, split, predicted),
        task=job.task,
        seconds=predicted.seconds,
        plan=predicted.plan,
        texts=generated_texts(job, predicted.generated) if is_written else None,
    )


def _decoded(job: Job, split: str, predicted: Predicted) -> tuple[Example, ...]:
    pairs = zip(job.splits[split].examples, job.splits[split].rows, strict=True)
    return tuple(
        job.task.decode(example, encoded, predicted.rows[index]) for index, (example, encoded) in enumerate(pairs)
    )


def _rows_of(data: DataSource | Texts, recipe: Recipe) -> DataSource:
    """Bare texts become rows like those that the model learnt: of words for tags, else of the text as it is.

    Raises:
        UsageError: Pairs of texts, for a task that has none.
    """
    if isinstance(data, str | Path | Mapping) or not len(data) or not isinstance(data[0], str | tuple):
        return cast("DataSource", data)
    if isinstance(data[0], tuple):
        return [dict(zip(_pair_columns(recipe), pair, strict=True)) for pair in cast("Sequence[tuple[str, str]]", data)]
    if recipe.data.task == "token-classification":
        return [{"tokens": split_words(str(text))} for text in data]
    record = read_record(Path(recipe.model.name))
    learnt = record.text_field if record is not None and record.task == recipe.data.task else ""
    named = recipe.data.text_column
    asked = "instruction" if recipe.data.prompt and recipe.data.task == "causal-lm" else TEXT_FIELD
    column = named if isinstance(named, str) else learnt or asked
    return [{column: str(text)} for text in data]


def _pair_columns(recipe: Recipe) -> tuple[str, str]:
    """Of pairs of texts, or of instructions with what they are about: the columns that the task reads."""
    data = recipe.data
    usual = {"causal-lm": ("instruction", "input")}.get(data.task, ("text", "text_pair"))
    if data.task not in TASKS_WITH["pair_column"]:
        raise UsageError(f"{data.task} models take single texts, not pairs", hint="give the texts one by one")
    first, second = data.text_column, data.pair_column
    if first is None and second is None:
        return usual
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    raise UsageError(
        "texts of a pair stand in no columns of a file", hint="leave text_column and pair_column out, or name both"
    )


def _predict(job: Job, split: str, observer: RunObserver) -> Predicted:
    """In this process, or over workers if the recipe names any."""
    for note in job.notes:
        observer.notice(note)
    cluster = job.recipe.cluster
    if not cluster.has_workers:
        return predict_here(job, split, observer)
    with LocalFront(cluster, observer) as front:
        run = ForwardRun(job, split, front)
        front.end_with = run.session.end_with
        front.own_link = run.session.own_link
        return asyncio.run(run.execute())
