"""The bar of rows: there while there is something to show, gone without a trace before anything else is printed."""

import io

from coterie.cli.console import PlainConsole
from coterie.metrics.rows_display import RowsDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_what_is_done_and_of_how_many():
    stream = Terminal()
    display = RowsDisplay(stream)
    display.show("predicted", 0, 40)
    display.show("predicted", 12, 40)
    display.hide()
    assert "12/40" in stream.getvalue()
    assert "rows predicted" in stream.getvalue()


def test_a_second_phase_takes_the_place_of_the_first():
    stream = Terminal()
    display = RowsDisplay(stream)
    display.show("predicted", 40, 40)
    display.show("answered", 1, 40)
    assert [task.visible for task in display._progress.tasks] == [False, True]
    display.hide()


def test_hiding_twice_is_no_trouble_and_showing_again_works():
    stream = Terminal()
    display = RowsDisplay(stream)
    display.hide()
    display.show("answered", 1, 2)
    display.hide()
    display.hide()
    display.show("answered", 2, 2)
    display.hide()
    assert "2/2" in stream.getvalue()


def test_a_console_shows_the_bar_in_a_terminal_only_where_it_is_wanted(monkeypatch):
    for wanted, is_shown in ((True, True), (False, False)):
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        with PlainConsole(as_json=True, shows_progress=wanted) as console:
            console.advanced("predicted", 3, 7)
        assert ("3/7" in stream.getvalue()) == is_shown


def test_a_console_in_a_pipe_shows_no_bar(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with PlainConsole(as_json=False, shows_progress=True) as console:
        console.advanced("predicted", 3, 7)
    assert stream.getvalue() == ""
