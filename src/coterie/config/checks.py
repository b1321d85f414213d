"""Options that exclude each other, or make no sense together: what a single value's range cannot say."""

import itertools
from collections.abc import Iterator, Mapping

from coterie.config.contradiction import Contradiction
from coterie.config.recipe import DataSection, GenerateSection, Recipe, TaskName, TrainSection
from coterie.config.side_checks import side_contradictions
from coterie.units import counted, parse_memory

TASKS_WITH: Mapping[str, tuple[TaskName, ...]] = {
    "packing": ("causal-lm",),
    "prompt": ("causal-lm", "summarization"),
    "label_names": ("token-classification", "sequence-classification"),
    "sentence_column": ("token-classification",),
    "pair_column": ("sequence-classification", "regression", "causal-lm"),
}
"""The tasks for which a field of `data` means something, where it does not for all."""

_WRITING: tuple[TaskName, ...] = ("causal-lm", "summarization")


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Everything contradictory in `recipe`. A written-out default never is: a run's own recipe has them all."""
    yield from _data(recipe.data)
    yield from _generation(recipe)
    yield from _method(recipe.train)
    yield from _batches(recipe.train)
    yield from _devices(recipe)
    yield from _local_workers(recipe)
    yield from _local_data(recipe)
    yield from _standing_link(recipe)
    yield from side_contradictions(recipe)
    if recipe.cluster.heartbeat_timeout_s <= recipe.cluster.heartbeat_s:
        yield Contradiction(
            key="cluster.heartbeat_timeout_s",
            text=f"is {recipe.cluster.heartbeat_timeout_s:g} s, not longer than heartbeat_s "
            f"({recipe.cluster.heartbeat_s:g} s): every worker would count as lost",
            others=("cluster.heartbeat_s",),
        )


def _data(data: DataSection) -> Iterator[Contradiction]:
    for key, tasks in TASKS_WITH.items():
        value = getattr(data, key)
        is_given = value is not None and value is not False and value != ()  # a column may be 0
        if is_given and data.task not in tasks:
            yield Contradiction(
                key=f"data.{key}",
                text=f'is for task = {_either(tasks)}, but the task is "{data.task}"; leave it out',
                others=("data.task",),
            )
    twice = next((name for name in data.label_names if data.label_names.count(name) > 1), None)
    if twice is not None:
        yield Contradiction(
            key="data.label_names", text=f"names {twice!r} twice: every integer needs a name of its own"
        )
    if data.prompt is None or data.task not in _WRITING:
        return
    if "{text}" not in data.prompt:
        yield Contradiction(key="data.prompt", text="has no place for the text: write {text} where it belongs")
    elif data.task == "summarization" and "{input}" in data.prompt:
        yield Contradiction(
            key="data.prompt", text="names {input}, and a text to summarize has no second column", others=("data.task",)
        )


def _generation(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.data.task in _WRITING:
        return
    for key in GenerateSection.__struct_fields__:
        if getattr(recipe.generate, key) != getattr(GenerateSection(), key):
            yield Contradiction(
                key=f"generate.{key}",
                text=f'is for task = {_either(_WRITING)}, but the task is "{recipe.data.task}"; leave it out',
                others=("data.task",),
            )


def _either(tasks: tuple[TaskName, ...]) -> str:
    return " or ".join(f'"{task}"' for task in tasks)


def _method(train: TrainSection) -> Iterator[Contradiction]:
    if train.method != "lora":
        for key in ("lora_variant", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"):
            if getattr(train, key) != getattr(TrainSection(), key):
                yield Contradiction(
                    key=f"train.{key}",
                    text=f'has no effect with method = "{train.method}"; set method = "lora" or leave it out',
                    others=("train.method",),
                )
    if train.freeze and train.method == "lora":
        yield Contradiction(
            key="train.freeze",
            text='has no effect with method = "lora", which trains adapters only; leave it out (`trainable` chooses '
            "where adapters go)",
            others=("train.method",),
        )
    if train.method == "head":
        for key in ("freeze", "trainable"):
            if getattr(train, key):
                yield Contradiction(
                    key=f"train.{key}",
                    text='has no effect with method = "head", which trains the task layers only; leave it out',
                    others=("train.method",),
                )
    elif train.freeze and train.trainable:
        yield Contradiction(
            key="train.trainable",
            text="and freeze say the same thing from two ends; give one",
            others=("train.freeze",),
        )
    if train.optimizer != "sgd" and train.momentum:
        yield Contradiction(
            key="train.momentum",
            text=f'is for optimizer = "sgd", but the optimizer is "{train.optimizer}"',
            others=("train.optimizer",),
        )


def _batches(train: TrainSection) -> Iterator[Contradiction]:
    if train.micro_batches is not None and train.micro_batches > train.batch_rows:
        yield Contradiction(
            key="train.micro_batches",
            text=f"is {train.micro_batches}, more than the {train.batch_rows} rows of a batch (batch_rows)",
            others=("train.batch_rows",),
        )
    if train.warmup_steps is not None and train.warmup_ratio:
        yield Contradiction(
            key="train.warmup_steps",
            text="and warmup_ratio exclude each other; give one",
            others=("train.warmup_ratio",),
        )


def _devices(recipe: Recipe) -> Iterator[Contradiction]:
    plan, cluster = recipe.plan, recipe.cluster
    if plan.max_workers is not None and plan.max_workers < plan.min_workers:
        yield Contradiction(
            key="plan.max_workers",
            text=f"is {plan.max_workers}, less than min_workers ({plan.min_workers})",
            others=("plan.min_workers",),
        )
    if cluster.workers is not None and cluster.workers < len(cluster.local_workers):
        yield Contradiction(
            key="cluster.workers",
            text=f"is {cluster.workers}, but {len(cluster.local_workers)} local workers are given",
            others=("cluster.local_workers",),
        )
    if cluster.token_uses is not None and cluster.token_uses < cluster.workers_expected:
        yield Contradiction(
            key="cluster.token_uses",
            text=f"is {cluster.token_uses}, but the run waits for {counted(cluster.workers_expected, 'worker')}, "
            "each of which takes a use",
            others=("cluster.workers", "cluster.local_workers"),
        )
    if plan.min_workers > cluster.workers_expected:
        yield Contradiction(
            key="plan.min_workers",
            text=f"is {plan.min_workers}, but the run starts with {counted(cluster.workers_expected, 'worker')} "
            f"(cluster.workers): let more join, or add --min-workers {cluster.workers_expected}",
            others=("cluster.workers", "cluster.local_workers"),
        )
    if plan.cuts is not None:
        yield from _cuts(recipe, plan.cuts)


def _cuts(recipe: Recipe, cuts: tuple[int, ...]) -> Iterator[Contradiction]:
    if any(left >= right for left, right in itertools.pairwise(cuts)):
        yield Contradiction(key="plan.cuts", text=f"is {list(cuts)}: units must rise from cut to cut")
    stages = len(cuts) + 1
    most = recipe.cluster.workers_expected
    if recipe.plan.max_workers is not None:
        most = min(most, recipe.plan.max_workers)
    if stages > most:
        yield Contradiction(
            key="plan.cuts",
            text=f"makes {stages} stages, but only {counted(most, 'worker')} may be used",
            others=("plan.max_workers", "cluster.workers", "cluster.local_workers"),
        )


def _local_data(recipe: Recipe) -> Iterator[Contradiction]:
    if not recipe.plan.keep_data_local:
        return
    if recipe.train.mode == "side":
        yield Contradiction(
            key="plan.keep_data_local",
            text='is not possible with mode = "side", whose server trains on labels (or what gives them away) and on '
            "activations of the tokens themselves",
            others=("train.mode",),
        )
    elif recipe.cluster.has_workers and len(recipe.cluster.local_workers) < 2:
        yield Contradiction(
            key="plan.keep_data_local",
            text=f"needs two local workers, one for the first and one for the last stage; there "
            f"{'is 1' if recipe.cluster.local_workers else 'are 0'}",
            others=("cluster.local_workers",),
        )


def _standing_link(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.cluster.standing_link and recipe.train.mode == "side":
        yield Contradiction(
            key="cluster.standing_link",
            text='has no meaning with mode = "side", which has a link of its own for each start',
            others=("train.mode",),
        )


def _local_workers(recipe: Recipe) -> Iterator[Contradiction]:
    names: set[str] = set()
    for index, worker in enumerate(recipe.cluster.local_workers):
        path = f"cluster.local_workers[{index}]"
        if worker.memory is not None:
            try:
                if parse_memory(worker.memory) == 0:
                    yield Contradiction(key=f"{path}.memory", text="is 0; leave it out for no limit")
            except ValueError as error:
                yield Contradiction(key=f"{path}.memory", text=f"is wrong: {error}")
        if worker.name is not None and worker.name in names:
            yield Contradiction(key=f"{path}.name", text=f"is {worker.name!r}, which another worker is called already")
        names.add(worker.name or "")
