"""A run whose data stay on their owner's machine: the same numbers, and nothing of the data for a stranger."""

import pytest

from coterie.cluster.fault_messages import REPLICA
from coterie.cluster.messages import BATCH, CONTROL, GRADIENT, HIDDEN, Assign, unpack
from coterie.coordinator.job import prepare_job
from coterie.ids import RunId
from coterie.transport.stream_link import StreamLink
from coterie.worker.settings import WorkerSettings

STRANGER = "stranger"


@pytest.fixture
def sent_to_stranger(monkeypatch):
    """Every frame that reaches the one worker in this process; its links are watched, not replaced."""
    frames = []
    receive = StreamLink.receive

    async def watched(self):
        frame = await receive(self)
        if frame.header.target == STRANGER:
            frames.append(frame)
        return frame

    monkeypatch.setattr(StreamLink, "receive", watched)
    return frames


def test_a_stranger_in_the_middle_changes_no_number_and_is_sent_nothing_of_the_data(
    tmp_path, make_recipe, cluster, run, sent_to_stranger
):
    mine = ["name=mine-1", "name=mine-2"]
    recipe = make_recipe(tmp_path / "kept", keep_data_local=True, local_workers=mine, cuts=(2, 4), max_steps=3)
    watcher = cluster(WorkerSettings(name=STRANGER))
    result = run(recipe, watcher)
    assert watcher.failures == {}
    first, middle, last = (stage.worker for stage in result.plan.stages)
    assert {first, last} == {"mine-1", "mine-2"}
    assert middle == STRANGER
    assert f"token ids and labels stay on {first} and {last}" in watcher.explanation
    kinds = {frame.header.kind for frame in sent_to_stranger}
    assert kinds >= {BATCH, CONTROL, HIDDEN, GRADIENT}
    assert REPLICA not in kinds, "trained rows of the embedding tell which tokens there are"

    job = prepare_job(recipe, RunId("test"), lambda _text: None)
    rows = [row for split in job.splits.values() for row in split.rows]
    # Ids of a row in order, without the special tokens that every row has; as int64 and as any shorter integer.
    texts = {row.input_ids[1:-1].astype(kind).tobytes() for row in rows for kind in ("<i8", "<i4", "<i2")}
    for frame in sent_to_stranger:
        names = {spec.name for spec in frame.header.tensors}
        data = frame.header.body + b"".join(bytes(buffer) for buffer in frame.buffers)
        assert "labels" not in names
        assert not any(text in data for text in texts)
        if frame.header.kind == BATCH:
            ids = next(
                bytes(buffer)
                for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True)
                if spec.name == "input_ids"
            )
            assert not any(ids)
    units = {
        unit
        for frame in sent_to_stranger
        if frame.header.kind == CONTROL
        for message in [unpack(frame.header.body)]
        if isinstance(message, Assign)
        for unit in range(message.plan.stages[message.stage].first_unit, message.plan.stages[message.stage].stop_unit)
    }
    assert units == {2, 3}

    free = cluster()
    assert result.losses == run(make_recipe(tmp_path / "free", cuts=(2, 4), max_steps=3), free).losses
