"""The frame of the command line: verbs, errors, exit codes, JSON."""

import argparse
import inspect
import json
import subprocess
import sys

import pytest

from coterie import __version__
from coterie.cli import main as cli
from coterie.cli.failures import failure_of, report
from coterie.errors import CoterieError, DataError, InterruptedRunError, RecipeError


def all_errors() -> list[type[CoterieError]]:
    """Every kind that users can tell apart: a class without a slug of its own is its base to them."""
    found: list[type[CoterieError]] = []
    pending: list[type[CoterieError]] = [CoterieError]
    while pending:
        kind = pending.pop()
        if "slug" in vars(kind):
            found.append(kind)
        pending.extend(kind.__subclasses__())
    return found


class RaisingVerb:
    """A verb that ends with a given exception."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_parser(self, verbs):
        return verbs.add_parser("raise", help="fail", description="Fail.")

    def run(self, args: argparse.Namespace) -> int:  # noqa: ARG002 - every verb takes them
        raise self.error


@pytest.fixture
def failing(monkeypatch):
    """Runs a command that ends with an exception."""

    def run(error: BaseException, *flags: str) -> int:
        monkeypatch.setattr(cli, "VERBS", (RaisingVerb(error),))
        return cli.main(["raise", *flags])

    return run


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"coterie {__version__}\n"


@pytest.mark.parametrize("verb", ["", *cli.build_parser().verbs])
def test_help_works_and_every_argument_is_explained(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([word for word in (verb, "--help") if word])
    assert ended.value.code == 0
    assert "usage: coterie" in capsys.readouterr().out
    parser = cli.build_parser().verbs.get(verb)
    if parser is not None:
        assert parser.description
        assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (["doctr"], "there is no verb 'doctr'; did you mean doctor?"),
        (["sing"], "there is no verb 'sing'"),
        (["doctor", "--jsn"], "there is no flag --jsn; did you mean --json?"),
        (["doctor", "--js"], "there is no flag --js; did you mean --json?"),
        (["doctor", "--frobnicate=3"], "there is no flag --frobnicate"),
        (["doctor", "now"], "'now' is one argument too many"),
    ],
)
def test_a_wrong_command_line_names_the_nearest_right_one(words, message, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0] == f"error [usage]: {message}"
    assert error[1].startswith("try: `coterie")


@pytest.mark.parametrize("words", [[], ["sing"]])
def test_who_names_no_verb_is_told_the_verbs(words, capsys):
    assert cli.main(words) == 2
    hint = capsys.readouterr().err.splitlines()[1]
    assert all(verb in hint for verb in cli.build_parser().verbs)


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_a_folder_that_is_no_run_s_is_the_same_mistake_for_every_verb(verb, tmp_path, capsys):
    assert cli.main([verb, str(tmp_path / "nope")]) == 12
    assert capsys.readouterr().err.splitlines()[1] == "try: give the folder of a run, such as runs/latest"


def test_a_worker_s_memory_needs_a_unit(capsys):
    link = f"coterie://127.0.0.1:1/?fp={'a' * 64}#{'t' * 16}"
    assert cli.main(["worker", link, "--memory", "600"]) == 2
    assert "did you mean 600MiB?" in capsys.readouterr().err


def test_usage_errors_are_json_too(capsys):
    assert cli.main(["doctor", "--json", "--nonsense"]) == 2
    shown = json.loads(capsys.readouterr().out)
    assert shown["error"]["slug"] == "usage"
    assert shown["error"]["exit_code"] == 2


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.slug)
def test_every_error_prints_two_lines_and_exits_with_its_code(kind, failing, capsys):
    assert failing(kind("what happened", hint="what to do")) == kind.exit_code
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"error [{kind.slug}]: what happened\ntry: what to do\n"


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.slug)
def test_every_error_can_be_read_by_a_program(kind, failing, capsys):
    assert failing(kind("what happened", hint="what to do"), "--json") == kind.exit_code
    out, error = capsys.readouterr()
    assert error == ""
    assert json.loads(out) == {
        "error": {"slug": kind.slug, "message": "what happened", "hint": "what to do", "exit_code": kind.exit_code}
    }


def test_slugs_and_exit_codes_are_unique():
    kinds = all_errors()
    assert len({kind.slug for kind in kinds}) == len(kinds)
    assert len({kind.exit_code for kind in kinds}) == len(kinds)
    assert all(0 < kind.exit_code < 256 for kind in kinds)


def test_an_error_without_a_hint_prints_one_line(failing, capsys):
    failing(DataError("what happened"))
    assert capsys.readouterr().err == "error [data]: what happened\n"


def test_ctrl_c_ends_with_130(failing, capsys):
    assert failing(KeyboardInterrupt()) == 130 == InterruptedRunError.exit_code
    assert capsys.readouterr().err == "error [interrupted]: stopped by Ctrl-C\n"


def test_a_mistake_of_ours_is_named_as_one(failing, capsys):
    assert failing(ZeroDivisionError("division by zero")) == 70
    error = capsys.readouterr().err
    assert error.startswith("error [internal]: ZeroDivisionError: division by zero\ntry: this is a mistake in coterie")
    assert "Traceback" not in error


def test_verbose_shows_the_trace(failing, capsys):
    assert failing(RecipeError("wrong"), "--verbose") == 3
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "error [recipe]: wrong" in error


def test_a_system_exit_is_not_an_error_of_ours(failing):
    with pytest.raises(SystemExit):
        failing(SystemExit(0))


def test_report_returns_what_failure_of_says(capsys):
    error = DataError("x")
    assert report(error, as_json=False, verbose=False) == failure_of(error).exit_code
    capsys.readouterr()


def test_a_reader_that_leaves_early_is_no_error():
    command = (
        f"{sys.executable} -c 'import time; time.sleep(0.2); from coterie.cli.main import main; main()' --help | true"
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, check=False, timeout=200)
    assert done.returncode in (0, 141)
    assert done.stderr == b""


def test_every_verb_module_has_the_two_functions():
    for verb in cli.VERBS:
        assert inspect.getdoc(verb)
        assert list(inspect.signature(verb.add_parser).parameters) == ["verbs"]
        assert list(inspect.signature(verb.run).parameters) == ["args"]
