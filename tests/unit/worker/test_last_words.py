"""What a worker says of an error, and what it keeps of it."""

import weakref

from coterie.errors import CoterieError, NetworkError
from coterie.worker.last_words import without_frames


class Weights:
    """Stands for what a stage's compute thread holds."""


def test_an_error_that_is_kept_does_not_keep_the_variables_of_the_frames_that_it_and_its_causes_went_through():
    held = []

    def receive():
        weights = Weights()
        held.append(weakref.ref(weights))
        raise ConnectionResetError("gone")

    def compute():
        weights = Weights()
        held.append(weakref.ref(weights))
        try:
            receive()
        except ConnectionResetError as error:
            raise NetworkError("the peer closed the link") from error

    try:
        compute()
    except CoterieError as error:
        kept = without_frames(error)
    assert [ref() for ref in held] == [None, None]
    assert kept.message == "the peer closed the link"


def test_errors_that_are_each_others_causes_come_to_an_end():
    first, second = NetworkError("the peer is gone"), NetworkError("the link is closed")
    first.__cause__, second.__cause__ = second, first
    assert without_frames(first) is first
