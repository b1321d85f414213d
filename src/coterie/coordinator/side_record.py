"""What a side-tuning run writes down to be resumed: who it is, and what its numbers depend on. Needs no torch."""

from pathlib import Path

import msgspec

from coterie.errors import CheckpointError, StorageError
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec

SIDE_RUN = "side-run.json"


class SideTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers of a run depend on."""

    model: ModelSpec
    side: SideSpec
    optimizer: OptimizerSpec
    task: str
    prompt: str
    batch_rows: int
    group_by_length: bool
    data_digest: str
    base_digest: str


class SideRunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file in a run's folder.

    Attributes:
        micro_batches: Of the first plan: it decides which rows are padded together, and so the last bits.
        is_alone: The server was left to finish by itself; it alone is waited for when the run is resumed.
    """

    run: RunId
    micro_batches: int
    terms: SideTerms
    is_alone: bool = False


def read_side_run(folder: Path) -> SideRunRecord | None:
    """The record of a run's folder; None if there is none.

    Raises:
        CheckpointError: It is damaged, or of another version.
    """
    path = folder / SIDE_RUN
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=SideRunRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint="was it written by another version of coterie? Start a new run"
        ) from error


def write_side_run(folder: Path, record: SideRunRecord) -> None:
    """Put the record in the place of the one before, whole or not at all.

    Raises:
        StorageError: The folder cannot be written.
    """
    path = folder / SIDE_RUN
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", hint="choose another --output") from error


def check_same_terms(record: SideRunRecord, terms: SideTerms) -> None:
    """May a run with these terms go on from that record?

    Raises:
        CheckpointError: Something differs that the numbers depend on; all of it is named.
    """
    names = SideTerms.__struct_fields__
    different = [name for name in names if getattr(record.terms, name) != getattr(terms, name)]
    if different:
        raise CheckpointError(
            f"the run was started with other settings: {', '.join(different)} differ",
            hint="resume with the recipe in the run's folder, or start a new run in another folder",
        )
