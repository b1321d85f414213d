"""What a task is: the one protocol between data and the rest. Everything else treats all tasks alike.

A task reads files, encodes rows, sums the loss, makes predictions of logits, and turns them into figures and into
what a user reads. The worker of the last stage needs only `loss_sum` and `predictions`; neither depends on labels or
data, so the task's name is all that crosses the wire.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from coterie.tasks.examples import EncodedExample, Example, IntArray, LabelArray, PredictedArray
from coterie.tasks.readers.options import DataSource, ReadOptions

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer


class DataFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where each split is, and how its rows are used.

    Attributes:
        train, dev, test: A split that is not given is taken from `train` if that holds several (a folder).
        options: How the files are read.
        prompt: Of causal models: what stands before an answer, with `{text}` and perhaps `{input}`.
        packing: Of causal models: several training rows share a context.
    """

    train: DataSource | None = None
    dev: DataSource | None = None
    test: DataSource | None = None
    options: ReadOptions = ReadOptions()
    prompt: str | None = None
    packing: bool = False


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one split as they were read.

    Attributes:
        name: `train`, `dev` or `test`.
        source: Where it came from, in words.
        examples: All rows, in order.
        notes: What a user should know: tags converted, labels that training never saw.
    """

    name: str
    source: str
    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()


class TaskData(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its labels known, and the rows of every split.

    Attributes:
        task: The task to use from here on.
        splits: By name; only those that exist.
        config_overrides: What the model's config must say for this task: number and names of labels.
    """

    task: "Task"
    splits: dict[str, Split]
    config_overrides: dict[str, object]


class Metric(Protocol):
    """Collects predictions row by row and gives figures."""

    def add(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> None:
        """Count one row; `predicted` is that row of the task's predictions, at least T long."""
        ...

    def result(self, mean_loss: float | None = None) -> dict[str, float]:
        """All figures, flat, by name; `mean_loss` (per loss token, None without labels) is what perplexity needs."""
        ...

    def report(self, mean_loss: float | None = None) -> str:
        """The figures as text for people, several lines."""
        ...


class Task(Protocol):
    """One kind of fine-tuning."""

    @property
    def name(self) -> str:
        """What recipes call it, such as `token-classification`."""
        ...

    @property
    def auto_class(self) -> str:
        """The transformers auto class of its models."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, the index being the id; empty until known, or if the task has none."""
        ...

    @property
    def main_metric(self) -> str:
        """The figure of `Metric.result` by which a run is judged; one of `shares`, or else a plain number."""
        ...

    @property
    def shares(self) -> tuple[str, ...]:
        """The figures of `Metric.result` over all rows that are shares (at most 1), shown as percentages."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the file names that `write` understands; the first is the usual format, that of `text`."""
        ...

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits and settle the labels; labels that this task already has are kept."""
        ...

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """A row as token ids and labels, cut to `max_tokens`."""
        ...

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """The loss, summed (not averaged) over all positions with a label, as a float32 scalar.

        Args:
            logits: Output of the model, (B, T, V) or (B, V).
            labels: (B, T) or (B,).
        """
        ...

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """How many terms `loss_sum` has for these labels."""
        ...

    def predictions(self, logits: "Tensor") -> "Tensor":
        """What metric and output need from the logits: int64, or in a regression float32; (B, T) or (B,)."""
        ...

    def metric(self) -> Metric:
        """A new, empty metric."""
        ...

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> Example:
        """The row with the model's answer in place of the label; `predicted` as for `Metric.add`."""
        ...

    def text(self, examples: Sequence[Example]) -> str:
        """Rows, such as decoded ones, as text in the task's usual format."""
        ...

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write rows, such as decoded ones, to a file whose suffix says the format."""
        ...


class GenerationMetric(Protocol):
    """Collects generated answers row by row and gives figures."""

    @property
    def main_metric(self) -> str:
        """The figure of `result` by which answers are judged; one of `shares`."""
        ...

    @property
    def shares(self) -> tuple[str, ...]:
        """The figures of `result` that are shares (at most 1), shown as percentages."""
        ...

    def add(self, gold: Example, answered: Example) -> None:
        """Compare one row's own answer with the generated one (what `GenerativeTask.answer` made of it)."""
        ...

    def result(self) -> dict[str, float]:
        """All figures, flat, by name; shares are 0 where no row was added."""
        ...

    def report(self) -> str:
        """The figures as text for people, several lines."""
        ...


@runtime_checkable
class GenerativeTask(Task, Protocol):
    """A task of a causal model whose answers are written token by token, after a prompt.

    `prompt` gives the ids to continue from, whoever generates appends one id after the other until one of `stop_ids`
    or a limit, and `answer` makes a row of what was generated.
    """

    def prompt(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> IntArray:
        """The ids (P,) to continue from, 1 <= P <= `max_tokens`; a row's own last answer is no part of them.

        Args:
            example: A row of this task's readers, with or without an answer.
            tokenizer: The model's.
            max_tokens: Most ids of the prompt: the context less the tokens that are to be generated.
        """
        ...

    def stop_ids(self, tokenizer: "LoadedTokenizer") -> tuple[int, ...]:
        """Ids after which nothing more is generated: those that end an answer; none if the tokenizer has none."""
        ...

    def answer(self, example: Example, tokenizer: "LoadedTokenizer", generated_ids: Sequence[int]) -> Example:
        """The row with the generated text in the answer's place; a stop id at the end is no part of the text."""
        ...

    def generation_metric(self) -> GenerationMetric:
        """A new, empty metric that compares generated answers with the rows' own."""
        ...


@runtime_checkable
class ReshapingTask(Task, Protocol):
    """A task whose rows need not stay as they were read: long ones may be cut into several, short ones joined."""

    @property
    def usual_tokens(self) -> int:
        """Most tokens of a row where the user sets no limit and the model would take more."""
        ...

    def pieces(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> tuple[Example, ...]:
        """The row, or what it is cut into so that each piece fits."""
        ...

    def joined(self, rows: Sequence[EncodedExample], max_tokens: int) -> tuple[EncodedExample, ...] | None:
        """Training rows of which several share a context; None if each stays for itself."""
        ...

    def notes(self, examples: Sequence[Example], tokenizer: "LoadedTokenizer") -> tuple[str, ...]:
        """What a user should know of how these rows become tokens."""
        ...


def labels_of_config(id2label: Mapping[int | str, str]) -> tuple[str, ...]:
    """The label names of a Hugging Face config, in the order of their ids (JSON makes the ids strings)."""
    return tuple(name for _, name in sorted((int(index), name) for index, name in id2label.items()))
