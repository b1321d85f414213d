"""Whole runs on devices that keep frozen weights: a second one fetches nothing that is there; the losses are equal."""

import pytest

from coterie.cluster import shard_messages
from coterie.coordinator import shard_offers
from coterie.worker import shard_intake
from coterie.worker.settings import WorkerSettings

STEPS = 2
BLOCKS = 4


@pytest.fixture
def wanted(monkeypatch):
    """How many tensors workers asked for, of how many that were offered, in each offer; tiny models are offered too."""
    monkeypatch.setattr(shard_offers, "LEAST_UNIT_BYTES", 1)
    monkeypatch.setattr(shard_offers, "LEAST_PART_BYTES", 1)
    monkeypatch.setattr(shard_offers, "PIECE_BYTES", 2000)
    answers = []

    def noted(*, unit, names):
        answers.append(len(names))
        return shard_messages.ShardWants(unit=unit, names=names)

    monkeypatch.setattr(shard_intake, "ShardWants", noted)
    return answers


def devices(tmp_path):
    """Three workers of one machine, which share its cache, so that it does not matter which one gets which stage."""
    return tuple(
        WorkerSettings(name=f"device-{letter}", shard_cache=tmp_path / "cache", shard_quota=1 << 30) for letter in "abc"
    )


def test_a_second_run_fetches_no_frozen_tensor_again_but_one_that_is_damaged(
    tmp_path, make_recipe, cluster, run, alone, wanted
):
    options = {"method": "lora", "lora_dropout": 0.1, "max_steps": STEPS, "cuts": (2, 4)}
    recipe = make_recipe(tmp_path / "first", **options)
    losses = alone(recipe, STEPS)
    assert run(recipe, cluster(*devices(tmp_path))).losses == pytest.approx(losses, abs=1e-6)
    assert len(wanted) == BLOCKS + 1  # in the last unit everything is trained
    assert min(wanted) > 0
    kept = sorted(tmp_path.glob("cache/*/*"))
    kept[0].write_bytes(b"?" * kept[0].stat().st_size)
    wanted[:] = []
    again = run(make_recipe(tmp_path / "second", **options), cluster(*devices(tmp_path)))
    assert again.losses == pytest.approx(losses, abs=1e-6)
    assert sorted(wanted) == [0] * BLOCKS + [1]
    assert sorted(tmp_path.glob("cache/*/*")) == kept


def test_of_a_fully_trained_model_nothing_is_kept(tmp_path, make_recipe, cluster, run, wanted):
    run(make_recipe(tmp_path / "run", method="full", max_steps=1, cuts=(2, 4)), cluster(*devices(tmp_path)))
    assert not wanted
    assert not list(tmp_path.glob("cache/*/*"))
