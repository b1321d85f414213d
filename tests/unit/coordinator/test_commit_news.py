"""Word of commits: the newest, one at a time, and no trouble of the run's if nobody hears it."""

import asyncio

from coterie.cluster.fault_messages import Committed
from coterie.coordinator.commit_news import CommitNews
from coterie.errors import WorkerLostError


def test_while_one_word_is_under_way_only_the_newest_of_the_others_waits():
    async def work():
        told, may_go, all_told = [], asyncio.Event(), asyncio.Event()

        async def tell(message):
            told.append(message)
            await may_go.wait()
            if message.step == 4:
                all_told.set()

        news = CommitNews()
        news.post(tell, 1)
        await asyncio.sleep(0)
        for step in (2, 3, 4):
            news.post(tell, step)
        may_go.set()
        await all_told.wait()
        assert told == [Committed(step=1), Committed(step=4)]

    asyncio.run(work())


def test_a_worker_that_is_gone_does_not_keep_the_others_from_hearing_of_the_next_commit():
    async def work():
        heard = asyncio.Event()

        async def lost(_message):
            raise WorkerLostError("gone")

        async def tell(message):
            assert message == Committed(step=2)
            heard.set()

        news = CommitNews()
        news.post(lost, 1)
        await asyncio.sleep(0)
        news.post(tell, 2)
        await heard.wait()

    asyncio.run(work())
