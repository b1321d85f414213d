"""Everything of a run that is settled before any worker joins: data encoded, model described, terms fixed."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from coterie.config.recipe import Recipe
from coterie.coordinator.preflight import read_options
from coterie.coordinator.prompt_groups import Prompts
from coterie.coordinator.side_spec import backbone_spec, side_model_spec
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.cached import cached_model_profile
from coterie.models import Anatomy, FolderWeights, ModelSource, WeightStore, describe, make_model_spec, open_model
from coterie.models.digest import weights_digest
from coterie.models.packing import check_packing
from coterie.profiles.cache import ProfileCache
from coterie.profiles.model_profile import ModelProfile
from coterie.tasks.batches import BatchSettings, batch_shapes, steps_per_epoch
from coterie.tasks.catalog import get_task
from coterie.tasks.data_summary import EncodedSplit, encode_split
from coterie.tasks.examples import EncodedExample, are_pairs
from coterie.tasks.language_rows import field_of_bare_texts
from coterie.tasks.pad_token import LABELLING_CLASS, agree_on_pad
from coterie.tasks.task import DataFiles, ReshapingTask, Split, Task
from coterie.tasks.tokenizer import LoadedTokenizer, check_vocabulary, context_limit, load_tokenizer

LIKELY_MICRO_BATCHES = 4
"""Assumed where the planner is still to choose: only the mean padded length depends on it, by a few percent."""


class Job(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run as data and objects, ready to be planned and trained.

    Attributes:
        run: Name of the run; of the checkpoint's run when it is resumed.
        splits: `train`, and `dev` and `test` where they were given.
        model_profile: Counted at the longest and the mean padded length of this run's micro-batches.
        data_digest, base_digest: What `coterie.checkpoint.resume` compares.
        notes: What the user should know of tokenizer and model; what concerns the data was told with their figures.
        text_field, pairs: See `Manifest`; of the rows as they were read, since packed ones are no rows of the data.
        forward_only: Nothing is trained: a split is only predicted or evaluated.
        prompts: Of a forward-only job whose answers are generated: what to continue, a prompt for each row.
        side: Of a forward-only job: the exported folder whose side network works beside the model, if there is one.
        wants_logits: A forward-only job runs its rows through the model as they are; off where they are only continued.
    """

    recipe: Recipe
    run: RunId
    source: ModelSource
    spec: ModelSpec
    anatomy: Anatomy
    weights: WeightStore
    tokenizer: LoadedTokenizer
    task: Task
    splits: dict[str, EncodedSplit]
    optimizer: OptimizerSpec
    model_profile: ModelProfile
    data_digest: str
    base_digest: str
    notes: tuple[str, ...]
    text_field: str = ""
    pairs: bool | None = None
    forward_only: bool = False
    prompts: Prompts | None = None
    side: Path | None = None
    wants_logits: bool = True

    @property
    def training_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.splits["train"].rows)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return steps_per_epoch(self.training_rows, self.recipe.train.batch_rows)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.steps_per_epoch * self.recipe.train.epochs
        return min(steps, self.recipe.train.max_steps or steps)

    def batch_settings(self, micro_batches: int) -> BatchSettings:
        """How rows become micro-batches."""
        return _batch_settings(self.recipe, micro_batches)


def prepare_job(recipe: Recipe, run: RunId, tell: Callable[[str], None]) -> Job:
    """Read data and model as the recipe says; `tell` is told what is done, a line each.

    Raises:
        CoterieError: Data, model or recipe are not usable; nothing has been started.
    """
    source = open_model(recipe.model.name)
    task, splits, overrides = _read_data(recipe)
    tokenizer = load_tokenizer(source.path)
    if task.auto_class == LABELLING_CLASS:
        overrides = overrides | agree_on_pad(tokenizer, getattr(source.config, "pad_token_id", None))
    is_side = recipe.train.mode == "side"
    spec = side_model_spec(recipe, source, task, overrides) if is_side else _spec(recipe, source, task, overrides)
    anatomy = describe(spec)
    if recipe.data.packing:
        check_packing(spec)
    encoded = encode_splits(recipe, task, splits, tokenizer, anatomy)
    tell(f"model {short_name(source.name)}: {anatomy.unit_count - 2} blocks, {_parameter_count(anatomy)}")
    for split in encoded.values():
        tell(split.summary.describe())
    weights = FolderWeights(source, spec)
    weights.check_classifier()
    new_layers = tuple(f"{name} is new and starts from seed {spec.seed}" for name in weights.new_layers)
    return Job(
        recipe=recipe,
        run=run,
        source=source,
        spec=spec,
        anatomy=anatomy,
        weights=weights,
        tokenizer=tokenizer,
        task=task,
        splits=encoded,
        optimizer=_optimizer(recipe, len(encoded["train"].rows)),
        model_profile=_profile(
            recipe, backbone_spec(spec) if is_side else spec, encoded["train"], short_name(source.name)
        ),
        data_digest=rows_digest(encoded["train"].rows),
        base_digest=weights_digest(source),
        notes=(*tokenizer.notes, *new_layers),
        text_field=field_of_bare_texts(splits["train"].examples),
        pairs=are_pairs(splits["train"].examples),
    )


def short_name(name: str) -> str:
    """A model's name for tables: the end of a long path, which is what tells models apart."""
    parts = Path(name).parts
    return name if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"


def _read_data(recipe: Recipe) -> tuple[Task, dict[str, Split], dict[str, object]]:
    data = recipe.data
    files = DataFiles(
        train=data.train,
        dev=data.dev,
        test=data.test,
        options=read_options(data),
        prompt=data.prompt,
        packing=data.packing,
    )
    read = get_task(data.task).prepare(files)
    return read.task, read.splits, read.config_overrides


def encode_splits(
    recipe: Recipe, task: Task, splits: Mapping[str, Split], tokenizer: LoadedTokenizer, anatomy: Anatomy
) -> dict[str, EncodedSplit]:
    """All splits as tokens, rows cut to what the model and the recipe allow.

    Raises:
        ModelError: The tokenizer belongs to another model.
        DataError: A split has no row that can be used.
    """
    limit = context_limit(tokenizer, model_positions=anatomy.context_length, requested=recipe.data.max_tokens)
    if recipe.data.max_tokens is None and isinstance(task, ReshapingTask):
        limit = min(limit, task.usual_tokens)
    encoded = {
        name: encode_split(task, split, tokenizer, limit, for_training=name == "train")
        for name, split in splits.items()
    }
    ids = [row.input_ids for split in encoded.values() for row in split.rows]
    check_vocabulary(tokenizer, ids, vocabulary_size(anatomy))
    return encoded


def vocabulary_size(anatomy: Anatomy) -> int:
    """How many tokens a model's embedding knows."""
    return max(anatomy.shapes[name][0] for name, unit in anatomy.unit_of.items() if unit == 0)


def _spec(recipe: Recipe, source: ModelSource, task: Task, overrides: Mapping[str, object]) -> ModelSpec:
    return make_model_spec(
        source,
        auto_class=task.auto_class,
        config_overrides=overrides,
        seed=recipe.train.seed,
        method=recipe.train.method,
        lora=_lora(recipe),
        frozen_patterns=recipe.train.freeze,
        trainable_patterns=recipe.train.trainable,
        compute_dtype=recipe.model.compute_dtype,
        frozen_dtype=recipe.model.frozen_dtype,
    )


def _lora(recipe: Recipe) -> LoraSpec | None:
    train = recipe.train
    if train.method != "lora":
        return None
    return LoraSpec(
        variant=train.lora_variant,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        dropout=train.lora_dropout,
        target_modules=train.lora_targets,
    )


def _batch_settings(recipe: Recipe, micro_batches: int) -> BatchSettings:
    return BatchSettings(
        batch_rows=recipe.train.batch_rows,
        micro_batches=micro_batches,
        epochs=recipe.train.epochs,
        seed=recipe.train.seed,
        group_by_length=recipe.train.group_by_length,
    )


def _optimizer(recipe: Recipe, rows: int) -> OptimizerSpec:
    train = recipe.train
    total = rows * train.epochs
    if train.max_steps is not None:
        total = min(total, train.max_steps * train.batch_rows)
    warmup = train.warmup_ratio * total if train.warmup_steps is None else train.warmup_steps * train.batch_rows
    return OptimizerSpec(
        name=train.optimizer,
        learning_rate=train.highest_learning_rate,
        weight_decay=train.weight_decay,
        momentum=train.momentum,
        max_grad_norm=train.max_grad_norm,
        lr_schedule=train.lr_schedule,
        warmup_samples=round(warmup),
        total_samples=total,
    )


def _profile(recipe: Recipe, spec: ModelSpec, train: EncodedSplit, name: str) -> ModelProfile:
    shapes = batch_shapes(train.lengths, _batch_settings(recipe, recipe.train.micro_batches or LIKELY_MICRO_BATCHES))
    return cached_model_profile(
        spec,
        memory_tokens=shapes.memory_tokens,
        typical_tokens=shapes.typical_tokens,
        name=name,
        cache=ProfileCache(),
    )


def _parameter_count(anatomy: Anatomy) -> str:
    total = sum(int(np.prod(shape)) for shape in anatomy.shapes.values())
    trained = sum(int(np.prod(anatomy.shapes[name])) for names in anatomy.trainable for name in names)
    return f"{total / 1e6:.1f} M parameters, {trained / 1e6:.2f} M of them trained"


def rows_digest(rows: Sequence[EncodedExample]) -> str:
    """Tells one set of encoded rows from another."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.input_ids).to_bytes(8, "little"))
        digest.update(row.input_ids.tobytes())
        digest.update(row.labels.tobytes())
        if row.position_ids is not None:
            digest.update(row.position_ids.tobytes())
    return digest.hexdigest()
