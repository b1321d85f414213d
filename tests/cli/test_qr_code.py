"""The QR code of a join link: its modules, and where none can be shown."""

import io
import re

import pytest
import segno

from coterie.cli.console import ConsoleObserver, PlainConsole
from coterie.cli.qr_code import QUIET_MODULES, half_block_rows, qr_text

LINK = f"coterie://192.168.1.20:40123/?fp={'0123456789abcdef' * 4}&host=fd00::2&host=10.8.0.2#s3cret-token_value1234"
MODULES = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def modules_of(rows):
    return [[MODULES[block][half] for block in row] for row in rows for half in (0, 1)]


def test_the_half_blocks_hold_the_links_modules_with_a_light_border():
    found = modules_of(half_block_rows(LINK))
    expected = [list(row) for row in segno.make(LINK, error="l", micro=False).matrix]
    border = QUIET_MODULES
    assert [row[border:-border] for row in found[border : border + len(expected)]] == expected
    for row in (*found[:border], *found[border + len(expected) :]):
        assert not any(row)
    for row in found:
        assert not any((*row[:border], *row[-border:]))


def test_the_code_of_a_link_fits_a_usual_terminal():
    rows = half_block_rows(LINK)
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) <= 80
    assert len(rows) <= 32


@pytest.mark.usefixtures("wide")
def test_on_a_terminal_the_code_is_black_on_white_whatever_its_colours_are():
    shown = qr_text(LINK, Terminal()).splitlines()
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown]
    assert bare == half_block_rows(LINK)
    assert all(line.startswith("\x1b[38;5;16;48;5;231m") and line.endswith("\x1b[0m") for line in shown)


def test_a_terminal_that_is_too_narrow_is_told_so(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert re.fullmatch(
        r"\(no QR code: it is \d+ columns wide, this terminal has 40 columns; .*", qr_text(LINK, Terminal())
    )


@pytest.mark.usefixtures("wide")
def test_an_encoding_without_blocks_is_told_so():
    assert "encoding, latin-1, has no blocks" in qr_text(LINK, Terminal("latin-1"))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("as_json", "qr", "terminal", "shown"),
    [
        (False, None, True, True),
        (False, None, False, False),
        (False, True, False, True),
        (False, False, True, False),
        (True, None, True, False),
        (True, True, True, False),
    ],
)
def test_the_code_is_shown_on_a_terminal_or_if_asked_for_and_never_under_json(
    monkeypatch, as_json, qr, terminal, shown
):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr" if as_json else "sys.stdout", stream)
    ConsoleObserver(as_json=as_json, qr=qr).joinable(LINK)
    assert LINK in stream.getvalue()
    assert ("▀" in stream.getvalue()) == shown


@pytest.mark.usefixtures("wide")
def test_verbs_that_do_not_train_show_the_link_alone(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    PlainConsole(as_json=False).joinable(LINK)
    assert LINK in stream.getvalue()
    assert "▀" not in stream.getvalue()
