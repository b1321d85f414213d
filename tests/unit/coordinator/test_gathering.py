"""Devices that are lost while they are measured: a run that can do without them begins with the others. Real links."""

import asyncio

import pytest

from coterie.cluster.messages import LinksMeasured, MeasureLinks, Profiled, ProfileRequest, StageReady, control, unpack
from coterie.config.cluster_section import ClusterSection
from coterie.coordinator.gathering import Gathering, measure_newcomer
from coterie.errors import JoinRefusedError, NetworkError, WorkerLostError
from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import DeviceProfile, LinkProfile

OTHERS_COME = ClusterSection(workers=3, join_timeout_s=60.0)


class Gathered:
    """Devices around a table, each of which answers what it is asked, but for one that goes when it is."""

    def __init__(self, table, job, goes=MeasureLinks, how="aborts"):
        self.table = table
        self.goes, self.how = goes, how
        self.notices = []
        self.asked = []
        self.claims = {}
        """By name, who a device says it is when it says what it measured."""
        self.request = ProfileRequest(spec=job.spec, model=job.model_profile, rows=(1, 2))

    def notice(self, text):
        self.notices.append(text)

    async def measure(self, *, survives=True, least=2, cluster=OTHERS_COME, deaths=None, back=False):
        members = self.table.members
        tasks = []
        for name in ("a", "b", "c"):
            link, _ = await self.table.join(name)
            tasks.append(asyncio.create_task(self.answer(name, link, goes=name == "b")))
        await members.wait_for(3, 60.0)
        if survives:
            members.go_on_without(members.by_id, 0)
        if back:
            tasks.append(asyncio.create_task(self.come_back()))
        try:
            gathering = Gathering(members, self.request, self, "token")
            return await gathering.measure_enough(least, cluster, deaths or {})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def come_back(self):
        await self.table.until(lambda: any("waiting for others" in notice for notice in self.notices))
        link, _ = await self.table.join("b")
        await self.answer("b", link, goes=False)

    async def answer(self, name, link, *, goes):
        while True:
            try:
                frame = await link.receive()
            except NetworkError:
                return
            question = unpack(frame.header.body)
            if goes and self.goes and isinstance(question, self.goes):
                if self.how == "aborts":
                    link.abort()
                    return
                await link.send(control(StageReady(stage=0, link_to_next="")))
                continue
            if isinstance(question, ProfileRequest):
                self.asked.append(name)
                worker = WorkerId(self.claims.get(name, name))
                profile = DeviceProfile(worker=worker, name=name, memory_bytes=1, base_bytes=0, flops_per_s=1.0)
                await link.send(control(Profiled(profile=profile)))
            elif isinstance(question, MeasureLinks):
                ends = [(self.claims.get(name, name), peer.worker) for peer in question.peers]
                links = tuple(
                    LinkProfile(source=WorkerId(source), target=target, bytes_per_s=1.0, latency_s=0.0)
                    for source, target in ends
                )
                await link.send(control(LinksMeasured(links=links)))


def names(cluster):
    return [device.worker for device in cluster.devices]


@pytest.mark.parametrize("how", ["aborts", "talks nonsense"])
@pytest.mark.parametrize("goes", [ProfileRequest, MeasureLinks])
def test_a_device_that_is_lost_while_it_is_measured_is_left_out(at_table, job, goes, how):
    async def test(table):
        gathered = Gathered(table, job, goes, how)
        cluster = await gathered.measure()
        assert names(cluster) == ["a", "c"]
        assert [(link.source, link.target) for link in cluster.links] == [("a", "c")]
        assert any(text.startswith("b was lost before the run began") for text in gathered.notices)
        assert "b" not in table.members.by_id
        assert not table.members.losses, "the run that begins has not lost it"

    at_table(test, seats=3)


def test_what_a_device_measured_is_taken_for_its_own_whoever_it_says_it_is(at_table, job):
    async def test(table):
        gathered = Gathered(table, job, goes=None)
        gathered.claims = {"a": "c", "b": "nobody"}
        cluster = await gathered.measure()
        assert names(cluster) == ["a", "b", "c"]
        assert cluster.links == ()

    at_table(test, seats=3)


def test_where_too_few_are_left_others_are_waited_for_and_who_was_measured_is_not_again(at_table, job):
    async def test(table):
        gathered = Gathered(table, job)
        cluster = await gathered.measure(least=3, back=True)
        assert names(cluster) == ["a", "b", "c"]
        assert len(cluster.links) == 3
        assert "waiting for others: 2 of 3 devices are left" in gathered.notices
        assert sorted(gathered.asked) == ["a", "b", "b", "c"]

    at_table(test, seats=4)


def test_nobody_waits_for_ever(at_table, job):
    async def test(table):
        cluster = ClusterSection(workers=3, join_timeout_s=-1.0)
        with pytest.raises(JoinRefusedError, match="2 of 3 workers joined"):
            await Gathered(table, job).measure(least=3, cluster=cluster)

    at_table(test, seats=3)


def test_two_that_come_at_once_in_mid_run_are_each_measured_with_their_links(at_table, job):
    """Each is also told whom to let in, for the other's sake, and answers that with no links."""

    async def test(table):
        gathered = Gathered(table, job)
        await table.join("old")
        await table.members.wait_for(1, 60.0)
        table.members.go_on_without(["old"], 1)
        tasks, found = [], []
        try:
            for name in ("a", "b"):
                link, _ = await table.join(name)
                tasks.append(asyncio.create_task(gathered.answer(name, link, goes=False)))
            news = [table.members.by_id[WorkerId(name)] for name in ("a", "b")]
            found = await asyncio.gather(
                *(measure_newcomer(table.members, member, gathered.request, "token") for member in news)
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert [names(one) for one in found] == [["a"], ["b"]]
        for name, other, one in (("a", "b", found[0]), ("b", "a", found[1])):
            assert {(link.source, link.target) for link in one.links} == {(name, "old"), (name, other)}

    at_table(test, seats=3)


def test_where_nobody_else_can_come_the_run_ends_with_how_the_lost_one_did(at_table, job):
    async def test(table):
        death = WorkerLostError("the local worker b was killed by signal 9")
        with pytest.raises(WorkerLostError, match="killed by signal 9"):
            await Gathered(table, job).measure(least=3, cluster=ClusterSection(), deaths={"b": death})

    at_table(test, seats=3)


def test_a_run_that_cannot_do_without_a_worker_ends(at_table, job):
    async def test(table):
        with pytest.raises(WorkerLostError, match="b is gone"):
            await Gathered(table, job).measure(survives=False)

    at_table(test, seats=3)
