"""The small file in every exported folder that says which run made it, for which task, and of which files. No torch."""

from pathlib import Path

import msgspec

RECORD = "coterie.json"
"""Its name, by which a folder is known as exported here."""


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds.

    Attributes:
        coterie: The version that wrote the folder.
        task: What the model was trained for, such as `token-classification`; empty where that was not recorded.
        prompt: The template that it learnt with, if it was not the task's own.
        text_field: The field in which bare texts become rows like those that it learnt; empty for the usual one.
        max_tokens: The longest row that it learnt, where the recipe said so; None for the task's own limit.
        pairs: It learnt pairs of texts, or single ones; None in tasks that do not have both, and where not recorded.
        files: Everything that was written, this file included.
    """

    coterie: str
    run_id: str
    step: int
    files: tuple[str, ...]
    task: str = ""
    prompt: str = ""
    text_field: str = ""
    max_tokens: int | None = None
    pairs: bool | None = None


def read_record(folder: Path) -> ExportRecord | None:
    """The record of an exported folder; None for any other folder, or where the file is damaged."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=ExportRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(folder: Path, record: ExportRecord) -> None:
    """Write the file, which `record` already names among its own."""
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
