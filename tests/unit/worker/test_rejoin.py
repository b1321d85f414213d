"""When a worker dials a coordinator that it has lost, and when it gives up."""

import asyncio
import itertools
import os
import random

import pytest

from coterie.clock import SystemClock
from coterie.errors import NetworkError
from coterie.transport.join_link import JoinLink
from coterie.worker import rejoin
from coterie.worker.rejoin import FIRST_PAUSE_S, JITTER, LONGEST_PAUSE_S, Redial, pauses

NOBODY = JoinLink(hosts=("127.0.0.1",), port=1, fingerprint="0" * 64, token="t")


def test_pauses_grow_up_to_a_limit_and_differ_between_workers():
    mine, other = (list(itertools.islice(pauses(random.Random(seed)), 40)) for seed in (1, 2))
    assert mine != other
    assert mine[0] <= FIRST_PAUSE_S * (1 + JITTER)
    assert max(mine) <= LONGEST_PAUSE_S * (1 + JITTER)
    assert min(mine[20:]) >= LONGEST_PAUSE_S * (1 - JITTER)


def test_a_coordinator_that_does_not_come_back_is_given_up_after_the_stated_time(monkeypatch):
    monkeypatch.setattr(rejoin, "FIRST_PAUSE_S", 0.001)
    redial = Redial(NOBODY, 0.05, SystemClock())
    with pytest.raises(NetworkError, match="did not come back within 0 s"):
        asyncio.run(redial.next_link())


def test_nobody_waits_for_a_coordinator_that_started_it_and_is_gone(monkeypatch):
    dialled = []
    monkeypatch.setattr(rejoin, "connect", dialled.append)
    redial = Redial(NOBODY, 100, SystemClock(), parent=os.getpid())  # which is certainly not its own parent
    with pytest.raises(NetworkError, match="did not come back"):
        asyncio.run(redial.next_link())
    assert dialled == []
