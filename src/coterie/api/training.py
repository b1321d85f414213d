"""Fine-tuning from Python: `finetune(...)` in a line, or `train(recipe, observer)` with everything in hand."""

import asyncio
import contextlib
import datetime as dt
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from coterie.api.quiet import QuietObserver
from coterie.api.run_lock import hold_door, hold_folder
from coterie.api.side_training import export_trained, prepare_side, refuse_finished_side, run_side
from coterie.checkpoint.export import ExportOptions, check_out_folder, export_model
from coterie.checkpoint.model_card import CardFacts
from coterie.checkpoint.names import checkpoint_folder, replica_folder
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.config.loading import load_recipe
from coterie.config.recipe import Recipe
from coterie.config.writing import recipe_to_toml
from coterie.coordinator.bookkeeping import summary_json
from coterie.coordinator.desk import RunDesk
from coterie.coordinator.job import Job, prepare_job, short_name
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.preflight import cannot_write, check_run_folder
from coterie.coordinator.run import RunOutcome, TrainingRun
from coterie.coordinator.run_folder import EVENTS, MODEL, PLOT, RECIPE, SUMMARY
from coterie.coordinator.saving import check_resumable
from coterie.errors import CheckpointError
from coterie.ids import RunId
from coterie.local import LocalFront
from coterie.metrics.events import EventLog, read_events, set_aside
from coterie.metrics.plot import plot_run
from coterie.metrics.records import EvaluationRecord, SummaryRecord
from coterie.metrics.sinks import Fanout, Sink, TensorBoardSink
from coterie.planner.plan import Plan


class FinetuneResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a finished run left.

    Attributes:
        model_folder: A plain Hugging Face folder, or a PEFT adapter folder under LoRA.
        run_folder: Recipe, events, plot, checkpoints and the summary.
        plan: Of the devices; None of a resumed side-tuning run that needed none.
        losses: Mean loss of each optimizer step of this run (since the resume, if it was one).
        quality: The last evaluation of each split.
    """

    model_folder: Path
    run_folder: Path
    plan: Plan | None
    summary: SummaryRecord
    losses: tuple[float, ...]
    quality: tuple[EvaluationRecord, ...]


def finetune(
    model: str | Path, train_data: str | Path, *, observer: RunObserver | None = None, **options: object
) -> FinetuneResult:
    """Fine-tune a model on this machine and on every worker that joins.

    Args:
        model: A Hugging Face model folder or hub name.
        train_data: A data file or folder (see docs/reference/recipe.md, `[data]`).
        observer: Told what happens; nobody by default.
        options: Any field of the recipe by its name, such as `epochs=3`, `method="lora"`, `local_workers=(...)`.

    Raises:
        RecipeError: An option is wrong; all of them are named.
        CoterieError: The run ended early; checkpoints stay in the run folder.
    """
    recipe = load_recipe(None, {"model.name": str(model), "data.train": str(train_data), **options})
    return train(recipe, observer or QuietObserver())


def train(recipe: Recipe, observer: RunObserver) -> FinetuneResult:
    """Run a recipe from data to saved model. Blocks; takes Ctrl-C as a request to stop with a checkpoint.

    Raises:
        CoterieError: The run ended early; checkpoints stay in the run folder.
    """
    with hold_folder(Path(recipe.run.output)), hold_door(recipe.cluster):
        return _train_side(recipe, observer) if recipe.train.mode == "side" else _train(recipe, observer)


def _train(recipe: Recipe, observer: RunObserver) -> FinetuneResult:
    folder = Path(recipe.run.output)
    checkpoint = _checkpoint_to_resume(recipe, folder, observer.notice)
    run_id = checkpoint.manifest.terms.run_id if checkpoint else _new_run_id()
    job = prepare_job(recipe, run_id, observer.notice)
    for note in (*job.notes, *(check_resumable(job, checkpoint) if checkpoint else ())):
        observer.notice(note)
    if checkpoint is not None:
        _refuse_finished(job, checkpoint, folder)
    check_out_folder(folder / MODEL, job.source)
    _write(folder / RECIPE, recipe_to_toml(recipe).encode())
    if checkpoint is None:
        set_aside(folder / EVENTS)  # of an attempt that left no checkpoint: no part of the run that begins now
    store = CheckpointStore(
        checkpoint_folder(recipe.run.output), run_id=run_id, keep=max(recipe.run.keep_checkpoints, 2)
    )
    with contextlib.closing(Fanout(_sinks(recipe, folder))) as sinks:
        outcome = _execute(job, observer, sinks, store, checkpoint)
    return _finish(job, outcome, folder, observer)


def _train_side(recipe: Recipe, observer: RunObserver) -> FinetuneResult:
    folder = Path(recipe.run.output)
    check_run_folder(recipe)
    job, record = prepare_side(recipe, _new_run_id(), observer)
    for note in job.notes:
        observer.notice(note)
    refuse_finished_side(job, record, folder / SUMMARY, folder / MODEL)
    _write(folder / RECIPE, recipe_to_toml(recipe).encode())
    if record is None:
        set_aside(folder / EVENTS)
    outcome = run_side(job, record, observer, _sinks(recipe, folder))
    if outcome.parameters:
        observer.notice(f"saving the side network to {folder / MODEL}")
        export_trained(job, outcome, folder / MODEL)
        _write(folder / SUMMARY, summary_json(outcome.summary))
        plot_run(read_events(folder / EVENTS), folder / PLOT, title=f"{short_name(job.source.name)}, side network")
    return FinetuneResult(
        model_folder=folder / MODEL,
        run_folder=folder,
        plan=outcome.plan,
        summary=outcome.summary,
        losses=outcome.losses,
        quality=outcome.summary.quality,
    )


def _execute(
    job: Job, observer: RunObserver, sinks: Sink, store: CheckpointStore, checkpoint: Checkpoint | None
) -> RunOutcome:
    folder = Path(job.recipe.run.output)
    desk = RunDesk(job.run, folder)
    with LocalFront(job.recipe.cluster, desk.watching(observer), sinks=sinks, log_folder=folder / "workers") as front:
        run = TrainingRun(job, front, store)
        run.session.open_desk(desk)
        front.end_with = run.session.end_with
        front.worker_ended = run.session.worker_ended
        front.own_link = run.session.own_link
        return asyncio.run(run.execute(checkpoint))


def _finish(job: Job, outcome: RunOutcome, folder: Path, observer: RunObserver) -> FinetuneResult:
    model_folder = folder / MODEL
    observer.notice(f"saving the model to {model_folder}")
    options = ExportOptions(facts=_card_facts(job, outcome.summary))
    export_model(job.source, outcome.checkpoint, job.tokenizer.hf, model_folder, options)
    _write(folder / SUMMARY, summary_json(outcome.summary))
    plot_run(
        read_events(folder / EVENTS), folder / PLOT, title=f"{short_name(job.source.name)}, {job.recipe.train.method}"
    )
    return FinetuneResult(
        model_folder=model_folder,
        run_folder=folder,
        plan=outcome.plan,
        summary=outcome.summary,
        losses=outcome.losses,
        quality=outcome.summary.quality,
    )


def _card_facts(job: Job, summary: SummaryRecord) -> CardFacts:
    """For the model card, which may be published: the data by name, not by their place on this machine."""
    return CardFacts(
        data=f"{Path(job.recipe.data.train).name}, {job.training_rows} rows",
        task=job.task.name,
        metrics={f"{record.split} {record.main_metric}": record.main_value for record in summary.quality},
    )


def _refuse_finished(job: Job, checkpoint: Checkpoint, folder: Path) -> None:
    """A resumed run that has nothing left to do says so; one that was stopped while it saved its model may go on."""
    if checkpoint.step >= job.total_steps and (folder / SUMMARY).exists():
        raise CheckpointError(
            f"the run in {folder} is finished: {checkpoint.step} of {job.total_steps} steps are done, "
            f"and its model is in {folder / MODEL}",
            hint="to train on, start a new run from that model in another folder",
        )


def _checkpoint_to_resume(recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """What a resumed run goes on from: its newest checkpoint, or a replica that is newer, as a killed run leaves one.

    A fresh run must not fall into an old one's folder.
    """
    check_run_folder(recipe)
    if not recipe.run.resume:
        return None
    replica = _newest_replica(folder, tell)
    try:
        checkpoint = CheckpointStore(checkpoint_folder(folder)).latest()
    except CheckpointError:
        if replica is None:
            raise
        checkpoint = None
    found = [state for state in (checkpoint, replica) if state is not None]
    return max(found, key=lambda state: state.step, default=None)


def _newest_replica(folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    try:
        return CheckpointStore(replica_folder(folder)).latest()
    except CheckpointError as error:
        tell(f"replicas of the trained state are of no use: {error.message}")
        return None


def _sinks(recipe: Recipe, folder: Path) -> list[Sink]:
    sinks: list[Sink] = [EventLog(folder / EVENTS)]
    if recipe.run.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard"))
    return sinks


def _new_run_id() -> RunId:
    return RunId(f"{dt.datetime.now(tz=dt.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise cannot_write(path, error) from error
