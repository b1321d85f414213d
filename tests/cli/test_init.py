"""`coterie init`: recipes from flags, from answers, and refusals that write nothing."""

import io
import json
import tomllib

import pytest

from coterie.cli.main import main
from coterie.config import load_recipe

CLASSES = '{"text": "a nice film", "label": "good"}\n{"text": "a sad film", "label": "bad"}\n'


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "train.jsonl").write_text(CLASSES)
    return tmp_path


@pytest.fixture
def typed(monkeypatch):
    def answer(*lines):
        monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))

    return answer


def test_flags_alone_make_a_recipe_that_loads(folder, told, base_model):
    code, out, _ = told("init", "--data", "train.jsonl", "--model", base_model, "--epochs", 2)
    assert code == 0
    recipe = load_recipe(folder / "recipe.toml")
    assert recipe.data.task == "sequence-classification"
    assert (recipe.data.text_column, recipe.data.label_column) == ("text", "label")
    assert (recipe.train.method, recipe.train.epochs) == ("full", 2)
    assert "coterie train recipe.toml" in out
    assert "no dev data" in out
    text = (folder / "recipe.toml").read_text()
    assert "# labels: bad, good\n" in text
    assert set(tomllib.loads(text)["train"]) == {"method", "learning_rate", "warmup_ratio", "epochs"}


def test_json_says_what_was_written(folder, answer, base_model):
    code, found = answer("init", "--data", "train.jsonl", "--model", base_model, "--output", "r.toml")
    assert (code, found["recipe"], found["next"]) == (0, "r.toml", "coterie train r.toml")
    assert found["values"]["data.task"] == "sequence-classification"
    assert (folder / "r.toml").exists()


def test_a_file_is_written_over_only_when_forced(folder, told, base_model):
    (folder / "recipe.toml").write_text("mine")
    words = ("init", "--data", "train.jsonl", "--model", base_model)
    code, _, err = told(*words)
    assert code == 2
    assert "is there already" in err
    assert (folder / "recipe.toml").read_text() == "mine"
    assert told(*words, "--force")[0] == 0
    assert load_recipe(folder / "recipe.toml")


def test_without_a_terminal_all_missing_flags_are_named(folder, told):
    code, _, err = told("init")
    assert code == 2
    assert "--data and --model are missing" in err
    assert "without a terminal" in err
    assert not (folder / "recipe.toml").exists()


def test_answers_make_a_recipe_and_an_empty_one_takes_the_guess(folder, told, typed, base_model):
    typed("", "train.jsonl", base_model, "", "knitting", "lora", "many", "3")
    code, out, _ = told("init")
    assert code == 0
    assert "it looks like sequence-classification: texts and labels (label)" in out
    assert "'knitting' is none of them" in out
    assert "'many' is no number of devices" in out
    recipe = load_recipe(folder / "recipe.toml")
    assert (recipe.data.task, recipe.train.method) == ("sequence-classification", "lora")
    assert (recipe.cluster.workers, len(recipe.cluster.local_workers)) == (3, 1)


def test_what_flags_say_is_not_asked(told, typed, base_model):
    typed()
    words = ("--task", "sequence-classification", "--method", "full", "--workers", 1)
    assert told("init", "--data", "train.jsonl", "--model", base_model, *words)[0] == 0


def test_columns_that_cannot_be_guessed_are_asked_for(folder, told, typed, base_model):
    (folder / "odd.jsonl").write_text('{"a": "x", "b": "y"}\n')
    typed("sequence-classification", "c", "a", "b", "", "")
    code, out, _ = told("init", "--data", "odd.jsonl", "--model", base_model)
    assert code == 0
    assert "'c' is none of them" in out
    recipe = load_recipe(folder / "recipe.toml")
    assert (recipe.data.text_column, recipe.data.label_column) == ("a", "b")


def test_integer_tags_are_asked_for_their_names_or_refused(folder, told, typed, base_model):
    (folder / "tags.jsonl").write_text('{"tokens": ["a", "b"], "ner_tags": [0, 1]}\n')
    words = ("init", "--data", "tags.jsonl", "--model", base_model)
    code, _, err = told(*words)
    assert code == 2
    assert "--label-names O,B-PER" in err
    typed("", "", "O, B-PER", "", "")
    assert told(*words)[0] == 0
    assert load_recipe(folder / "recipe.toml").data.label_names == ("O", "B-PER")


def test_answers_that_end_early_are_an_error(told, typed):
    typed("train.jsonl")
    code, _, err = told("init")
    assert code == 2
    assert "not answered to the end" in err


def test_yes_asks_nothing_on_a_terminal(told, typed, base_model):
    typed()
    assert told("init", "--yes", "--data", "train.jsonl", "--model", base_model)[0] == 0


@pytest.mark.parametrize(
    ("content", "words", "code", "message"),
    [
        ("", (), 4, "is empty"),
        ('{"a": "x"}\n', (), 2, "nothing says what is to be learnt"),
        ('{"text": "x"}\n', ("--task", "regression"), 4, "does not look like data for regression"),
        ('{"instruction": "x", "output": "y"}\n', (), 6, "an encoder (bert)"),
        (CLASSES, ("--label-column", "lable"), 3, "no column 'lable'"),
        (CLASSES, ("--epochs", "0"), 3, "--epochs: is '0'"),
        (CLASSES, ("--task", "poetry"), 3, "poetry"),
    ],
)
def test_refusals_say_why_and_write_nothing(folder, told, base_model, content, words, code, message):
    (folder / "data.jsonl").write_text(content)
    found, _, err = told("init", "--data", "data.jsonl", "--model", base_model, *words)
    assert found == code, err
    assert message in err
    assert "\ntry: " in err
    assert not (folder / "recipe.toml").exists()


def test_a_recipe_that_cannot_be_written_is_told(capsys, base_model):
    assert (
        main(["init", "--data", "train.jsonl", "--model", str(base_model), "--output", "no/such/r.toml", "--json"])
        == 15
    )
    assert "no/such/r.toml" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_flags_of_some_tasks_wait_for_the_task_that_the_data_show(folder, told, base_model):
    (folder / "train.jsonl").write_text(CLASSES.replace('"label"', '"more": "again", "label"'))
    words = ("init", "--data", "train.jsonl", "--model", base_model)
    assert told(*words, "--pair-column", "more")[0] == 0
    assert load_recipe(folder / "recipe.toml").data.pair_column == "more"
    code, _, err = told(*words, "--packing", "--force")
    assert code == 3
    assert 'the task is "sequence-classification"' in err
