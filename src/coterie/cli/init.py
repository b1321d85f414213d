"""`coterie init`: a recipe from a look at the data and the model, by asking or from flags alone."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.config.fields import recipe_fields, section_structs
from coterie.config.flags import add_recipe_flags, overrides_from
from coterie.errors import StorageError, UsageError

if TYPE_CHECKING:
    from coterie.config.data_look import DataLook
    from coterie.config.drafting import Draft
    from coterie.config.guess import TaskGuess
    from coterie.config.model_look import ModelLook

Ask = Callable[[str, str], str]
"""Asks a question with a default; the answer, or the default where nothing was typed."""

_COLUMNS = ("text_column", "pair_column", "label_column")
_NEEDED_COLUMNS = {"text_column": "the texts", "label_column": "the right answers"}
_LABELLED = ("sequence-classification", "regression", "summarization")
_NO_TERMINAL = "without a terminal flags must say it all, such as --data train.jsonl --model path/to/model"


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "init",
        help="write a recipe for your data and model",
        description="Look at training data and a model, and write a short commented recipe. On a terminal it asks for\n"
        "what flags do not say, with a guess for each answer; with --yes it takes the guesses. Every flag of\n"
        "`coterie train` may be given, and is written into the recipe.",
    )
    parser.add_argument(
        "--data",
        "--train",
        dest="data",
        metavar="PATH",
        help="training data: a file, or a folder with a file per split (train, dev, test)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("recipe.toml"), metavar="FILE", help="the recipe to write (recipe.toml)"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take every guess")
    rest = [field.key for field in recipe_fields() if field.section == "data" and field.name != "train"]
    sections = [name for name in section_structs() if name not in {"data", "run"}]
    add_recipe_flags(parser, sections=sections, keys=rest)
    return parser


def run(args: argparse.Namespace) -> int:
    """Look, ask, write."""
    from coterie.config.drafting import decide  # noqa: PLC0415 - see cli.main: what only this verb needs
    from coterie.config.loading import load_recipe  # noqa: PLC0415

    if args.output.exists() and not args.force:
        raise UsageError(f"{args.output} is there already", hint="give another --output, or --force to write over it")
    ask = None if args.json or args.yes or not sys.stdin.isatty() else _ask_on_terminal
    given = overrides_from(args)
    if args.data is not None:
        given["data.train"] = args.data
    _require(given, ask)
    load_recipe(None, _checkable(given))  # for its mistakes, all at once, before anything is read
    tell = _silent if args.json else print
    look, model = _look(given, tell)
    guess = _settle_task(look, model, given, ask)
    if ask is not None:
        _ask_training(guess, model, given, ask)
    draft = decide(look, guess, model, given)
    _write(args.output, draft)
    if args.json:
        print_json({"recipe": str(args.output), "values": draft.values, "next": f"coterie train {args.output}"})
        return 0
    tell(f"\nwritten to {args.output}: {guess.task}, {draft.values['train.method']}")
    if "data.dev" not in draft.values and not Path(str(given["data.train"])).is_dir():
        tell("no dev data: give --dev, or write dev = … below [data], to see the quality after each epoch")
    tell(f"next:\n  coterie plan {args.output}     who would run what, and whether it fits")
    tell(f"  coterie train {args.output}")
    return 0


def _checkable(given: dict[str, object]) -> dict[str, object]:
    """What can be checked before the data are read: while the task is open, nothing that only some tasks have."""
    if "data.task" in given:
        return given
    from coterie.config.checks import TASKS_WITH  # noqa: PLC0415 - see cli.main: what only this verb needs

    of_some = {f"data.{name}" for name in TASKS_WITH}
    return {key: value for key, value in given.items() if key not in of_some and not key.startswith("generate.")}


def _ask_on_terminal(question: str, default: str) -> str:
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except EOFError:
        raise UsageError("the questions were not answered to the end", hint=_NO_TERMINAL) from None
    return answer or default


def _silent(text: str) -> None:
    """Says nothing: the JSON is all that is printed."""


def _choose(ask: Ask, question: str, options: Sequence[str], default: str) -> str:
    """Ask until the answer is one of `options`."""
    while True:
        answer = ask(f"{question} ({', '.join(options)})", default)
        if answer in options:
            return answer
        print(f"  {answer!r} is none of them")


def _require(given: dict[str, object], ask: Ask | None) -> None:
    """Data and model: asked for, or else both missing ones are named at once.

    Raises:
        UsageError: They are missing, and nobody can be asked.
    """
    questions = {
        "data.train": ("--data", "training data: a file, or a folder with a file per split"),
        "model.name": ("--model", "model: a folder, or a name on the Hugging Face hub"),
    }
    missing = [key for key in questions if key not in given]
    if missing and ask is None:
        flags = " and ".join(questions[key][0] for key in missing)
        raise UsageError(f"{flags} {'is' if len(missing) == 1 else 'are'} missing", hint=_NO_TERMINAL)
    for key in missing:
        assert ask is not None
        answer = ""
        while not answer:
            answer = ask(questions[key][1], "")
        given[key] = answer


def _look(given: dict[str, object], tell: Callable[[str], None]) -> "tuple[DataLook, ModelLook | None]":
    from coterie.config.data_look import look_at_data  # noqa: PLC0415 - as above
    from coterie.config.model_look import look_at_model  # noqa: PLC0415
    from coterie.tasks.readers.options import ReadOptions  # noqa: PLC0415

    look = look_at_data(str(given["data.train"]), ReadOptions(encoding=str(given.get("data.encoding", "utf-8"))))
    tell(f"data: {look.describe()}")
    model = look_at_model(str(given["model.name"]))
    tell(f"model: {given['model.name']}: {model.describe() if model else 'a name on the hub, not looked at'}")
    return look, model


def _settle_task(look: "DataLook", model: "ModelLook | None", given: dict[str, object], ask: Ask | None) -> "TaskGuess":
    """The task and its columns: as given, as answered, or as guessed.

    Raises:
        CoterieError: Nothing fits, a named column does not exist, or the model cannot do the task.
    """
    from coterie.config import guess as guessing  # noqa: PLC0415 - as above
    from coterie.config.drafting import check_fit  # noqa: PLC0415
    from coterie.tasks.catalog import TASK_NAMES  # noqa: PLC0415

    found = guessing.guess_task(look)
    task = str(given["data.task"]) if "data.task" in given else None
    if task is None and ask is not None:
        if found is not None:
            print(f"  it looks like {found.task}: {found.reason}")
        task = _choose(ask, "task", TASK_NAMES, found.task if found else "")
    if task is None and found is None:
        raise guessing.no_guess(look, None)
    if task is not None and (found is None or found.task != task):
        found = guessing.columns_for(task, look)
    named = {name: given.get(f"data.{name}") for name in _COLUMNS} if look.layout == "rows" else {}
    columns = {name: None if column is None else str(column) for name, column in named.items()}
    if found is None and task is not None and look.layout == "rows":
        columns |= _missing_columns(look, task, columns, ask)
        if any(columns.values()):
            found = guessing.TaskGuess(task=task, reason="as asked for")
    if found is None:
        raise guessing.no_guess(look, task)
    check_fit(found.task, model, str(given["model.name"]))
    if found.needs_label_names and "data.label_names" not in given:
        given["data.label_names"] = _label_names(look, ask)
    return guessing.with_columns(found, look, columns)


def _label_names(look: "DataLook", ask: Ask | None) -> list[str]:
    """What integer tags mean.

    Raises:
        UsageError: Nobody can be asked.
    """
    if ask is None:
        raise UsageError(
            f"{look.source}: the tags are integers, and nothing says what they mean",
            hint="name them in order, such as --label-names O,B-PER,I-PER,B-LOC,I-LOC",
        )
    names: list[str] = []
    while not names:
        answer = ask("names of tags 0, 1, 2 … in order, with commas between (such as O,B-PER,I-PER)", "")
        names = [name.strip() for name in answer.split(",") if name.strip()]
    return names


def _missing_columns(
    look: "DataLook", task: str, named: dict[str, str | None], ask: Ask | None
) -> dict[str, str | None]:
    """Which columns the task reads, asked for where no guess could be made."""
    needed = [name for name in _NEEDED_COLUMNS if name == "text_column" or task in _LABELLED]
    if ask is None:
        return {}
    return {
        name: _choose(ask, f"column of {_NEEDED_COLUMNS[name]}", look.columns, "")
        for name in needed
        if named.get(name) is None
    }


def _ask_training(guess: "TaskGuess", model: "ModelLook | None", given: dict[str, object], ask: Ask) -> None:
    from coterie.config.drafting import choose_method  # noqa: PLC0415 - as above
    from coterie.config.fields import choices  # noqa: PLC0415

    if "train.method" not in given:
        methods = next(choices(field.type) for field in recipe_fields() if field.key == "train.method")
        method, reason = choose_method(model, guess.task)
        if reason:
            print(f"  {reason}")
        given["train.method"] = _choose(ask, "method", methods, method)
    if not any(key.startswith("cluster.") for key in given):
        devices = _ask_count(ask, "devices that train, this one included")
        if devices > 1:
            given["cluster.workers"] = str(devices)
            given["cluster.local_workers"] = ["name=this-machine"]


def _ask_count(ask: Ask, question: str) -> int:
    while True:
        answer = ask(question, "1")
        if answer.isdecimal() and int(answer) > 0:
            return int(answer)
        print(f"  {answer!r} is no number of devices")


def _write(path: Path, draft: "Draft") -> None:
    from coterie.config.drafting import draft_toml  # noqa: PLC0415 - as above
    from coterie.config.loading import load_recipe  # noqa: PLC0415

    text = draft_toml(
        load_recipe(None, draft.values),
        draft,
        head=(
            "Made by `coterie init`: what was found in data and model, and starting points for the rest.",
            "Every key, with its default: docs/reference/recipe.md",
        ),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", hint="give another --output") from error
