"""What a session says of the devices that joined, and which port it opens."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from coterie.api.quiet import QuietObserver
from coterie.coordinator import session as session_module
from coterie.coordinator.door import Door
from coterie.coordinator.session import Session, slow_in_bfloat16
from coterie.errors import WorkerLostError
from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile


def test_devices_that_are_slow_in_bfloat16_are_named_where_it_is_asked_for():
    devices = tuple(
        DeviceProfile(
            worker=WorkerId(name), name=name, memory_bytes=1, base_bytes=0, flops_per_s=1.0, bfloat16_speed=speed
        )
        for name, speed in (("old-laptop", 0.25), ("new-laptop", 3.0))
    )
    cluster = ClusterProfile(devices=devices)
    spec = ModelSpec(config_json="{}", auto_class="AutoModelForCausalLM", compute_dtype="bfloat16")
    (notice,) = slow_in_bfloat16(cluster, spec)
    assert "old-laptop computes bfloat16 at 0.25 times its float32 speed" in notice
    assert slow_in_bfloat16(cluster, ModelSpec(config_json="{}", auto_class="AutoModelForCausalLM")) == ()


class Listener(QuietObserver):
    def __init__(self):
        self.notices = []

    def notice(self, text):
        self.notices.append(text)


def test_each_device_that_joins_is_named_with_how_many_are_here_and_the_runs_own_workers_are_not(job):
    def joined(name, *, is_owner):
        member = SimpleNamespace(hello=SimpleNamespace(name=name, identity=""), is_owner=is_owner)
        session.members.by_id[WorkerId(name)] = member
        session.members.on_met(member)

    observer = Listener()
    session = Session(job, observer, door=Door())
    session._wanted = 3
    joined("local-1", is_owner=True)
    joined("phone", is_owner=False)
    assert observer.notices == ["phone has joined, 2 of 3 workers"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_port_that_waiting_workers_dial_is_opened_again_if_it_is_free(job, is_taken):
    async def test():
        with socket.create_server(("127.0.0.1", 0)) as other:
            former = other.getsockname()[1]
            if not is_taken:
                other.close()
            door, observer = Door(), Listener()
            door.opened(former)
            session = Session(job, observer, door=door)
            await session.run(lambda: asyncio.sleep(0))
            assert (door.port == former) == (not is_taken)
            assert any("workers need the new join link" in notice for notice in observer.notices) == is_taken

    asyncio.run(test())


def test_a_hand_out_that_fails_at_one_stage_ends_at_the_others_too(job, monkeypatch):
    async def test():
        ended = []

        async def send_stage(member, *_arguments, **_options):
            if member.worker == "lost":
                raise WorkerLostError("lost is gone")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(member.worker)

        async def send(_message, plan_version):
            assert plan_version == 2

        monkeypatch.setattr(session_module, "send_stage", send_stage)
        session = Session(job, QuietObserver(), door=Door())
        stages = []
        for number, name in enumerate(("slow", "lost")):
            session.members.by_id[WorkerId(name)] = SimpleNamespace(worker=WorkerId(name), send=send)
            place = {"stage": number, "first_unit": number, "stop_unit": number + 1}
            stages.append(SimpleNamespace(worker=WorkerId(name), device_name=name, **place))
        with pytest.raises(WorkerLostError):
            await session.hand_out(SimpleNamespace(stages=stages, version=2), None)
        assert ended == ["slow"], "else it would take answers that are meant for the next plan's"

    asyncio.run(test())
