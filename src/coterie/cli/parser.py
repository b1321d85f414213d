"""The argument parser: mistakes become `UsageError`, unknown verbs and flags name their nearest neighbor."""

import argparse
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from coterie.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises instead of exiting, and never guesses from a flag's first letters."""

    def __init__(self, *args: Any, **options: Any) -> None:  # argparse's own parameters, passed on
        options.setdefault("allow_abbrev", False)
        keeps_paragraphs = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        options.setdefault("formatter_class", keeps_paragraphs)
        super().__init__(*args, **options)
        self.verbs: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            UsageError: Always.
        """
        if self.verbs:
            raise UsageError(message, hint=f"`{self.prog} --help`; the verbs are {', '.join(self.verbs)}")
        raise UsageError(message, hint=f"`{self.prog} --help` lists what is possible")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            UsageError: It is wrong; a misspelled verb or flag gets a suggestion.
        """
        if words and not words[0].startswith("-") and words[0] not in self.verbs:
            self.error(f"there is no verb {words[0]!r}{_nearest(words[0], self.verbs)}")
        found, rest = self.parse_known_args(words)
        if rest:
            self.verbs.get(getattr(found, "verb", ""), self)._refuse(rest)  # noqa: SLF001 - another instance of this class
        return found

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        word = next((part for part in rest if part.startswith("-")), rest[0])
        name = word.partition("=")[0]
        if name.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            self.error(f"there is no flag {name}{_nearest(name, flags)}")
        self.error(f"{name!r} is one argument too many")


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--verbose`, which every verb has."""
    parser.add_argument("--json", action="store_true", help="print the result, or the error, as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show log lines, and the full trace of an error")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
