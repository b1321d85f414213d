"""From what data and model look like to a short recipe with the reason above every value.

The rules, each a starting point that the user may change in the file:

- method: `full` where all parameters, their gradients and AdamW's two moments (16 bytes a parameter) fit an ordinary
  laptop: encoders up to 200 M parameters, decoders up to 30 M. Otherwise `lora`.
- learning rate: 5e-5 for full fine-tuning, 1e-4 for models narrower than 512; 5e-4 for LoRA, 2e-4 from 1,000 M
  parameters on; 1e-3 where only biases or the output layer are trained.
- rows per step: 16, and 8 where text is generated, whose rows are longer.
- longest row: memory is planned for it, so at most 512 tokens where the data hold longer rows.
- weights are stored in fewer bits only if that was asked for.
"""

import textwrap
from collections.abc import Mapping, Sequence

import msgspec

from coterie.config.data_look import DataLook
from coterie.config.fields import recipe_fields
from coterie.config.guess import TaskGuess
from coterie.config.model_look import ModelLook
from coterie.config.recipe import LocalWorker, Recipe
from coterie.config.writing import toml_table, toml_value
from coterie.errors import UnsupportedModelError

GENERATING = ("causal-lm", "summarization")
"""Tasks whose answer is text: they need a decoder."""

FULL_UP_TO_PARAMETERS: Mapping[str, int] = {"encoder": 200_000_000, "decoder": 30_000_000}
NARROW_WIDTH = 512
LARGE_PARAMETERS = 1_000_000_000
GENERATING_ROWS = 8
LONGEST_ROW_TOKENS = 512
WARMUP_RATIO = 0.1

CHARACTERS_PER_TOKEN = 4
"""Of English text, about, in the usual vocabularies of sub-words."""

TOKENS_PER_WORD = 1.4
_COMMENT_WIDTH = 110


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a recipe by dotted key, and why some of them are as they are."""

    values: dict[str, object]
    comments: dict[str, str]


def check_fit(task: str, model: ModelLook | None, name: str) -> None:
    """Refuse a model that cannot do the task.

    Raises:
        UnsupportedModelError: An encoder is to write text.
    """
    if model is not None and model.direction == "encoder" and task in GENERATING:
        raise UnsupportedModelError(
            f"{name} is an encoder ({model.model_type}), which labels texts and cannot write them: no {task}",
            hint="give a decoder such as GPT-2, Llama, Qwen or SmolLM2, or choose a task with labels",
        )


def choose_method(model: ModelLook | None, task: str) -> tuple[str, str]:
    """`full` or `lora`, and why."""
    if model is None or model.parameters is None:
        decoder = task in GENERATING or (model is not None and model.direction == "decoder")
        return ("lora", "adapters: the model's size is not known") if decoder else ("full", "")
    millions = f"{model.parameters / 1e6:.0f} M parameters"
    if model.parameters <= FULL_UP_TO_PARAMETERS[model.direction]:
        return "full", f"small enough to train whole: {millions}"
    return "lora", f"adapters on frozen weights: {millions} in full would take 16 bytes each"


def decide(look: DataLook, guess: TaskGuess, model: ModelLook | None, given: Mapping[str, object]) -> Draft:
    """Everything that a recipe should say for this task, these data and this model.

    Args:
        look: The data.
        guess: The task and its columns, confirmed by the user or not.
        model: The model; None if it is a name on the hub.
        given: What the user decided, by dotted key: taken as it is.
    """
    values: dict[str, object] = {"data.task": guess.task}
    comments = {"data.task": guess.reason}
    if model is not None:
        comments["model.name"] = model.describe()
    values |= {f"data.{split}": path for split, path in look.others.items()}
    if look.layout == "rows":
        columns = {"text_column": guess.text_column, "pair_column": guess.pair_column}
        columns["label_column"] = guess.label_column
        values |= {f"data.{name}": column for name, column in columns.items() if column is not None}
    if guess.labels:
        comments["data.label_column"] = _labels_text(guess.labels)
    if guess.chats and model is not None and not model.chat_template:
        comments["data.text_column"] = (
            "conversations; the model's tokenizer has no chat template, so turns are written plainly: a model that was "
            "trained to chat would bring its own"
        )
    tokens = longest_row_tokens(look, guess)
    if tokens > LONGEST_ROW_TOKENS and (model is None or model.context is None or model.context > LONGEST_ROW_TOKENS):
        values["data.max_tokens"] = LONGEST_ROW_TOKENS
        comments["data.max_tokens"] = (
            f"the longest row looked at has about {tokens} tokens; memory is planned for the longest row"
        )
    _decide_training(guess.task, model, given, values, comments)
    merged = {**values, **given}
    return Draft(values=merged, comments={key: text for key, text in comments.items() if key in merged})


def longest_row_tokens(look: DataLook, guess: TaskGuess) -> int:
    """About how many tokens the longest row has, among those looked at. Nothing is tokenized."""
    if look.layout == "tagged words":
        return round(look.longest_words * TOKENS_PER_WORD)
    if guess.task == "token-classification":
        words = look.values(guess.text_column or "")
        return round(max((len(value) for value in words if isinstance(value, list)), default=0) * TOKENS_PER_WORD)
    names = [guess.text_column or "text", guess.pair_column]
    if guess.task in GENERATING:
        names.append(guess.label_column)
    lengths = (sum(_characters(row.get(name)) for name in names if name) for row in look.rows)
    return max(lengths, default=0) // CHARACTERS_PER_TOKEN


def draft_toml(recipe: Recipe, draft: Draft, head: Sequence[str] = ()) -> str:
    """The recipe file: only the keys of the draft, in the order of the reference, comments above them.

    Args:
        recipe: The draft's values, checked and converted.
        draft: Which keys to write, and the comments.
        head: Lines of the comment at the top.
    """
    lines = [f"# {line}" if line else "#" for line in head]
    section = ""
    for field in recipe_fields():
        value = getattr(getattr(recipe, field.section), field.name)
        if field.key not in draft.values or value is None or _is_workers(value):
            continue
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        lines += [f"# {line}" for line in textwrap.wrap(draft.comments.get(field.key, ""), _COMMENT_WIDTH)]
        lines.append(f"{field.name} = {toml_value(value)}")
    text = "\n".join(lines).lstrip("\n") + "\n"
    workers = recipe.cluster.local_workers
    return text + "".join("\n[[cluster.local_workers]]\n" + toml_table(worker, LocalWorker()) for worker in workers)


def _decide_training(
    task: str,
    model: ModelLook | None,
    given: Mapping[str, object],
    values: dict[str, object],
    comments: dict[str, str],
) -> None:
    method, reason = choose_method(model, task)
    if "train.method" in given:
        method, reason = str(given["train.method"]), ""
    values["train.method"] = method
    comments["train.method"] = reason
    values["train.learning_rate"], comments["train.learning_rate"] = _learning_rate(method, model)
    values["train.warmup_ratio"] = WARMUP_RATIO
    comments["train.warmup_ratio"] = "the rate rises over the first tenth of the run"
    if "train.warmup_steps" in given:
        del values["train.warmup_ratio"]
    if task in GENERATING:
        values["train.batch_rows"] = GENERATING_ROWS
        comments["train.batch_rows"] = "rows with answers are long: fewer of them per step"


def _learning_rate(method: str, model: ModelLook | None) -> tuple[float, str]:
    if method == "full":
        if model is not None and model.width is not None and model.width < NARROW_WIDTH:
            return 1e-4, "narrow models take higher rates than the usual 5e-5"
        return 5e-5, "the usual rate for all parameters"
    if method == "lora":
        large = model is not None and model.parameters is not None and model.parameters >= LARGE_PARAMETERS
        return (2e-4 if large else 5e-4), "adapters take higher rates than whole models"
    return 1e-3, "few parameters are trained, which take high rates"


def _labels_text(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    text = f"labels: {shown}"
    if all(label.lstrip("-").isdecimal() for label in labels):
        text += '; label_names = ["…", "…"] would say what they mean'
    return text


def _characters(value: object) -> int:
    """Of a text, or of all texts in a list of messages."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(_characters(item) for item in value)
        case dict():
            return _characters(value.get("content") or value.get("value"))
    return 0


def _is_workers(value: object) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, LocalWorker) for item in value)
