"""Side-tuning from a recipe to the exported folder: what `train` does when `mode = "side"`."""

import asyncio
import contextlib
from pathlib import Path

import msgspec

from coterie import __version__
from coterie.checkpoint.export import check_out_folder
from coterie.checkpoint.export_record import ExportRecord
from coterie.config.recipe import LocalWorker, Recipe
from coterie.coordinator.desk import RunDesk
from coterie.coordinator.job import Job, prepare_job
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.side_assignment import side_terms
from coterie.coordinator.side_record import SideRunRecord, check_same_terms, read_side_run
from coterie.coordinator.side_run import SideOutcome, SideRun
from coterie.errors import CheckpointError, RecipeError
from coterie.ids import RunId
from coterie.local import LocalFront
from coterie.metrics.sinks import Fanout, Sink
from coterie.sidetuning.export import SideExportOptions, export_side, trained_side
from coterie.sidetuning.readout import reads_of

CACHE_FOLDER = "side-cache"


def with_side_workers(recipe: Recipe, record: SideRunRecord | None) -> Recipe:
    """The recipe with a device and a server on this machine if it names no workers; alone with the server if it is."""
    cluster = recipe.cluster
    if record is not None and record.is_alone:
        host = cluster.host or cluster.listen_host
        cluster = msgspec.structs.replace(cluster, workers=1, local_workers=(), host=host)
    elif not cluster.has_workers:
        cluster = msgspec.structs.replace(
            cluster, local_workers=(LocalWorker(name="device"), LocalWorker(name="server", role="server"))
        )
    return msgspec.structs.replace(recipe, cluster=cluster)


def prepare_side(recipe: Recipe, run: RunId, observer: RunObserver) -> tuple[Job, SideRunRecord | None]:
    """The job, and what was written down of the run if it is resumed.

    Raises:
        CheckpointError: There is nothing to resume, or the settings are others.
        UnsupportedModelError: The output layer reads several tokens of a row at once.
        CoterieError: Data, model or recipe are not usable.
    """
    record = read_side_run(Path(recipe.run.output)) if recipe.run.resume else None
    job = prepare_job(with_side_workers(recipe, record), record.run if record else run, observer.notice)
    if record is not None:
        check_same_terms(record, side_terms(job))
    layers = job.anatomy.unit_count - 2
    observer.notice(
        f"side network: rank {recipe.side.rank}, layers {recipe.side.first_layer} to {layers}, learning rate "
        f"{job.optimizer.learning_rate:g}"
    )
    if recipe.side.first_layer > layers:
        raise RecipeError(
            f"side.first_layer is {recipe.side.first_layer}, and the model has the layers 1 to {layers}",
            hint=f"choose one of 1 to {layers}",
        )
    reads_of(job.spec)  # refuses a model whose output layer reads several tokens, before anybody joins
    return job, record


def run_side(job: Job, record: SideRunRecord | None, observer: RunObserver, sinks: list[Sink]) -> SideOutcome:
    """Run it over whoever joins.

    Raises:
        CoterieError: What ended the run; what the server has stays.
    """
    folder = Path(job.recipe.run.output)
    kept = Path(job.recipe.side.cache_folder or folder / CACHE_FOLDER)
    desk = RunDesk(job.run, folder)
    with (
        contextlib.closing(Fanout(sinks)) as written,
        LocalFront(
            job.recipe.cluster,
            desk.watching(observer),
            sinks=written,
            log_folder=folder / "workers",
            cache_folder=kept,
        ) as front,
    ):
        run = SideRun(job, front, record=record)
        run.session.pausing.refuse("the server of a side-tuning run trains by itself")
        run.session.open_desk(desk)
        front.end_with = run.end_with
        front.own_link = run.session.own_link
        return asyncio.run(run.execute())


def export_trained(job: Job, outcome: SideOutcome, folder: Path) -> Path:
    """Write what was trained as a folder for plain transformers."""
    trained = trained_side(job.recipe.side.spec, outcome.parameters, job.weights)
    record = ExportRecord(
        coterie=__version__,
        run_id=job.run,
        step=job.total_steps,
        files=(),
        task=job.task.name,
        prompt=job.recipe.data.prompt or "",
        text_field=job.text_field,
        max_tokens=job.recipe.data.max_tokens,
        pairs=job.pairs,
    )
    metrics = {f"{found.split} {found.main_metric}": found.main_value for found in outcome.summary.quality}
    options = SideExportOptions(metrics=metrics, copy_backbone=job.recipe.side.copy_backbone)
    return export_side(job.source, job.spec, trained, job.tokenizer.hf, folder, record=record, options=options)


def refuse_finished_side(job: Job, record: SideRunRecord | None, summary: Path, model: Path) -> None:
    """A resumed run that has nothing left to do says so; and nothing is begun that could not be written at the end.

    Raises:
        CheckpointError: The run is finished.
        StorageError: The model's folder holds something else.
    """
    if record is not None and summary.exists() and model.exists():
        raise CheckpointError(
            f"the run in {summary.parent} is finished, and its side network is in {model}",
            hint="to train on, start a new run in another folder",
        )
    check_out_folder(model, job.source)
