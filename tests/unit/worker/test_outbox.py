"""Sending from the compute thread without waiting, until too much is unsent."""

import asyncio
import threading

import pytest

from coterie.errors import NetworkError
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.memory_link import memory_pair
from coterie.worker.outbox import Outbox

SIZE = 1000
SHORT_S = 0.1
"""Long enough for a thread that is not blocked."""


def frame(step, size=SIZE):
    specs = (TensorSpec(name="x", dtype="uint8", shape=(size,), nbytes=size),)
    return Frame(FrameHeader(kind="hidden", step=step, tensors=specs), (bytes(size),))


class Loop:
    """An event loop in a thread, as the worker has beside its compute thread, with an outbox and the link's far end."""

    def __init__(self, limit_bytes, max_unsent_bytes):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.near, self.far = memory_pair(max_unsent_bytes=max_unsent_bytes)
        self.outbox = self.do(self._make(limit_bytes))

    async def _make(self, limit_bytes):
        return Outbox(self.near, self.loop, limit_bytes=limit_bytes)

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def receive(self):
        return self.do(self.far.receive()).header.step

    async def _stop(self):
        self.outbox.cancel()
        await asyncio.sleep(0)

    def close(self):
        self.do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@pytest.fixture
def make_loop():
    made = []

    def make(limit_bytes=10 * SIZE, max_unsent_bytes=10 * SIZE):
        made.append(Loop(limit_bytes, max_unsent_bytes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_frames_arrive_in_the_order_in_which_they_were_posted(make_loop):
    loop = make_loop()
    for step in range(20):
        loop.outbox.post(frame(step, 10))
    assert [loop.receive() for _ in range(20)] == list(range(20))


def test_posting_waits_while_too_much_is_unsent_and_goes_on_when_the_link_has_taken_some(make_loop):
    loop = make_loop(limit_bytes=3 * SIZE, max_unsent_bytes=SIZE)
    posted = []

    def post_many():
        for step in range(8):
            loop.outbox.post(frame(step))
            posted.append(step)

    thread = start(post_many)
    thread.join(SHORT_S)
    assert thread.is_alive()
    assert len(posted) < 8
    assert [loop.receive() for _ in range(8)] == list(range(8))
    thread.join(60)
    assert posted == list(range(8))


def test_one_frame_beyond_the_limit_passes_alone(make_loop):
    loop = make_loop(limit_bytes=SIZE)
    loop.outbox.post(frame(0, 50 * SIZE))
    assert loop.receive() == 0


def test_a_failure_wakes_the_thread_that_waits_and_refuses_what_comes_later(make_loop):
    loop = make_loop(limit_bytes=SIZE, max_unsent_bytes=SIZE // 2)
    errors = []

    def post_until_it_fails():
        try:
            for step in range(8):
                loop.outbox.post(frame(step))
        except NetworkError as error:
            errors.append(error.message)

    thread = start(post_until_it_fails)
    thread.join(SHORT_S)
    assert thread.is_alive()
    loop.outbox.fail(NetworkError("the run is over"))
    thread.join(60)
    post_until_it_fails()
    assert errors == ["the run is over", "the run is over"]


def test_a_broken_link_is_told_at_the_next_post(make_loop):
    loop = make_loop()
    loop.do(loop.far.close())
    loop.outbox.post(frame(0))
    loop.do(loop.outbox._queue.join())
    with pytest.raises(NetworkError, match="closed"):
        loop.outbox.post(frame(1))


def test_waiting_until_all_is_sent_waits_for_a_slow_link(make_loop):
    loop = make_loop(max_unsent_bytes=SIZE)
    for step in range(4):
        loop.outbox.post(frame(step))
    done = threading.Event()

    def wait():
        loop.outbox.wait_until_sent()
        done.set()

    start(wait)
    assert not done.wait(SHORT_S)
    for _ in range(4):
        loop.receive()
    assert done.wait(60)


def test_waiting_until_all_is_sent_says_when_it_was_not(make_loop):
    loop = make_loop()
    loop.do(loop.far.close())
    loop.outbox.post(frame(0))
    with pytest.raises(NetworkError, match="closed"):
        loop.outbox.wait_until_sent()
