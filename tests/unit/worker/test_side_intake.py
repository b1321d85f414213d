"""Parts of micro-batches become whole ones, in whatever order they come; rows are kept once."""

import pytest
import torch

from coterie.cluster.messages import pack
from coterie.cluster.side_messages import LABELS, TAPS, AssignServer, TapsBody
from coterie.errors import ProtocolError
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.cache_layout import CacheLayout
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.worker.side_intake import Intake

ROWS, WIDTH = 5, 4


def make_intake(cache=None, **side):
    spec = SideSpec(upload="float32", **side)
    assign = AssignServer(
        run=RunId("run"),
        spec=ModelSpec(config_json="{}", auto_class=""),
        side=spec,
        optimizer=OptimizerSpec(),
        task="token-classification",
        width=WIDTH,
        layers=(1, 2),
        rows={"train": ROWS, "dev": 1},
        digests={"train": ("t",), "dev": ("d",)},
        tokens=20,
        cache_key={},
        cache="memory",
        steps_per_epoch=2,
    )
    layout = CacheLayout(layers=(1, 2), width=WIDTH, dtype="float32", key={})
    return Intake(assign, cache or ActivationCache.open(None, layout, 1 << 20))


def frame(kind, number, body, **tensors):
    parts = [encode(tensor, name, "raw") for name, tensor in tensors.items()]
    header = FrameHeader(kind=kind, step=number, body=pack(body), tensors=tuple(spec for spec, _ in parts))
    return Frame(header, tuple(buffer for _, buffer in parts))


def micro_batch(number, rows, split="train", train_step=-1, value=1.0):
    """Two tokens of each row: the coordinator's frame, and one of each stage."""
    count = 2 * len(rows)
    described = frame(
        LABELS,
        number,
        TapsBody(split=split, train_step=train_step, parts=2),
        samples=torch.tensor(rows),
        counts=torch.full((len(rows),), 2),
        labels=torch.arange(count),
    )
    taps = [
        frame(TAPS, number, TapsBody(split=split, layers=(layer,)), taps=torch.full((count, 1, WIDTH), layer * value))
        for layer in (1, 2)
    ]
    return described, *taps


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_micro_batch_is_kept_when_its_last_part_has_come(order):
    intake = make_intake()
    parts = micro_batch(3, [4, 1])
    assert [intake.take(parts[index]) for index in order] == [False, False, True]
    assert intake.held("train").tolist() == [1, 4]
    batch = intake.read("train", [1, 4])
    assert batch.labels.tolist() == [2, 3, 0, 1]
    assert batch.taps[:, :, 0].tolist() == [[1.0, 2.0]] * 4


def test_a_split_is_whole_when_all_its_rows_are_there_and_steps_know_theirs():
    intake = make_intake()
    for part in micro_batch(0, [0], split="dev"):
        intake.take(part)
    assert intake.is_whole("dev")
    assert not intake.is_whole("train")
    for part in micro_batch(1, [0, 3]):
        intake.take(part)
    assert intake.has_rows(7, [3, 0])
    assert not intake.has_rows(7, [3, 1])
    assert intake.read("dev", [0]).samples.tolist() != intake.read("train", [0]).samples.tolist()


def test_a_row_that_is_sent_again_in_other_company_stays_as_it_came_first():
    intake = make_intake()
    for part in (*micro_batch(0, [0, 1]), *micro_batch(1, [1, 2], value=5.0)):
        intake.take(part)
    assert intake.read("train", [0, 1, 2]).taps[:, 0, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]


def test_without_two_phases_rows_serve_their_step_and_are_gone():
    intake = make_intake(two_phases=False)
    for part in (*micro_batch(0, [0, 1], train_step=4), *micro_batch(1, [2], train_step=4)):
        intake.take(part)
    assert intake.held("train").tolist() == []
    assert intake.has_rows(4, [2, 0, 1])
    assert intake.of_step(4, [2, 0, 1]).samples.tolist() == [2, 0, 1]
    assert not intake.has_rows(4, [2, 0, 1])


def test_what_is_still_to_come_into_the_cache_is_what_it_lacks_of_what_was_announced():
    intake = make_intake()
    assert intake.lacking_tokens == 20
    for part in (*micro_batch(0, [0, 1]), *micro_batch(1, [0], split="dev")):
        intake.take(part)
    assert intake.lacking_tokens == 20 - 6


def test_a_row_of_which_nothing_is_sent_is_there_all_the_same():
    intake = make_intake()
    described = frame(
        LABELS,
        0,
        TapsBody(split="train", parts=1),
        samples=torch.tensor([2, 3]),
        counts=torch.tensor([0, 1]),
        labels=torch.tensor([7]),
    )
    intake.take(described)
    intake.take(frame(TAPS, 0, TapsBody(split="train", layers=(1, 2)), taps=torch.ones(1, 2, WIDTH)))
    assert intake.held("train").tolist() == [2, 3]
    assert intake.read("train", [3, 2]).counts.tolist() == [1, 0]
    assert intake.read("train", [2]).tokens == 0


def test_activations_that_belong_to_nothing_are_refused():
    intake = make_intake()
    with pytest.raises(ProtocolError, match="without saying of what"):
        intake.take(frame(TAPS, 0, TapsBody(split="test", layers=(1,))))
    described, first, _ = micro_batch(0, [0])
    intake.take(described)
    intake.take(first)
    with pytest.raises(ProtocolError):
        intake.take(first)
    for part in micro_batch(1, [99])[:2]:
        intake.take(part)
    with pytest.raises(ProtocolError, match="not known"):
        intake.take(micro_batch(1, [99])[2])
