"""A job in which nothing is trained: a finished model, and one split of data to predict or evaluate."""

from collections.abc import Callable

from coterie.config.recipe import Recipe
from coterie.coordinator.job import Job, encode_splits, short_name
from coterie.coordinator.preflight import read_options
from coterie.ids import RunId
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.cached import cached_model_profile
from coterie.models import describe, make_forward_spec
from coterie.models.trained import open_trained
from coterie.profiles.cache import ProfileCache
from coterie.tasks.catalog import get_task
from coterie.tasks.readers.options import DataSource
from coterie.tasks.task import DataFiles, labels_of_config
from coterie.tasks.tokenizer import load_tokenizer


def prepare_forward_job(
    recipe: Recipe, data: DataSource, *, split: str, tagged: bool, tell: Callable[[str], None]
) -> Job:
    """Open a trained model and encode one split; `tell` is told what is done, a line each.

    Args:
        recipe: Of it count: model, data format, `train.batch_rows`, plan and cluster.
        data: File, folder or rows.
        split: Which split to take where the source holds several; the job's one split.
        tagged: The data hold the right answers.
        tell: Takes lines for the user.

    Raises:
        CoterieError: Data or model are not usable; nothing has been started.
    """
    trained = open_trained(recipe.model.name)
    source = trained.source
    known = get_task(recipe.data.task, labels=labels_of_config(source.config.id2label or {}))
    read = known.prepare(DataFiles(**{split: data}, options=read_options(recipe.data, tagged=tagged)))
    task = read.task
    spec = make_forward_spec(source, auto_class=task.auto_class, compute_dtype=recipe.model.compute_dtype)
    anatomy = describe(spec)
    weights = trained.weights(spec)
    tokenizer = load_tokenizer(trained.tokenizer_folder)
    encoded = encode_splits(recipe, task, {split: read.splits[split]}, tokenizer, anatomy)
    tell(f"model {short_name(source.name)}: {anatomy.unit_count - 2} blocks")
    lengths = encoded[split].lengths
    profile = cached_model_profile(
        spec,
        memory_tokens=int(lengths.max()),
        typical_tokens=round(float(lengths.mean())),
        name=short_name(source.name),
        cache=ProfileCache(),
    )
    return Job(
        recipe=recipe,
        run=RunId("forward"),
        source=source,
        spec=spec,
        anatomy=anatomy,
        weights=weights,
        tokenizer=tokenizer,
        task=task,
        splits=encoded,
        optimizer=OptimizerSpec(),
        model_profile=profile,
        data_digest="",
        base_digest="",
        notes=(*tokenizer.notes, *read.splits[split].notes),
        forward_only=True,
    )
