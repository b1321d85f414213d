"""Regression: one number for a text or a pair of texts, such as how similar the two are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from coterie.errors import DataError
from coterie.tasks.answers import scores_of
from coterie.tasks.examples import EncodedExample, Example, LabelArray, PredictedArray, ScoredText
from coterie.tasks.read_texts import TextFile, left_out, read_text_splits
from coterie.tasks.score_metric import ScoreMetric
from coterie.tasks.splits import is_beside
from coterie.tasks.task import DataFiles, Split, TaskData
from coterie.tasks.text_columns import SCORES
from coterie.tasks.text_encoding import encode_texts
from coterie.tasks.text_writers import TEXT_SUFFIXES, answer_lines, write_answers

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer


class Regression(msgspec.Struct, frozen=True, kw_only=True):
    """A score for each text or pair of texts, learnt by least squares and in the data's own scale."""

    name: ClassVar[str] = "regression"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    labels: ClassVar[tuple[str, ...]] = ()
    main_metric: ClassVar[str] = "spearman"
    shares: ClassVar[tuple[str, ...]] = ("spearman", "pearson")
    suffixes: ClassVar[tuple[str, ...]] = TEXT_SUFFIXES

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits. A test split that was found beside the training data and has no scores is left out.

        Raises:
            DataError: A split cannot be read, or all training rows have the same score.
        """
        read = read_text_splits(files, SCORES)
        splits: dict[str, Split] = {}
        notes = [*read.notes]
        for name, file in read.files.items():
            found = scores_of(file)
            if is_beside(files, name) and all(score is None for score in found):
                notes.append(left_out(name, file))
            else:
                splits[name] = _to_split(name, file, found)
        first = next(iter(read.files))
        if read.files[first].columns.answer is not None:
            notes.append(read.files[first].columns.describe())
        splits[first] = msgspec.structs.replace(splits[first], notes=(*splits[first].notes, *notes))
        return TaskData(
            task=Regression(),
            splits=splits,
            config_overrides={
                "id2label": {0: "score"},
                "label2id": {"score": 0},
                "problem_type": "regression",
            },
        )

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """Token ids, and the score () as float32; NaN for a row without one."""
        row = _as_text(example)
        score = np.array(np.nan if row.score is None else row.score, dtype=np.float32)
        return encode_texts(row.text, row.pair, score, tokenizer, max_tokens)

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Squared errors summed over rows with a score, in float32; 0, with zero gradients, where there are none.

        Args:
            logits: (B, 1) in any floating type.
            labels: (B,) float32, NaN where a row has no score.
        """
        known = labels.isfinite()
        errors = logits.reshape(-1).float() - labels.masked_fill(~known, 0.0)
        return errors.masked_fill(~known, 0.0).square().sum()

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """Rows with a score."""
        return int(np.count_nonzero(~np.isnan(labels)))

    def predictions(self, logits: "Tensor") -> "Tensor":
        """The score of each row: (B, 1) to (B,) float32."""
        return logits.reshape(-1).float()

    def metric(self) -> ScoreMetric:
        """Correlations and mean errors."""
        return ScoreMetric()

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> ScoredText:  # noqa: ARG002 - the score says all
        """The row with the model's score."""
        return msgspec.structs.replace(_as_text(example), score=float(predicted))

    def text(self, examples: Sequence[Example]) -> str:
        """A line for each row: score, tab, text."""
        return answer_lines([_as_text(example) for example in examples])

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write rows as `.jsonl` or `.csv`, or their scores alone as `.txt`."""
        write_answers(path, [_as_text(example) for example in examples])


def _as_text(example: Example) -> ScoredText:
    assert isinstance(example, ScoredText), "rows come from this task's own readers"
    return example


def _to_split(name: str, file: TextFile, found: Sequence[float | None]) -> Split:
    scores = [score for score in found if score is not None]
    notes: tuple[str, ...] = ()
    if scores:
        mean = sum(scores) / len(scores)
        notes = (f"{name} scores from {min(scores):.4g} to {max(scores):.4g}, mean {mean:.4g}",)
        if name == "train" and min(scores) == max(scores):
            raise DataError(
                f"{file.source}: every row has the score {scores[0]:.4g}, so nothing can be learnt",
                hint="is it the right `label_column`?",
            )
    rows = zip(file.texts, found, file.file.rows, strict=True)
    examples = tuple(ScoredText(text=text, pair=pair, score=score, line=row.line) for (text, pair), score, row in rows)
    return Split(name=name, source=file.source, examples=examples, notes=notes)
