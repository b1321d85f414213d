"""Small made-up models and clusters, random ones by seed, and plain enumeration to compare the search with."""

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from coterie.ids import WorkerId
from coterie.planner.problem import Problem, StageChoice
from coterie.planner.request import PlanRequest
from coterie.planner.search import most_stages
from coterie.planner.tables import OPTIONS
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile
from coterie.units import MIB


def make_model(
    blocks: int, *, block_mib: int = 28, ends_mib: int = 4, tied: bool = False, trained: bool = True
) -> ModelProfile:
    def layer(name: str, kind: str, mib: int, flops: float) -> LayerProfile:
        return LayerProfile(
            name=name,
            kind=kind,
            parameter_bytes=mib * MIB,
            trainable_bytes=mib * MIB if trained else 0,
            largest_trainable_bytes=mib * MIB // 4 if trained else 0,
            saved=AffineBytes(per_row=4 * MIB),
            boundary=AffineBytes(per_row=MIB // 2),
            transient=AffineBytes(per_row=2 * MIB),
            forward_flops_per_row=flops,
            backward_flops_per_row=2 * flops,
        )

    layers = [
        layer("embedding", "embedding", ends_mib, 1e6),
        *(layer(f"block {number}", "block-a", block_mib, 1e9) for number in range(blocks)),
        layer("output layer", "output layer", ends_mib, 1e6),
    ]
    return ModelProfile(
        key="test",
        name="test",
        layers=tuple(layers),
        tied=tied,
        tied_bytes=ends_mib * MIB if tied else 0,
        memory_tokens=128,
        typical_tokens=64,
    )


def make_cluster(
    speeds: tuple[float, ...], memory_mib: tuple[int, ...] | None = None, *, mbit_per_s: float = 10_000.0
) -> ClusterProfile:
    memory = memory_mib or (100_000,) * len(speeds)
    devices = tuple(
        DeviceProfile(
            worker=WorkerId(f"w{number}"),
            name=f"device-{number}",
            memory_bytes=mib * MIB,
            base_bytes=100 * MIB,
            flops_per_s=speed * 1e10,
            update_bytes_per_s=1e12,
        )
        for number, (speed, mib) in enumerate(zip(speeds, memory, strict=True))
    )
    links = tuple(
        LinkProfile(source=a.worker, target=b.worker, bytes_per_s=mbit_per_s * 1e6 / 8, latency_s=1e-5)
        for a, b in itertools.permutations(devices, 2)
    )
    return ClusterProfile(devices=devices, links=links)


def random_request(seed: int, **settings: object) -> PlanRequest:
    """A request in which everything differs: units, speeds, memory (some too small), each direction of each link."""
    rng = random.Random(seed)
    units = rng.randint(1, 6)
    count = rng.randint(1, 4)
    layers = []
    for number in range(units):
        parameters = rng.randint(1, 60) * MIB
        layers.append(
            LayerProfile(
                name=f"unit {number}",
                kind=f"kind {rng.randint(0, 2)}",
                parameter_bytes=parameters,
                trainable_bytes=rng.choice([0, parameters // 10, parameters]),
                largest_trainable_bytes=0,
                saved=AffineBytes(fixed=rng.randint(0, MIB), per_row=rng.randint(1, 20) * MIB),
                boundary=AffineBytes(per_row=rng.randint(1, 2000) * 1024),
                transient=AffineBytes(per_row=rng.randint(0, 5) * MIB),
                forward_flops_per_row=rng.uniform(0.1, 2) * 1e9,
                backward_flops_per_row=rng.uniform(0.2, 4) * 1e9,
            )
        )
    tied = rng.random() < 0.4
    roomy = rng.random() < 0.5
    devices = tuple(
        DeviceProfile(
            worker=WorkerId(f"w{number}"),
            name=f"device-{number}",
            memory_bytes=rng.randint(2000, 4000) * MIB if roomy else rng.randint(120, 900) * MIB,
            base_bytes=rng.randint(0, 100) * MIB,
            flops_per_s=rng.uniform(0.5, 4) * 1e10,
            update_bytes_per_s=rng.uniform(0.5, 4) * 1e9,
        )
        for number in range(count)
    )
    links = tuple(
        LinkProfile(
            source=a.worker, target=b.worker, bytes_per_s=10 ** rng.uniform(6, 9), latency_s=rng.uniform(0, 0.02)
        )
        for a, b in itertools.permutations(devices, 2)
    )
    model = ModelProfile(
        key="random",
        name="random",
        layers=tuple(layers),
        tied=tied,
        tied_bytes=min(layers[0].parameter_bytes, layers[-1].parameter_bytes) if tied else 0,
        memory_tokens=128,
        typical_tokens=rng.choice([32, 128]),
    )
    frozen = rng.choice([0, 0, 1, 2])  # units in front with nothing to train
    model = msgspec.structs.replace(
        model,
        layers=tuple(
            msgspec.structs.replace(layer, trainable_bytes=0, saved=AffineBytes(), backward_flops_per_row=0.0)
            if number < frozen
            else layer
            for number, layer in enumerate(model.layers)
        ),
    )
    return PlanRequest(
        **{
            "model": model,
            "cluster": ClusterProfile(devices=devices, links=links),
            "batch_rows": 8,
            "codecs": rng.choice([("fp32",), ("fp32", "int8"), ("fp32", "fp16", "int8")]),
            "allow_recompute": rng.random() < 0.3,
            "allocator": rng.choice(["default", "tight"]),
            **settings,
        }
    )


def all_pipelines(problem: Problem) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Every order of every subset of the devices with every cut: (device, first unit, stop unit) per stage."""
    units = problem.units
    for stages in range(problem.request.min_stages, most_stages(problem) + 1):
        for order in itertools.permutations(range(len(problem.devices)), stages):
            for cuts in itertools.combinations(range(1, units), stages - 1):
                edges = (0, *cuts, units)
                yield tuple(zip(order, edges[:-1], edges[1:], strict=True))


def all_candidates(
    problem: Problem, depths_of: Callable[[Problem, int], Iterator[tuple[int, ...]]]
) -> Iterator[list[StageChoice]]:
    """Every pipeline with every option, codec and depth."""
    for pipeline in all_pipelines(problem):
        per_stage = []
        for number, (device, first, stop) in enumerate(pipeline):
            last = number == len(pipeline) - 1
            per_stage.append(
                [
                    (device, first, stop, option, codec)
                    for option in OPTIONS
                    for codec in (problem.request.codecs[:1] if last else problem.request.codecs)
                    if option.allocator in problem.allocators(device)
                    and option.recompute in problem.recompute_choices()
                ]
            )
        for choices in itertools.product(*per_stage):
            for depths in depths_of(problem, len(pipeline)):
                yield [
                    StageChoice(
                        device=device,
                        first_unit=first,
                        stop_unit=stop,
                        depth=depth,
                        recompute=option.recompute,
                        allocator=option.allocator,
                        codec=codec,
                    )
                    for (device, first, stop, option, codec), depth in zip(choices, depths, strict=True)
                ]


def textbook_depths(problem: Problem, stages: int) -> Iterator[tuple[int, ...]]:
    if problem.kind == "gpipe":
        yield (problem.micro_batches,) * stages
    elif problem.kind == "forward":
        yield (1,) * stages
    else:
        yield tuple(range(stages, 0, -1))


@pytest.fixture(scope="session", name="make_model")
def _make_model() -> Callable[..., ModelProfile]:
    return make_model


@pytest.fixture(scope="session", name="make_cluster")
def _make_cluster() -> Callable[..., ClusterProfile]:
    return make_cluster


@pytest.fixture(scope="session", name="random_request")
def _random_request() -> Callable[..., PlanRequest]:
    return random_request


@pytest.fixture(scope="session", name="all_candidates")
def _all_candidates() -> Callable[..., Iterator[list[StageChoice]]]:
    return all_candidates


@pytest.fixture(scope="session", name="textbook_depths")
def _textbook_depths() -> Callable[[Problem, int], Iterator[tuple[int, ...]]]:
    return textbook_depths
