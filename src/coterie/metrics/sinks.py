"""Where records go: the seam, a fan-out, and TensorBoard."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import MissingPackageError
from coterie.metrics.records import AnyRecord, EvaluationRecord, MemoryRecord, StepRecord


class Sink(Protocol):
    """Takes records as they happen. `close` is idempotent."""

    def write(self, record: AnyRecord) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush and free what is held."""
        ...


class Fanout:
    """Hands every record to several sinks, in order. The event log comes first: it must have what others fail on."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: AnyRecord) -> None:
        """Hand on one record."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close all sinks, the last one first."""
        for sink in reversed(self._sinks):
            sink.close()


class TensorBoardSink:
    """Writes steps, evaluations and memory as TensorBoard scalars.

    Raises:
        MissingPackageError: The package `tensorboard` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            module = importlib.import_module("tensorboard.summary")
        except ImportError as error:
            raise MissingPackageError(
                "TensorBoard files were asked for, but the package tensorboard is not installed",
                hint="pip install 'coterie[tensorboard]', or leave --tensorboard out",
            ) from error
        self._writer: Any = module.Writer(str(folder))
        self._step = 0

    def write(self, record: AnyRecord) -> None:
        """Write what TensorBoard can show of a record."""
        match record:
            case StepRecord():
                self._step = record.step
                self._write_step(record)
            case EvaluationRecord():
                for name, value in record.metrics.items():
                    self._scalar(f"{record.split}/{name}", value, record.step)
                self._scalar(f"{record.split}/loss", record.loss, record.step)
            case MemoryRecord():
                self._scalar(f"memory_mib/{record.worker}", record.memory_bytes / 2**20, self._step)
            case _:
                return

    def _write_step(self, record: StepRecord) -> None:
        self._scalar("train/loss", record.loss, record.step)
        self._scalar("train/learning_rate", record.learning_rate, record.step)
        self._scalar("train/grad_norm", record.grad_norm, record.step)
        self._scalar("train/seconds", record.seconds, record.step)
        if record.seconds > 0:
            self._scalar("train/tokens_per_s", record.tokens / record.seconds, record.step)
        for worker in record.workers:
            self._scalar(f"utilization/{worker.worker}", worker.utilization, record.step)
            self._scalar(f"memory_mib/{worker.worker}", worker.memory_bytes / 2**20, record.step)

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        self._writer.close()
