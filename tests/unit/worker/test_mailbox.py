"""Frames handed over between threads."""

import threading

import pytest

from coterie.errors import NetworkError
from coterie.transport.frame import Frame, FrameHeader
from coterie.worker.mailbox import Mailbox


def frame(step):
    return Frame(FrameHeader(kind="hidden", step=step))


def test_frames_are_found_by_step_and_micro_batch_whatever_the_order():
    mailbox = Mailbox()
    later, sooner = frame(2), frame(1)
    mailbox.put(("hidden", 2, 0), later)
    mailbox.put(("hidden", 1, 0), sooner)
    assert mailbox.take(("hidden", 1, 0)) is sooner
    assert mailbox.take(("hidden", 2, 0)) is later


def test_a_duplicate_is_dropped():
    mailbox = Mailbox()
    first = frame(1)
    mailbox.put(("hidden", 1, 0), first)
    mailbox.put(("hidden", 1, 0), frame(1))
    assert mailbox.take(("hidden", 1, 0)) is first
    mailbox.fail(NetworkError("gone"))
    with pytest.raises(NetworkError):
        mailbox.take(("hidden", 1, 0))


def test_a_waiting_thread_gets_what_comes_later():
    mailbox = Mailbox()
    got = []
    thread = threading.Thread(target=lambda: got.append(mailbox.take(("gradient", 0, 3))))
    thread.start()
    expected = frame(0)
    mailbox.put(("gradient", 0, 3), expected)
    thread.join(60)
    assert got == [expected]


def test_a_failure_wakes_who_waits_and_who_comes_later():
    mailbox = Mailbox()
    errors = []

    def wait():
        try:
            mailbox.take(("gradient", 0, 0))
        except NetworkError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mailbox.fail(NetworkError("the link broke"))
    mailbox.fail(NetworkError("a second reason"))
    thread.join(60)
    wait()
    assert [error.message for error in errors] == ["the link broke", "the link broke"]
