"""Which task fits the data, and which columns it reads: guesses by the names and values that such data usually have.

The guesses, first match wins:

| columns | task |
|---|---|
| tagged words (CoNLL), or a list of words and a list of tags | token-classification |
| `messages` | causal-lm (chats) |
| `instruction`, `prompt` or `question` with an answer | causal-lm (instructions) |
| a long text (`dialogue`, `document`, `article` …) and a `summary` | summarization |
| one or two texts and a number with a fraction, or a `score` | regression |
| one or two texts and a label | sequence-classification |
| one text | causal-lm (plain text) |
"""

from collections.abc import Sequence

import msgspec

from coterie.config.data_look import DataLook
from coterie.errors import DataError, RecipeError, UsageError
from coterie.tasks.read_language import (
    ANSWER_COLUMNS,
    CHAT_COLUMNS,
    CONTEXT_COLUMNS,
    DIALOGUE_COLUMNS,
    INSTRUCTION_COLUMNS,
    SUMMARY_COLUMNS,
)
from coterie.tasks.readers.options import find_column
from coterie.tasks.readers.records import TAG_FIELDS, WORD_FIELDS
from coterie.tasks.text_columns import LABELS, PAIRS, SCORES, TEXTS

LABEL_COLUMNS = (*LABELS, "topic", "section")
SURELY_SCORES = ("score", "similarity_score", "similarity", "rating", "relatedness_score")
"""Columns of numbers even where all of them are whole."""

MOST_LABELS = 200
"""More distinct labels among the rows looked at than this, and a column does not hold labels."""


FEW_WORDS = 3
"""No more words than this in the mean, and a text is a label rather than a summary."""


class TaskGuess(msgspec.Struct, frozen=True, kw_only=True):
    """A task and the columns it reads; None for a column that it does not need.

    Attributes:
        reason: Why, for the recipe's comment and for people.
        labels: The distinct labels seen, sorted, as text; empty where labels are numbers or texts.
        needs_label_names: Tags are integers, and nothing says what they mean.
    """

    task: str
    reason: str
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    labels: tuple[str, ...] = ()
    needs_label_names: bool = False

    @property
    def chats(self) -> bool:
        """Rows are conversations."""
        return self.task == "causal-lm" and (self.text_column or "").lower() in CHAT_COLUMNS


def guess_task(look: DataLook) -> TaskGuess | None:
    """The task that the data look made for; None if nothing fits."""
    if look.layout == "tagged words":
        return TaskGuess(task="token-classification", reason="one tagged word a line")
    tries = (_tags, _conversation, _summary, _score, _label, _plain)
    return next((guess for attempt in tries if (guess := attempt(look)) is not None), None)


def columns_for(task: str, look: DataLook) -> TaskGuess | None:
    """The columns that this task would read; None if the data have none that fit."""
    if look.layout == "tagged words":
        return guess_task(look) if task == "token-classification" else None
    match task:
        case "token-classification":
            return _tags(look)
        case "summarization":
            return _summary(look)
        case "regression":
            return _score(look)
        case "sequence-classification":
            return _label(look)
        case _:
            return _conversation(look) or _plain(look)


def with_columns(guess: TaskGuess, look: DataLook, given: dict[str, str | None]) -> TaskGuess:
    """The guess with the columns that the user named in place of the guessed ones.

    Raises:
        RecipeError: A named column does not exist.
    """
    named = {name: column for name, column in given.items() if column is not None}
    for name, column in named.items():
        if look.rows and find_column(look.columns, column, ()) is None:
            raise RecipeError(
                f"{look.source} has no column {column!r} ({name}); its columns: {', '.join(look.columns)}",
                hint="give one of them",
            )
    if not named:
        return guess
    changed = msgspec.structs.replace(guess, **named)
    labelled = changed.task == "sequence-classification" and changed.label_column is not None
    return msgspec.structs.replace(changed, labels=_distinct(look, changed.label_column or "") if labelled else ())


def no_guess(look: DataLook, task: str | None) -> DataError | UsageError:
    """What is said where no task, or not the one wanted, fits the columns."""
    columns = ", ".join(look.columns) or "tagged words"
    if task is not None:
        return DataError(
            f"{look.source} does not look like data for {task}; its columns: {columns}",
            hint="name the columns by --text-column, --pair-column, --label-column, or give another --task",
        )
    return UsageError(
        f"{look.source}: nothing says what is to be learnt; its columns: {columns}",
        hint="give --task, and --text-column and --label-column",
    )


def _find(look: DataLook, usual: Sequence[str]) -> str | None:
    return find_column(look.columns, None, usual)


def _tags(look: DataLook) -> TaskGuess | None:
    words, tags = _find(look, WORD_FIELDS), _find(look, TAG_FIELDS)
    if words is None or tags is None:
        return None
    if not all(isinstance(value, list) for value in (*look.values(words), *look.values(tags))):
        return None
    return TaskGuess(
        task="token-classification",
        text_column=words,
        label_column=tags,
        reason=f"lists of words ({words}) and of tags ({tags})",
        needs_label_names=tags not in look.named_columns and _holds_integers(look.values(tags)),
    )


def _holds_integers(values: Sequence[object]) -> bool:
    return any(isinstance(tag, int) for value in values if isinstance(value, list) for tag in value)


def _conversation(look: DataLook) -> TaskGuess | None:
    """Chats, or instructions with responses."""
    chats = _find(look, CHAT_COLUMNS)
    if chats is not None and all(isinstance(value, list) for value in look.values(chats)):
        return TaskGuess(task="causal-lm", text_column=chats, reason=f"conversations in the column {chats}")
    prompt, response = _find(look, INSTRUCTION_COLUMNS), _find(look, ANSWER_COLUMNS)
    if prompt is not None and response is not None and _is_text(look, response):
        return TaskGuess(
            task="causal-lm",
            text_column=prompt,
            pair_column=_find(look, CONTEXT_COLUMNS),
            label_column=response,
            reason=f"instructions ({prompt}) and responses ({response})",
        )
    return None


def _plain(look: DataLook) -> TaskGuess | None:
    """Text to go on writing."""
    if look.layout == "plain text":
        return TaskGuess(task="causal-lm", reason="plain text")
    text = _find(look, TEXTS)
    if text is None:
        return None
    return TaskGuess(task="causal-lm", text_column=text, reason=f"texts in the column {text}, and nothing to predict")


def _summary(look: DataLook) -> TaskGuess | None:
    text, summary = _find(look, DIALOGUE_COLUMNS), _find(look, SUMMARY_COLUMNS)
    if text is None or summary is None:
        return None
    # A list holds several summaries of one text.
    values = [value[0] if isinstance(value, list) and value else value for value in look.values(summary)]
    words = [len(value.split()) if isinstance(value, str) else 0 for value in values]
    if sum(words) <= FEW_WORDS * len(words):
        return None
    return TaskGuess(
        task="summarization", text_column=text, label_column=summary, reason=f"texts ({text}) and summaries ({summary})"
    )


def _texts(look: DataLook) -> tuple[str, str | None] | None:
    """The column of the text, or the two of a pair."""
    for first, second in PAIRS:
        found = _find(look, (first,)), _find(look, (second,))
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    text = _find(look, TEXTS)
    return None if text is None else (text, None)


def _score(look: DataLook) -> TaskGuess | None:
    texts = _texts(look)
    column = _find(look, (*SCORES, *LABEL_COLUMNS))
    if texts is None or column is None:
        return None
    numbers = [_number(value) for value in look.values(column)]
    if not numbers or any(number is None for number in numbers):
        return None
    fractions = any(number is not None and not number.is_integer() for number in numbers)
    if not fractions and column.lower() not in SURELY_SCORES:
        return None
    return TaskGuess(
        task="regression",
        text_column=texts[0],
        pair_column=texts[1],
        label_column=column,
        reason=f"{'pairs of texts' if texts[1] else 'texts'} and numbers ({column})",
    )


def _label(look: DataLook) -> TaskGuess | None:
    texts = _texts(look)
    column = _find(look, LABEL_COLUMNS)
    if texts is None or column is None or column in texts:
        return None
    labels = _distinct(look, column)
    if not 0 < len(labels) <= MOST_LABELS:
        return None
    return TaskGuess(
        task="sequence-classification",
        text_column=texts[0],
        pair_column=texts[1],
        label_column=column,
        labels=labels,
        reason=f"{'pairs of texts' if texts[1] else 'texts'} and labels ({column})",
    )


def _distinct(look: DataLook, column: str) -> tuple[str, ...]:
    """The labels of a column as text, sorted: numbers by value. Empty if values are no labels, such as lists."""
    values = look.values(column)
    if not all(isinstance(value, str | int) for value in values):
        return ()
    return tuple(sorted({str(value) for value in values}, key=lambda text: (_number(text) or 0.0, text)))


def _is_text(look: DataLook, column: str) -> bool:
    return all(isinstance(value, str) for value in look.values(column))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except ValueError:
        return None
