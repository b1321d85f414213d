"""`events.jsonl`: the record of a run, one JSON object per line, whole up to the moment a process is killed."""

import io
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.errors import DataError, StorageError
from coterie.metrics.records import AnyRecord, EvaluationRecord, StartRecord, StepRecord

EVENTS_FILE = "events.jsonl"
"""Name of the file in a run folder."""

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_BLOCK_BYTES = 64 * 1024


class EventLog:
    """Appends records to a file. A line a former process died in is cut off first, so that lines stay whole."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._encoder = msgspec.json.Encoder()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: each record is one write, which the system keeps even if this process is killed right after.
            self._file: io.FileIO = path.open("ab", buffering=0)
            _cut_partial_line(path)
        except OSError as error:
            raise _storage_error(path, error) from error

    def write(self, record: AnyRecord) -> None:
        """Append one record.

        Raises:
            StorageError: The disk is full or the file is gone.
        """
        if not record.at_s:
            record = msgspec.structs.replace(record, at_s=round(self._clock.wall(), 3))
        line = self._encoder.encode(record) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise _storage_error(self._path, error) from error
        if written != len(line):
            raise StorageError(
                f"only {written} of {len(line)} bytes went into {self._path}", hint="free some disk space"
            )

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def set_aside(path: Path) -> None:
    """Rename an events file to `….old`, which takes the place of an older one; nothing happens if there is none.

    Raises:
        StorageError: The folder cannot be written.
    """
    try:
        if path.exists():
            path.replace(path.with_name(f"{path.name}.old"))
    except OSError as error:
        raise _storage_error(path, error) from error


def read_events(path: Path) -> tuple[AnyRecord, ...]:
    """All records of a file. A last line without its newline, as a killed process leaves it, is ignored.

    Raises:
        DataError: The file cannot be read, or a whole line is no record; the message names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="give a run folder's events.jsonl"
        ) from error
    records = []
    whole, _, _ = content.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            try:
                records.append(_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise DataError(
                    f"{path}, line {number}: {error}", hint="was it written by another version of coterie?"
                ) from error
    return tuple(records)


def valid_steps(records: Iterable[AnyRecord]) -> tuple[StepRecord, ...]:
    """The optimizer steps that count, in order: what was done again after a resume or a loss replaces the first try."""
    steps: dict[int, StepRecord] = {}
    for record in records:
        match record:
            case StartRecord(first_step=first_step):
                steps = {step: kept for step, kept in steps.items() if step < first_step}
            case StepRecord(step=step):
                steps[step] = record
    return tuple(steps[step] for step in sorted(steps))


def valid_evaluations(records: Iterable[AnyRecord]) -> tuple[EvaluationRecord, ...]:
    """The evaluations that count, in order; see `valid_steps`."""
    evaluations: dict[tuple[str, int], EvaluationRecord] = {}
    for record in records:
        match record:
            case StartRecord(first_step=first_step):
                evaluations = {key: kept for key, kept in evaluations.items() if kept.step <= first_step}
            case EvaluationRecord(split=split, step=step):
                evaluations[split, step] = record
    return tuple(sorted(evaluations.values(), key=lambda record: (record.step, record.split)))


def _cut_partial_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                if start + newline + 1 < end:
                    file.truncate(start + newline + 1)
                return
            position = start
        file.truncate(0)


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}", hint="choose a writable folder with free space by --output"
    )
