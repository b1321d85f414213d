"""Fan-out and TensorBoard."""

import importlib
import sys

import pytest

from coterie.errors import MissingPackageError
from coterie.metrics.records import FaultRecord, MemoryRecord
from coterie.metrics.sinks import Fanout, TensorBoardSink


class ListSink:
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen = seen
        self.name = name

    def write(self, record) -> None:
        self.seen.append(f"{self.name} {record.slug}")

    def close(self) -> None:
        self.seen.append(f"{self.name} closed")


def test_every_sink_gets_every_record_in_order_and_closes_in_reverse():
    seen: list[str] = []
    fanout = Fanout((ListSink(seen, "first"), ListSink(seen, "second")))
    fanout.write(FaultRecord(slug="x", message=""))
    fanout.close()
    assert seen == ["first x", "second x", "second closed", "first closed"]


def test_tensorboard_files_hold_the_scalars(tmp_path, records):
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    sink = TensorBoardSink(tmp_path)
    for record in (*records, MemoryRecord(worker="a", memory_bytes=64 << 20, limit_bytes=0)):
        sink.write(record)
    sink.close()
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    tags = set(events.Tags()["tensors"])
    assert {"train/loss", "train/tokens_per_s", "dev/f1", "test/f1", "utilization/a", "memory_mib/a"} <= tags
    losses = [float(event.tensor_proto.float_val[0]) for event in events.Tensors("train/loss")]
    assert losses == pytest.approx([2 / (step + 1) for step in range(60)])


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(MissingPackageError, match="tensorboard is not installed") as caught:
        TensorBoardSink(tmp_path)
    assert "pip install 'coterie[tensorboard]'" in caught.value.hint
