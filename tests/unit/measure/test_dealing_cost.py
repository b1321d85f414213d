"""What dealing a part out costs: it is measured, and counts what a run does."""

import itertools

import pytest

from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.shares import Array, AttentionShape, Need, NeuronShape, Shape
from coterie.heads.pool import BackendPool
from coterie.measure import dealing_cost
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


@pytest.mark.parametrize("need", [Need(), Need(weights=False), Need(x=False, weights=False, added=True)], ids=str)
def test_what_is_cut_and_joined_is_what_a_run_with_these_needs_would(
    need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[range] = []
    joined: list[set[str]] = []
    sums: list[int] = []
    plain = {name: getattr(dealing_cost, name) for name in ("part_weights", "join_weights", "sum_parts")}

    def part_weights(shape: Shape, weights: dict[str, Array], half: range) -> dict[str, Array]:
        cut.append(half)
        return plain["part_weights"](shape, weights, half)

    def join_weights(pool: BackendPool, parts: list[dict[str, Array]]) -> dict[str, Array]:
        joined.append(set(parts[0]))
        return plain["join_weights"](pool, parts)

    def sum_parts(parts: list[Array]) -> Array:
        sums.append(len(parts))
        return plain["sum_parts"](parts)

    for double in (part_weights, join_weights, sum_parts):
        monkeypatch.setattr(dealing_cost, double.__name__, double)
    with BackendPool([NumpyBackend()]) as pool:
        dealing_seconds(pool, HEADS, Conditions(rows=2, tokens=8, need=need), lambda: 0.0)
    rounds = 1 + dealing_cost.ROUNDS
    weights = {"wq", "wk", "wv", "bq", "bk", "bv", "wo"} if need.weights else set()
    added = {"q", "k", "v"} if need.added else set()
    assert cut == ([range(3), range(3, 6)] * rounds if need.weights else [])
    assert joined == [weights, added] * rounds
    assert sums == [2] * (rounds * (2 if need.x else 1))


def test_a_single_group_is_not_dealt_out() -> None:
    one = AttentionShape(hidden=96, output=96, head_dim=16, heads=6, groups=1, scale=0.25)
    with BackendPool([NumpyBackend()]) as pool:
        assert dealing_seconds(pool, one, Conditions(rows=2, tokens=8), lambda: 1.0) == 0.0
