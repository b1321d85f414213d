"""A job in which nothing is trained: a finished model, and one split of data to predict or evaluate."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from coterie.checkpoint.export_record import read_record
from coterie.config.recipe import Recipe
from coterie.coordinator.answering import make_prompts
from coterie.coordinator.job import Job, encode_splits, short_name
from coterie.coordinator.preflight import read_options
from coterie.coordinator.prompt_groups import Prompts
from coterie.errors import DataError, UsageError
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.cached import cached_model_profile
from coterie.measure.kept_tokens import with_kept_tokens
from coterie.models import ModelSource, describe, make_forward_spec
from coterie.models.generation import check_writes_text
from coterie.models.trained import TrainedModel, open_trained
from coterie.profiles.cache import ProfileCache
from coterie.profiles.model_profile import ModelProfile
from coterie.tasks.catalog import get_task
from coterie.tasks.data_summary import EncodedSplit
from coterie.tasks.examples import IntArray, are_pairs
from coterie.tasks.pad_token import LABELLING_CLASS, agree_on_pad
from coterie.tasks.readers.options import DataSource
from coterie.tasks.task import DataFiles, GenerativeTask, Split, labels_of_config
from coterie.tasks.tokenizer import load_tokenizer
from coterie.units import counted


def prepare_forward_job(
    recipe: Recipe, data: DataSource, *, split: str, tagged: bool, tell: Callable[[str], None]
) -> Job:
    """Open a trained model and encode one split; `tell` is told what is done, a line each.

    Args:
        recipe: Of it count: model, data format, `train.batch_rows`, generate, plan and cluster.
        data: File, folder or rows.
        split: Which split to take where the source holds several; the job's one split.
        tagged: The data hold the right answers.
        tell: Takes lines for the user.

    Raises:
        CoterieError: Data or model are not usable; nothing has been started.
    """
    trained = _open(recipe)
    source = trained.source
    known = get_task(recipe.data.task, labels=labels_of_config(source.config.id2label or {}))
    files = DataFiles(options=read_options(recipe.data, tagged=tagged), prompt=recipe.data.prompt)
    read = known.prepare(msgspec.structs.replace(files, **{split: data}))
    task = read.task
    _check_pairs(recipe, read.splits[split])
    tokenizer = load_tokenizer(trained.tokenizer_folder)
    overrides: dict[str, object] = {}
    if task.auto_class == LABELLING_CLASS:
        overrides = agree_on_pad(tokenizer, getattr(source.config, "pad_token_id", None))
    spec = make_forward_spec(
        source,
        auto_class=task.auto_class,
        config_overrides=overrides,
        compute_dtype=recipe.model.compute_dtype,
        frozen_dtype=recipe.model.frozen_dtype,
    )
    anatomy = describe(spec)
    weights = trained.weights(spec)
    encoded = encode_splits(recipe, task, {split: read.splits[split]}, tokenizer, anatomy)
    tell(f"model {short_name(source.name)}: {anatomy.unit_count - 2} blocks")
    prompts = None
    if isinstance(task, GenerativeTask) and _is_generated(recipe, task, tagged=tagged):
        prompts = make_prompts(recipe, task, read.splits[split], tokenizer, anatomy=anatomy, source=source)
        check_writes_text(spec, in_parts=recipe.cluster.has_workers)
    profile = _profile(spec, encoded[split].lengths if tagged or prompts is None else prompts.lengths, source)
    if prompts is not None:
        profile = with_kept_tokens(profile, spec, tokens=prompts.longest + prompts.spec.max_new_tokens)
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
        notes=(*tokenizer.notes, *read.splits[split].notes, *_cut_notes(encoded[split], prompts, recipe)),
        forward_only=True,
        prompts=prompts,
        side=trained.side,
        wants_logits=tagged or prompts is None,
    )


def _open(recipe: Recipe) -> TrainedModel:
    trained = open_trained(recipe.model.name)
    if trained.side is not None and recipe.cluster.has_workers:
        raise UsageError(
            f"{recipe.model.name} is a side network on its backbone, which predicts on one device only",
            hint="leave --workers and --local-worker out",
        )
    return trained


def _check_pairs(recipe: Recipe, split: Split) -> None:
    """Single texts mean nothing to a model that learnt pairs, and the other way round, though it would answer.

    Raises:
        DataError: The rows are not of the kind that it learnt.
    """
    record = read_record(Path(recipe.model.name))
    pairs = are_pairs(split.examples)
    if record is None or record.task != recipe.data.task or None in {record.pairs, pairs} or record.pairs == pairs:
        return
    if record.pairs:
        raise DataError(
            f"{split.source}: the rows have one text each, and {recipe.model.name} learnt from pairs of texts",
            hint="name the column of the second text by --pair-column, or give it after --text by --pair",
        )
    raise DataError(
        f"{split.source}: the rows are pairs of texts, and {recipe.model.name} learnt from single texts",
        hint="name the text's column alone by --text-column",
    )


def _cut_notes(encoded: EncodedSplit, prompts: Prompts | None, recipe: Recipe) -> tuple[str, ...]:
    """What is said of rows that do not fit: the limit may be one that the model brings from its training."""
    limit = encoded.summary.max_tokens
    cut = encoded.summary.truncated_rows
    if prompts is not None and prompts.longest == recipe.data.max_tokens:
        return (f"prompts of more than {prompts.longest} tokens are cut (max_tokens)",)
    return (f"{counted(cut, 'row')} of more than {limit} tokens: what exceeds them is cut",) if cut else ()


def _is_generated(recipe: Recipe, task: GenerativeTask, *, tagged: bool) -> bool:
    """Predictions of a generative task are always generated; an evaluation may do with the loss."""
    wish = recipe.generate.when_evaluating
    return not tagged or wish == "on" or (wish == "auto" and task.name == "summarization")


def _profile(spec: ModelSpec, lengths: IntArray, source: ModelSource) -> ModelProfile:
    return cached_model_profile(
        spec,
        memory_tokens=int(lengths.max()),
        typical_tokens=round(float(lengths.mean())),
        name=short_name(source.name),
        cache=ProfileCache(),
    )
