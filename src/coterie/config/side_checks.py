"""What contradicts itself, or the rest of a recipe, in the settings of side-tuning."""

from collections.abc import Iterator

from coterie.config.contradiction import Contradiction
from coterie.config.recipe import ClusterSection, LocalWorker, Recipe
from coterie.config.side_section import SideSection
from coterie.units import counted, parse_bytes

_NOT_ADDITIVE = ("causal-lm", "summarization")
_MODE = ("train.mode",)


def side_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Everything contradictory about side-tuning in `recipe`."""
    if recipe.train.mode == "pipeline":
        yield from _without_side(recipe)
        return
    yield from _model_and_data(recipe)
    yield from _server(recipe.cluster, resumes=recipe.run.resume)
    yield from _cache(recipe.side, recipe.cluster)


def _without_side(recipe: Recipe) -> Iterator[Contradiction]:
    for key in SideSection.__struct_fields__:
        if getattr(recipe.side, key) != getattr(SideSection(), key):
            yield Contradiction(
                key=f"side.{key}", text='is for side-tuning: set mode = "side" or leave it out', others=_MODE
            )
    for index, worker in enumerate(recipe.cluster.local_workers):
        if worker.role == "server":
            yield Contradiction(
                key=f"cluster.local_workers[{index}].role",
                text='is "server", and only a run with mode = "side" has one',
                others=_MODE,
            )


def _model_and_data(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.train.method != "full":
        yield Contradiction(
            key="train.method",
            text=f'is "{recipe.train.method}", and with mode = "side" the network beside the model is trained; '
            "leave it out",
            others=_MODE,
        )
    for key in ("freeze", "trainable"):
        if getattr(recipe.train, key):
            yield Contradiction(key=f"train.{key}", text='has no effect with mode = "side"; leave it out', others=_MODE)
    if recipe.data.packing:
        yield Contradiction(
            key="data.packing", text='is not possible with mode = "side": each row is cached alone', others=_MODE
        )
    if recipe.model.compute_dtype != "float32":
        yield Contradiction(
            key="model.compute_dtype",
            text=f'is "{recipe.model.compute_dtype}", and side-tuning computes in float32',
            others=_MODE,
        )
    if recipe.side.additive and recipe.data.task in _NOT_ADDITIVE:
        yield Contradiction(
            key="side.additive",
            text=f'is for classification, tagging and regression, but the task is "{recipe.data.task}"',
            others=("data.task",),
        )


def _server(cluster: ClusterSection, *, resumes: bool) -> Iterator[Contradiction]:
    """A run that is resumed may have everything collected, and need the server alone."""
    servers = _servers(cluster.local_workers)
    if len(servers) > 1:
        yield Contradiction(
            key="cluster.local_workers", text=f"has {len(servers)} servers; a side-tuning run has one", others=_MODE
        )
    if not cluster.has_workers:
        return
    expected = cluster.workers_expected
    if expected < 2 and not resumes:
        yield Contradiction(
            key="cluster.workers" if cluster.workers is not None else "cluster.local_workers",
            text=f"makes {counted(expected, 'worker')}, and side-tuning needs a server and a device",
            others=_MODE,
        )
    elif not servers and cluster.all_local:
        yield Contradiction(
            key="cluster.local_workers",
            text='has no server: give one of them role = "server", or let a worker from elsewhere join (workers)',
            others=_MODE,
        )
    elif servers and cluster.all_local and len(cluster.local_workers) == len(servers):
        yield Contradiction(key="cluster.local_workers", text="has no device, only a server", others=_MODE)


def _cache(side: SideSection, cluster: ClusterSection) -> Iterator[Contradiction]:
    if side.cache_quota is not None:
        try:
            if parse_bytes(side.cache_quota) == 0:
                yield Contradiction(key="side.cache_quota", text="is 0; leave it out for no limit")
        except ValueError as error:
            yield Contradiction(key="side.cache_quota", text=f"is wrong: {error}")
    if not side.two_phases and side.cache != SideSection().cache:
        yield Contradiction(
            key="side.cache",
            text="has no effect with two_phases = false, which caches no training data",
            others=("side.two_phases",),
        )
    if not side.leave_after_collect:
        return
    if not side.two_phases:
        yield Contradiction(
            key="side.leave_after_collect",
            text="needs two_phases: without them the devices run in every epoch",
            others=("side.two_phases",),
        )
    if side.cache == "memory":
        yield Contradiction(
            key="side.leave_after_collect",
            text='needs cache = "disk": what a server in memory has trained is gone when it ends',
            others=("side.cache",),
        )
    if _servers(cluster.local_workers) or not cluster.has_workers:
        yield Contradiction(
            key="side.leave_after_collect",
            text="is for a server on another machine: a local one ends with this command",
            others=("cluster.local_workers", "cluster.workers"),
        )


def _servers(workers: tuple[LocalWorker, ...]) -> list[LocalWorker]:
    return [worker for worker in workers if worker.role == "server"]
