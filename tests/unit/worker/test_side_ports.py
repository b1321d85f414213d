"""Activations on their way to the server: as many bytes as the formula counts, and hardly more on the wire."""

import asyncio

import pytest
import torch

from coterie.cluster.side_messages import TAPS, TRAIN, SideStage
from coterie.ids import RunId, WorkerId
from coterie.jobs.side_spec import SideSpec
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.planner.side_bytes import taps_bytes
from coterie.transport.limits import Limits
from coterie.transport.memory_link import memory_pair
from coterie.transport.wire import frame_head
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import Place
from coterie.worker.outbox import Outbox
from coterie.worker.side_ports import SidePorts

DEVICE, SERVER = WorkerId("device-0123456789abcdef"), WorkerId("server-0123456789abcdef")
MINILM, SMOLLM2 = (6, 384), (30, 576)
MOST_OF_COUNTED = 1.02


def make_place():
    memory = MemoryEstimate(
        base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
    )
    stage = StageAssignment(
        stage=0,
        worker=DEVICE,
        device_name="device",
        first_unit=0,
        stop_unit=31,
        in_flight=1,
        recompute=False,
        allocator="default",
        send_codec="fp32",
        memory=memory,
        memory_limit=0,
        forward_s=0,
        backward_s=0,
        update_s=0,
        send_s=0,
    )
    plan = Plan(
        version=1,
        schedule="forward",
        objective="time",
        batch_rows=16,
        micro_batches=1,
        units=32,
        stages=(stage,),
        left_out=(),
        predicted_step_s=0,
        one_device_step_s=0,
        one_device_peak=0,
    )
    return Place(run=RunId("run-20260101-000000-0123"), worker=DEVICE, plan=plan, stage=0, tied_peer=WorkerId(""))


async def send(taps, upload):
    """What the ports count of a micro-batch's activations, and the frame that leaves them."""
    near, far = memory_pair()
    outbox = Outbox(near, asyncio.get_running_loop(), limit_bytes=1 << 30)
    side = SideStage(side=SideSpec(upload=upload), server=SERVER)
    ports = SidePorts(make_place(), side, Mailbox(), lambda _worker: outbox)
    counted = ports.put_taps(1000, TRAIN, taps)
    frame = await far.receive()
    outbox.cancel()
    await asyncio.sleep(0)
    return counted, frame


@pytest.mark.parametrize("upload", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(("shape", "tokens"), [(MINILM, 16), (MINILM, 400), (SMOLLM2, 16), (SMOLLM2, 80)])
def test_the_wire_carries_what_the_formula_counts_and_at_most_two_percent_more(shape, tokens, upload):
    """Micro-batches of 16 classified rows, of tagged sentences and of summaries."""
    layers, width = shape
    taps = {layer: torch.randn(tokens, width) for layer in range(1, layers + 1)}
    (payload, whole), frame = asyncio.run(send(taps, upload))
    assert frame.header.kind == TAPS
    assert payload == taps_bytes(tokens, layers, width, upload)
    assert whole == len(frame_head(frame, Limits())) + sum(
        len(memoryview(buffer).cast("B")) for buffer in frame.buffers
    )
    assert payload < whole <= MOST_OF_COUNTED * payload
