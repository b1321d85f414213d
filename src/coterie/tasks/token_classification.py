"""Token classification: find entities in text by one IOB2 tag per word."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from coterie.errors import DataError, UnsupportedModelError
from coterie.tasks.entity_metric import EntityCounts
from coterie.tasks.examples import (
    IGNORED_LABEL,
    EncodedExample,
    Example,
    LabelArray,
    PredictedArray,
    TaggedSentence,
)
from coterie.tasks.read import SentenceFile, read_sentences
from coterie.tasks.sources import has_split
from coterie.tasks.tag_schemes import OUTSIDE, label_set, split_tag, to_iob2
from coterie.tasks.task import DataFiles, Split, TaskData
from coterie.tasks.writers import SENTENCE_SUFFIXES, to_conll, write_sentences

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.tokenizer import LoadedTokenizer


class TokenClassification(msgspec.Struct, frozen=True, kw_only=True):
    """Tags for words. A word's first piece carries its label; other pieces and special tokens carry none.

    Attributes:
        labels: IOB2 tags by label id; empty on a worker, and until `prepare` has read the data.
    """

    name: ClassVar[str] = "token-classification"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    main_metric: ClassVar[str] = "entity_f1"
    shares: ClassVar[tuple[str, ...]] = ("entity_f1", "entity_precision", "entity_recall", "word_accuracy")
    suffixes: ClassVar[tuple[str, ...]] = SENTENCE_SUFFIXES

    labels: tuple[str, ...] = ()

    def prepare(self, files: DataFiles) -> TaskData:
        """Read all splits; the labels are `O` and the entity types of the training data, unless known already.

        A type that only dev or test data have stays in the gold tags: such entities count as missed, carry no loss,
        and a note says so.

        Raises:
            DataError: A split cannot be read, there is nothing to read, or the training data have a type that the
                labels (of a model that is trained further) lack.
        """
        read: dict[str, SentenceFile] = {}
        for name in ("train", "dev", "test"):
            source = getattr(files, name)
            if source is None and files.train is not None and has_split(files.train, name, files.options):
                source = files.train
            if source is not None:
                read[name] = read_sentences(source, split=name, options=files.options)
        if not read:
            raise DataError("no data are given", hint="name a file or folder with training data")
        labels = self.labels
        if not labels and files.options.tagged:
            first = read["train"] if "train" in read else next(iter(read.values()))
            labels = label_set(tag for sentence in first.sentences for tag in sentence.tags)
        splits = {name: _to_split(name, file, labels) for name, file in read.items()}
        return TaskData(
            task=TokenClassification(labels=labels),
            splits=splits,
            config_overrides={
                "id2label": dict(enumerate(labels)),
                "label2id": {label: index for index, label in enumerate(labels)},
            },
        )

    def encode(self, example: Example, tokenizer: "LoadedTokenizer", max_tokens: int) -> EncodedExample:
        """Token ids with labels on the first piece of each word.

        Raises:
            UnsupportedModelError: The tokenizer cannot say which word a token belongs to.
        """
        sentence = _as_sentence(example)
        if not tokenizer.knows_words:
            raise UnsupportedModelError(
                f"the tokenizer {tokenizer.class_name} of {tokenizer.name} does not say which word a token belongs to",
                hint="token classification needs a fast tokenizer (a tokenizer.json in the model's folder)",
            )
        pieces = tokenizer.encode_words(sentence.words, max_tokens)
        positions = np.full(len(sentence.words), -1, dtype=np.int64)
        labels = np.full(len(pieces.input_ids), IGNORED_LABEL, dtype=np.int64)
        for position, word in reversed(tuple(enumerate(pieces.word_ids))):
            if word is not None:
                positions[word] = position
        ids = {label: index for index, label in enumerate(self.labels)}
        for word, tag in enumerate(sentence.tags):
            if positions[word] >= 0:
                labels[positions[word]] = ids.get(tag, IGNORED_LABEL)
        lost = set(np.flatnonzero(positions < 0).tolist())
        return EncodedExample(
            input_ids=pieces.input_ids,
            labels=labels,
            token_type_ids=pieces.token_type_ids,
            word_positions=positions,
            truncated=pieces.truncated,
            truncated_words=len(lost & pieces.cut_words),
            dropped_words=len(lost - pieces.cut_words),
        )

    def loss_sum(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Cross-entropy summed over labelled tokens, in float32; 0, with zero gradients, where there are none.

        Args:
            logits: (B, T, V) in any floating type.
            labels: (B, T), `IGNORED_LABEL` where a token has no label.
        """
        from torch.nn.functional import cross_entropy  # noqa: PLC0415 - reading data and metrics need no torch

        scores = logits.reshape(-1, logits.shape[-1]).float()
        return cross_entropy(scores, labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")

    def count_loss_tokens(self, labels: LabelArray) -> int:
        """Tokens with a label."""
        return int(np.count_nonzero(labels != IGNORED_LABEL))

    def predictions(self, logits: "Tensor") -> "Tensor":
        """The likeliest label of each token: (B, T, V) to (B, T) int64."""
        return logits.argmax(dim=-1)

    def metric(self) -> "EntityMetric":
        """Entity precision, recall and F1 over words, as seqeval counts them."""
        return EntityMetric(self)

    def predicted_tags(self, encoded: EncodedExample, predicted: PredictedArray) -> tuple[str, ...]:
        """The model's tag for each word, as predicted; `O` for words without a token.

        Args:
            encoded: The row as the model took it.
            predicted: Label ids (T or more,), padding after the row's own tokens.
        """
        assert encoded.word_positions is not None
        return tuple(
            self.labels[predicted[position]] if position >= 0 else OUTSIDE for position in encoded.word_positions
        )

    def decode(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> TaggedSentence:
        """The sentence with the model's tags, made valid IOB2 (the entities are those that the metric counts)."""
        sentence = _as_sentence(example)
        tags = to_iob2(tuple(_readable(tag) for tag in self.predicted_tags(encoded, predicted)))
        return TaggedSentence(words=sentence.words, tags=tags, line=sentence.line)

    def text(self, examples: Sequence[Example]) -> str:
        """Tagged sentences in two columns, as `.conll` files have them."""
        return to_conll([_as_sentence(example) for example in examples])

    def write(self, path: Path, examples: Sequence[Example]) -> None:
        """Write tagged sentences as `.conll`, `.jsonl` or `.csv`."""
        write_sentences(path, [_as_sentence(example) for example in examples])


class EntityMetric:
    """Counts entities over words; words that the context cut off or the tokenizer dropped are predicted as `O`."""

    def __init__(self, task: TokenClassification) -> None:
        self._task = task
        self._counts = EntityCounts()

    def add(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> None:
        """Count one sentence."""
        tags = tuple(_readable(tag) for tag in self._task.predicted_tags(encoded, predicted))
        self._counts.add(_as_sentence(example).tags, tags)

    def result(self, mean_loss: float | None = None) -> dict[str, float]:  # noqa: ARG002 - F1 needs no loss
        """All figures: `entity_f1`, `entity_precision`, `entity_recall`, `word_accuracy`, and per type."""
        return self._counts.result()

    def report(self, mean_loss: float | None = None) -> str:  # noqa: ARG002 - as above
        """A table per entity type."""
        return self._counts.report()


def _as_sentence(example: Example) -> TaggedSentence:
    assert isinstance(example, TaggedSentence), "rows come from this task's own readers"
    return example


def _readable(label: str) -> str:
    """A label as a tag; one of a foreign model that is no entity tag (`LABEL_0`) counts as `O`."""
    return label if split_tag(label) is not None else OUTSIDE


def _to_split(name: str, file: SentenceFile, labels: tuple[str, ...]) -> Split:
    notes = []
    if file.scheme not in {"IOB2", "none"}:
        notes.append(f"{file.source}: tags converted from {file.scheme} to IOB2")
    if file.repaired_tags:
        notes.append(f"{file.source}: {file.repaired_tags} stray I- tags that continued no entity became B-")
    known = set(labels)
    unknown = [tag for sentence in file.sentences for tag in sentence.tags if tag not in known]
    if unknown and name == "train":
        raise DataError(
            f"{file.source}: the training data have the tags {_listed(unknown)}, which the model's labels lack",
            hint=f"the labels are {', '.join(labels)}; train from a model without a classifier to learn new ones",
        )
    if unknown:
        notes.append(
            f"{file.source}: {len(unknown)} words carry tags that training never sees ({_listed(unknown)}); "
            "they count as missed"
        )
    return Split(name=name, source=file.source, examples=file.sentences, notes=tuple(notes))


def _listed(tags: Sequence[str]) -> str:
    distinct = sorted(set(tags))
    return ", ".join(distinct[:6]) + (f" and {len(distinct) - 6} more" if len(distinct) > 6 else "")
