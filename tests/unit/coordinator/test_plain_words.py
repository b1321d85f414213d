"""Words of workers that do not mean well."""

import msgspec

from coterie.cluster.fault_messages import Leaving
from coterie.cluster.messages import Failed, Goodbye, LinksMeasured, StepDone
from coterie.coordinator.plain_words import MOST_CHARACTERS, plain_words


def test_escape_sequences_line_ends_and_marks_of_direction_become_spaces():
    said = plain_words(Failed(slug="x", message="a\x1b[2Jb\r\nc\u202ed", hint="\x9b31m"))
    assert (said.message, said.hint) == ("a [2Jb  c d", " 31m")


def test_texts_in_tuples_and_tables_are_plain_too():
    assert plain_words(LinksMeasured(links=(), failures=("fine", "a\x07"))).failures == ("fine", "a ")
    table = {"torch\x1b": "why\n"}
    assert plain_words(table) == {"torch ": "why "}


def test_a_text_without_end_is_cut():
    assert len(plain_words(Leaving(reason="x" * 10**6)).reason) == MOST_CHARACTERS


def test_what_is_plain_is_left_as_it_is():
    for message in (Goodbye(reason="grüße, 你好, 🎉"), msgspec.convert(step(), StepDone)):
        assert plain_words(message) is message


def step():
    numbers = dict.fromkeys(StepDone.__struct_fields__, 1)
    return numbers | {
        "type": "StepDone",
        "grad_norm_is_global": True,
        "backend_busy_s": {"torch": 0.5},
        "backends_left_out": {"opencl": "it failed"},
    }
