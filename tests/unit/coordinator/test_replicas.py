"""Replicas in memory: when a step is whole, what is dropped, what is refused."""

import pytest
import torch

from coterie.coordinator.replicas import MOST_STEPS, ReplicaStore
from coterie.errors import CheckpointError, ProtocolError
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader

SHAPES = {0: {"embed": (3, 2)}, 2: {"block.a": (2,), "block.b": (1, 2)}}


def frame(**tensors):
    """Names with `__` for `/`, as they travel."""
    parts = [encode(tensor, name.replace("__", "/").replace("_dot_", "."), "raw") for name, tensor in tensors.items()]
    specs, buffers = (tuple(part[side] for part in parts) for side in (0, 1))
    return Frame(FrameHeader(kind="replica", tensors=specs), buffers)


def embedding(value):
    return frame(param__embed=torch.full((3, 2), float(value)), optim__embed__step=torch.tensor(float(value)))


def block(value):
    return frame(param__block_dot_a=torch.full((2,), float(value)), param__block_dot_b=torch.full((1, 2), float(value)))


@pytest.fixture
def commits():
    return []


@pytest.fixture
def store(commits):
    return ReplicaStore(SHAPES, commits.append)


def test_a_step_is_committed_when_all_trained_units_are_here_in_any_order(store, commits):
    store.put(1, 2, block(1))
    store.put(2, 2, block(2))
    assert store.step == -1
    store.put(1, 0, embedding(1))
    assert [replica.step for replica in commits] == [1]
    parameters, state = store.committed.read(["embed", "block.b"])
    assert parameters["embed"].tolist() == [[1.0, 1.0]] * 3
    assert parameters["block.b"].tolist() == [[1.0, 1.0]]
    assert state["embed"]["step"].item() == 1.0
    assert store.committed.unit_of == {"embed": 0, "block.a": 2, "block.b": 2}


def test_a_later_step_takes_the_place_of_an_earlier_one_and_late_ones_are_dropped(store, commits):
    store.put(3, 0, embedding(3))
    store.put(3, 2, block(3))
    store.put(2, 0, embedding(2))
    store.put(2, 2, block(2))
    assert [replica.step for replica in commits] == [3]
    store.put(5, 0, embedding(5))
    store.put(4, 0, embedding(4))
    store.put(4, 2, block(4))
    store.put(5, 2, block(5))
    assert [replica.step for replica in commits] == [3, 4, 5]


def test_a_step_is_committed_only_when_all_reports_of_it_are_here(commits):
    store = ReplicaStore(SHAPES, commits.append, steps_done=1)
    for step in (1, 2, 3):
        store.put(step, 0, embedding(step))
        store.put(step, 2, block(step))
    assert store.step == 1, "what is known of the second step may still be lost with a worker"
    store.done(2)
    assert [replica.step for replica in commits] == [1, 2]
    store.restart()
    store.done(3)
    assert store.step == 2, "the third is done again under the next plan"


def test_units_of_different_plans_are_not_mixed(store):
    store.put(1, 0, embedding(1))
    store.restart()
    store.put(1, 2, block(1))
    assert store.step == -1, "the embedding of the plan before may be another one's"
    store.put(1, 0, embedding(1))
    assert store.step == 1


@pytest.mark.parametrize(
    ("unit", "sent"),
    [
        (0, frame(param__embed=torch.zeros(2, 3))),
        (0, frame(param__embed=torch.zeros(3, 2, dtype=torch.int64))),
        (0, frame(param__other=torch.zeros(3, 2))),
        (2, frame(param__block_dot_a=torch.zeros(2))),
        (1, frame(param__embed=torch.zeros(3, 2))),
    ],
    ids=["shape", "type", "name", "missing", "unit"],
)
def test_what_is_not_the_units_trained_state_is_refused(store, unit, sent):
    with pytest.raises(ProtocolError):
        store.put(1, unit, sent)


def test_what_never_becomes_whole_does_not_fill_the_memory(store):
    for step in range(1, 3 * MOST_STEPS):
        store.put(step, 0, embedding(step))
    assert len(store._arrived) == MOST_STEPS


def test_a_replica_says_what_it_does_not_hold(store):
    store.put(1, 0, embedding(1))
    store.put(1, 2, block(1))
    with pytest.raises(CheckpointError, match="holds no classifier"):
        store.committed.read(["classifier"])
