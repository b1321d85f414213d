"""What dealing a part out costs: it is measured, and counts what a run does."""

import itertools
import time

import pytest

from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.shares import AttentionShape, Need, NeuronShape, Shape
from coterie.heads.pool import BackendPool
from coterie.measure.dealing_cost import dealing_seconds
from coterie.measure.share_work import Conditions

HEADS = AttentionShape(hidden=96, output=96, head_dim=16, heads=6, groups=6, scale=0.25)
NEURONS = NeuronShape(hidden=96, output=96, neurons=384)


@pytest.mark.parametrize("shape", [HEADS, NEURONS], ids=["heads", "neurons"])
@pytest.mark.parametrize("need", [Need(), Need(weights=False), Need(x=False, weights=False, added=True)], ids=str)
def test_it_is_the_median_of_what_a_clock_says_of_cutting_and_joining(shape: Shape, need: Need) -> None:
    ticks = itertools.count()
    with BackendPool([NumpyBackend()]) as pool:
        conditions = Conditions(rows=2, tokens=8, need=need, dropout=True)
        assert dealing_seconds(pool, shape, conditions, lambda: float(next(ticks))) == 1.0
    assert next(ticks) == 12  # twice for each of six rounds, the first one not counted


def test_it_costs_more_where_weights_are_trained() -> None:

    wide = NeuronShape(hidden=768, output=768, neurons=3072)
    with BackendPool([NumpyBackend()]) as pool:
        trained, frozen = (
            dealing_seconds(pool, wide, Conditions(rows=1, tokens=8, need=Need(weights=weights)), time.perf_counter)
            for weights in (True, False)
        )
    assert trained > 3 * frozen  # megabytes against kilobytes


def test_a_single_group_is_not_dealt_out() -> None:
    one = AttentionShape(hidden=96, output=96, head_dim=16, heads=6, groups=1, scale=0.25)
    with BackendPool([NumpyBackend()]) as pool:
        assert dealing_seconds(pool, one, Conditions(rows=2, tokens=8), lambda: 1.0) == 0.0
