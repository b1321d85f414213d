"""Slices of real data sets, a training and a test file for each task, small enough for minutes of one core.

Which rows: drawn by a fixed seed from those that are short enough, training rows from the set's training split, test
rows from its other splits and with labels that the training rows have.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coterie.tasks.samples import sample_path
from task_settings import Sizes

ENVIRONMENT = "COTERIE_DATA"
"""Names the folder with a folder for each data set."""

INTENTS = 25
"""Of banking77's 77, so that few rows teach each."""


class Slices(msgspec.Struct, frozen=True, kw_only=True):
    """A task's files, and what they are, in words."""

    train: Path
    test: Path
    about: str


Rows = list[dict[str, Any]]


def missing(task: str, data: Path | None) -> str | None:
    """What keeps a task from being compared, or None."""
    needed = _NEEDED[task]
    if not needed:
        return None
    if data is None:
        return f"no data folder is given (--data or {ENVIRONMENT}), and {' and '.join(needed)} do not ship with coterie"
    lacking = [name for name in needed if not (data / name / "train.jsonl").is_file()]
    return f"{data} has no {' and no '.join(lacking)}" if lacking else None


def make_slices(task: str, data: Path | None, folder: Path, sizes: Sizes) -> Slices:
    """Write the two files; whatever `missing` names must be there."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "token-classification":
        return _entities(folder, sizes)
    assert data is not None, "see `missing`"
    train, test, about = _ROWS[task](data)
    for rows in (train, test):
        random.Random(0).shuffle(rows)
    train = train[: sizes.train]
    labels = {row.get("label") for row in train}
    test = [row for row in test if row.get("label") in labels][: sizes.test]
    files = {"train": folder / "train.jsonl", "test": folder / "test.jsonl"}
    for name, rows in (("train", train), ("test", test)):
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Slices(**files, about=about)


def _entities(folder: Path, sizes: Sizes) -> Slices:
    blocks = {
        split: (sample_path("wikigold") / f"{split}.conll").read_text(encoding="utf-8").strip().split("\n\n")
        for split in ("train", "dev", "test")
    }
    random.Random(0).shuffle(blocks["train"])
    held_out = (*blocks["dev"], *blocks["test"])
    files = {"train": folder / "train.conll", "test": folder / "test.conll"}
    files["train"].write_text("\n\n".join(blocks["train"][: sizes.train]) + "\n", encoding="utf-8")
    files["test"].write_text("\n\n".join(held_out[: sizes.test]) + "\n", encoding="utf-8")
    return Slices(**files, about="wikigold, named entities")


def _intents(data: Path) -> tuple[Rows, Rows, str]:
    splits = {split: _read(data / "banking77" / f"{split}.jsonl") for split in ("train", "test")}
    kept = set(sorted({row["label"] for row in splits["train"]})[:INTENTS])
    train, test = ([row for row in rows if row["label"] in kept] for rows in splits.values())
    return train, test, f"banking77, {INTENTS} intents"


def _pairs(data: Path) -> tuple[Rows, Rows, str]:
    train, test = (_read(data / "banking77_pairs" / f"{split}.jsonl") for split in ("train", "test"))
    return train, test, "banking77_pairs, same intent or not"


def _similarity(data: Path) -> tuple[Rows, Rows, str]:
    """How much of the names of two queries' intents is the same, from 0 to 1: `card_arrival` and `card_linking` 1/3."""
    intents = {
        row["text"]: frozenset(row["label"].lower().split("_"))
        for split in ("train", "dev", "test")
        for row in _read(data / "banking77" / f"{split}.jsonl")
    }

    def scored(row: Mapping[str, str]) -> dict[str, Any]:
        one, other = intents[row["text"]], intents[row["text_pair"]]
        score = round(len(one & other) / len(one | other), 4)
        return {"text": row["text"], "text_pair": row["text_pair"], "score": score}

    train, test, _ = _pairs(data)
    return [scored(row) for row in train], [scored(row) for row in test], "similarity from banking77_pairs"


def _instructions(data: Path) -> tuple[Rows, Rows, str]:
    def short(row: Mapping[str, str]) -> bool:
        return sum(len(row[name]) for name in ("instruction", "input", "output")) <= 250

    train, test = (_read(data / "self_instruct" / f"{split}.jsonl") for split in ("train", "test"))
    return list(filter(short, train)), list(filter(short, test)), "self_instruct, answers to instructions"


def _dialogues(data: Path) -> tuple[Rows, Rows, str]:
    """Short dialogues with long summaries, so that few rows hold many tokens to learn from and to predict."""

    def is_kept(row: Mapping[str, str]) -> bool:
        return len(row["dialogue"]) + len(row["summary"]) <= 400 and len(row["summary"]) >= 60

    splits = {split: _read(data / "mts_dialog" / f"{split}.jsonl") for split in ("train", "dev", "test", "test2")}
    train = list(filter(is_kept, splits.pop("train")))
    test = [row for rows in splits.values() for row in filter(is_kept, rows)]
    return train, test, "mts_dialog, notes from dialogues"


def _read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


_ROWS: Mapping[str, Callable[[Path], tuple[Rows, Rows, str]]] = {
    "sequence-classification": _intents,
    "sentence pairs": _pairs,
    "regression": _similarity,
    "causal-lm": _instructions,
    "summarization": _dialogues,
}
_NEEDED: Mapping[str, Sequence[str]] = {
    "token-classification": (),
    "sequence-classification": ("banking77",),
    "sentence pairs": ("banking77_pairs",),
    "regression": ("banking77", "banking77_pairs"),
    "causal-lm": ("self_instruct",),
    "summarization": ("mts_dialog",),
}
