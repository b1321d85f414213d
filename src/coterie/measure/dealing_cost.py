"""What a part costs beside its shares when several backends have one: cutting what goes in, joining what comes out."""

import statistics
from collections.abc import Callable

import numpy as np

from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.shares import Array, Shape
from coterie.heads.dealing import count_of, part_inputs, part_shape, part_weights
from coterie.heads.pool import BackendPool
from coterie.heads.split_function import join_weights, sum_parts
from coterie.measure.share_work import Conditions, random_inputs, random_weights

ROUNDS = 5


def dealing_seconds(pool: BackendPool, shape: Shape, conditions: Conditions, clock: Callable[[], float]) -> float:
    """Median seconds for two halves of a part: how many shares there are changes little.

    Args:
        pool: Its threads help to join, as in a run.
        shape: The whole part.
        conditions: Of the run.
        clock: Seconds.
    """
    count = count_of(shape)
    halves = [range(count // 2), range(count // 2, count)]
    if not halves[0]:
        return 0.0
    draw = np.random.default_rng(0)
    sizes = (conditions.rows, conditions.tokens)
    x = draw.standard_normal((*sizes, shape.hidden), dtype=np.float32)
    inputs, weights = random_inputs(draw, shape, x, conditions), random_weights(draw, shape)
    samples = []
    for _ in range(1 + ROUNDS):
        results = [_results(shape, len(half), conditions) for half in halves]
        start_s = clock()
        for half in halves:
            part_inputs(shape, inputs, half)
            if conditions.need.weights:  # frozen ones stay where they are
                part_weights(shape, weights, half)
        sum_parts([y for y, _, _, _ in results])
        if conditions.need.x:
            sum_parts([d_x for _, d_x, _, _ in results])
        join_weights(pool, [gradients for _, _, gradients, _ in results])
        join_weights(pool, [added for _, _, _, added in results])
        samples.append(clock() - start_s)
    return statistics.median(samples[1:])


def _results(
    shape: Shape, count: int, conditions: Conditions
) -> tuple[Array, Array, dict[str, Array], dict[str, Array]]:
    """A half's output and its gradients: of x, of the weights, and of what was added."""
    part, need = part_shape(shape, count), conditions.need
    sizes = (conditions.rows, conditions.tokens)
    return (
        np.ones((*sizes, shape.output), np.float32),
        np.ones((*sizes, shape.hidden), np.float32),
        _ones(weight_shapes(part), wanted=need.weights),
        _ones({name: (*sizes, width) for name, width in added_widths(part).items()}, wanted=need.added),
    )


def _ones(sizes: dict[str, tuple[int, ...]], *, wanted: bool) -> dict[str, Array]:
    return {name: np.ones(size, np.float32) for name, size in sizes.items()} if wanted else {}
