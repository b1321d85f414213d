"""Sequence classification: one label for a text or a pair of texts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from coterie.errors import DataError
from coterie.tasks.answers import are_generic, are_integers, label_order, labels_of
from coterie.tasks.examples import (
    IGNORED_LABEL,
    EncodedExample,
    Example,
    LabelArray,
    LabelledText,
    PredictedArray,
)
from coterie.tasks.label_metric import LabelMetric
from coterie.tasks.read_texts import TextFile, left_out, read_text_splits
from coterie.tasks.splits import is_beside
from coterie.tasks.task import DataFiles, Split, TaskData
from coterie.tasks.text_columns import LABELS
from coterie.tasks.text_encoding import encode_texts
from coterie.tasks.text_writers import TEXT_SUFFIXES, answer_lines, write_answers

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer


class SequenceClassification(msgspec.Struct, frozen=True, kw_only=True):
    """A label for each text or pair of texts.

    Attributes:
        labels: Names of the labels by id; empty on a worker, and until `prepare` has read the data.
    """

    name: ClassVar[str] = "sequence-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    main_metric: ClassVar[str] = "accuracy"
    suffixes: ClassVar[tuple[str, ...]] = TEXT_SUFFIXES

    labels: tuple[str, ...] = ()

    @property
    def shares(self) -> tuple[str, ...]:
        """Accuracy, F1 and Matthews' correlation; `binary_f1` where there are two labels."""
        always = ("accuracy", "macro_f1", "matthews")
        return (*always, "binary_f1") if len(self.labels) == 2 else always

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits; the labels are known already, or named by the user or the data set, or those of the data.

        A label that only dev or test data have counts as wrong, carries no loss, and a note says so. A test split that
        was found beside the training data and has no labels is left out.

        Raises:
            DataError: A split cannot be read, or has none of the labels; the training data have fewer than two labels,
                or some that the labels (of a model that is trained further, or named by the user) lack.
        """
        read = read_text_splits(files, LABELS)
        names = {name: _integer_names(file, files, self.labels) for name, file in read.files.items()}
        found = {name: labels_of(file, names[name]) for name, file in read.files.items()}
        first = next(iter(read.files))
        labels = self.labels
        if are_generic(labels) and len(names[first]) == len(labels):
            labels = names[first]
        if not labels and files.options.tagged:
            labels = names[first] or label_order(found[first], read.files[first].source)
        splits: dict[str, Split] = {}
        notes = [*read.notes]
        for name, file in read.files.items():
            if is_beside(files, name) and not any(found[name]):
                notes.append(left_out(name, file))
            else:
                splits[name] = _to_split(name, file, found[name], labels)
        if read.files[first].columns.answer is not None:
            notes.append(read.files[first].columns.describe())
        splits[first] = msgspec.structs.replace(splits[first], notes=(*splits[first].notes, *notes))
        return TaskData(
            task=SequenceClassification(labels=labels),
            splits=splits,
            config_overrides={
                "id2label": dict(enumerate(labels)),
                "label2id": {label: index for index, label in enumerate(labels)},
                "problem_type": "single_label_classification",
            },
        )

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """Token ids, and the label's id (); `IGNORED_LABEL` for a row without a label, or with an unknown one."""
        row = _as_text(example)
        label = self.labels.index(row.label) if row.label in self.labels else IGNORED_LABEL
        return encode_texts(row.text, row.pair, np.array(label, dtype=np.int64), tokenizer, max_tokens)

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Cross-entropy summed over labelled rows, in float32; 0, with zero gradients, where there are none.

        Args:
            logits: (B, V) in any floating type.
            labels: (B,), `IGNORED_LABEL` where a row has no label.
        """
        from coterie.tasks.cross_entropy import cross_entropy_sum  # noqa: PLC0415 - reading data needs no torch

        return cross_entropy_sum(logits, labels)

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """Rows with a label."""
        return int(np.count_nonzero(labels != IGNORED_LABEL))

    def predictions(self, logits: "Tensor") -> "Tensor":
        """The likeliest label of each row: (B, V) to (B,) int64."""
        return logits.argmax(dim=-1)

    def metric(self) -> LabelMetric:
        """Accuracy, F1 and Matthews' correlation."""
        return LabelMetric(self.labels)

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> LabelledText:  # noqa: ARG002 - the label id says all
        """The row with the model's label."""
        return msgspec.structs.replace(_as_text(example), label=self.labels[int(predicted)])

    def text(self, examples: Sequence[Example]) -> str:
        """A line for each row: label, tab, text."""
        return answer_lines([_as_text(example) for example in examples])

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write rows as `.jsonl` or `.csv`, or their labels alone as `.txt`."""
        write_answers(path, [_as_text(example) for example in examples])


def _as_text(example: Example) -> LabelledText:
    assert isinstance(example, LabelledText), "rows come from this task's own readers"
    return example


def _integer_names(file: TextFile, files: DataFiles, known: Sequence[str]) -> tuple[str, ...]:
    """What integers in the column of the labels mean; nothing if they are names themselves."""
    named = files.options.label_names or file.file.class_names.get(file.columns.answer or "", ())
    return tuple(named) or (() if are_integers(known) else tuple(known))


def _to_split(name: str, file: TextFile, found: Sequence[str | None], labels: Sequence[str]) -> Split:
    known = set(labels)
    unknown = Counter(label for label in found if label is not None and label not in known)
    notes = []
    if unknown and name == "train":
        index = next(index for index, label in enumerate(found) if label in unknown)
        raise DataError(
            f"{file.file.where(index)}: the training data have labels that are not among the known ones: "
            f"{_listed(unknown)}",
            hint=f"the known labels are {_listed(labels)}; check `label_names`, or train from a model without labels",
        )
    if unknown and unknown.total() == sum(label is not None for label in found):
        raise DataError(
            f"{file.source}: none of its labels ({_listed(unknown)}) is one of the model's ({_listed(labels)})",
            hint="check `label_column` and `label_names`: is it data of this task?",
        )
    if unknown:
        notes.append(
            f"{file.source}: {unknown.total()} rows have labels that training never sees ({_listed(unknown)}); "
            "they count as wrong"
        )
    rows = zip(file.texts, found, file.file.rows, strict=True)
    examples = tuple(
        LabelledText(text=text, pair=pair, label=label, line=row.line) for (text, pair), label, row in rows
    )
    return Split(name=name, source=file.source, examples=examples, notes=tuple(notes))


def _listed(labels: Sequence[str] | Counter[str]) -> str:
    distinct = sorted(set(labels))
    return ", ".join(distinct[:6]) + (f" and {len(distinct) - 6} more" if len(distinct) > 6 else "")
