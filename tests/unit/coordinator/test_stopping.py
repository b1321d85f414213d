"""Ctrl-C and SIGTERM: once to stop in order, twice to stop at once."""

import asyncio
import os
import signal
import threading

import pytest

from coterie.coordinator.stopping import StopRequests

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def run(test):
    async def bounded():
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals between processes")
def test_the_first_signal_is_a_request_and_the_second_cancels(number):
    async def test():
        stop = StopRequests()
        asked = asyncio.Event()

        def ask():
            asked.set()
            return True

        stop.on_first = ask

        async def work():
            with stop.listening(asyncio.current_task()):
                os.kill(os.getpid(), number)
                await asked.wait()
                assert stop.requested
                os.kill(os.getpid(), number)
                await asyncio.sleep(30)

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(work())

    run(test)


def test_without_anything_to_finish_the_first_request_cancels():
    async def test():
        stop = StopRequests()

        async def work():
            with stop.listening(asyncio.current_task()):
                stop.request()
                await asyncio.sleep(30)

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(work())

    run(test)


def test_afterwards_signals_mean_what_they_meant_before():
    before = [signal.getsignal(number) for number in SIGNALS]

    async def test():
        inside = [signal.getsignal(number) for number in SIGNALS]
        with StopRequests().listening(asyncio.current_task()):
            assert [signal.getsignal(number) for number in SIGNALS] != inside
        assert [signal.getsignal(number) for number in SIGNALS] == inside

    run(test)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_request_after_the_end_does_nothing():
    async def test():
        stop = StopRequests()
        with stop.listening(asyncio.current_task()):
            pass
        stop.request()
        stop.request()
        await asyncio.sleep(0)

    run(test)


def test_outside_the_main_thread_no_signals_are_taken_and_requests_still_work():
    outcomes = []

    async def test():
        stop = StopRequests()

        async def work():
            with stop.listening(asyncio.current_task()):
                stop.request()
                await asyncio.sleep(30)

        try:
            await asyncio.create_task(work())
        except asyncio.CancelledError:
            outcomes.append("cancelled")

    thread = threading.Thread(target=run, args=(test,))
    thread.start()
    thread.join(60)
    assert outcomes == ["cancelled"]
