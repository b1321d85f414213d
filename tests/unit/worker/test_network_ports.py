"""The stage's seam over links: what goes where under which name, and what is refused."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest
import torch

from coterie.cluster.messages import (
    BATCH,
    CONTROL,
    GRADIENT,
    HIDDEN,
    TIED,
    BatchBody,
    GenerationBody,
    MicroBatchDone,
    NormPart,
    NormTotal,
    StepDone,
    control,
    pack,
    unpack,
)
from coterie.errors import NetworkError, NonFiniteLossError, ProtocolError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.pipeline.reports import MicroBatchReport, StepReport
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.memory_link import memory_pair
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import NORM_TOTAL, NetworkPorts, Place
from coterie.worker.outbox import Outbox

RUN = RunId("run")
WORKERS = tuple(map(WorkerId, ("first", "middle", "last")))


def make_plan(codec):
    memory = MemoryEstimate(
        base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
    )
    stages = tuple(
        StageAssignment(
            stage=index,
            worker=worker,
            device_name=worker,
            first_unit=index,
            stop_unit=index + 1,
            in_flight=1,
            recompute=False,
            allocator="default",
            send_codec=codec,
            memory=memory,
            memory_limit=0,
            forward_s=0,
            backward_s=0,
            update_s=0,
            send_s=0,
        )
        for index, worker in enumerate(WORKERS)
    )
    return Plan(
        version=4,
        schedule="flush",
        objective="time",
        batch_rows=2,
        micro_batches=2,
        units=3,
        stages=stages,
        left_out=(),
        predicted_step_s=0,
        one_device_step_s=0,
        one_device_peak=0,
    )


class Stage:
    """Ports of one stage whose links lead to where the test can look."""

    def __init__(self, stage, codec="fp32"):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.mailbox = Mailbox()
        self.outboxes, self.far = {}, {}
        for target in (COORDINATOR, *WORKERS):
            near, self.far[target] = memory_pair()
            self.outboxes[target] = self.do(self._outbox(near))
        place = Place(run=RUN, worker=WORKERS[stage], plan=make_plan(codec), stage=stage, tied_peer=WORKERS[2 - stage])
        self.ports = NetworkPorts(place, self.mailbox, self.outboxes.__getitem__)

    async def _outbox(self, link):
        return Outbox(link, self.loop, limit_bytes=1 << 20)

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def sent_to(self, target):
        return self.do(self.far[target].receive())

    async def _cancel(self):
        for outbox in self.outboxes.values():
            outbox.cancel()
        await asyncio.sleep(0)

    def close(self):
        self.do(self._cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@pytest.fixture
def make_stage():
    made = []

    def make(stage, codec="fp32"):
        made.append(Stage(stage, codec))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tensor_frame(kind, tensor, step=0, micro_batch=0):
    spec, buffer = encode(tensor, kind, "raw")
    return Frame(FrameHeader(kind=kind, step=step, micro_batch=micro_batch, tensors=(spec,)), (buffer,))


def test_hidden_states_go_to_the_next_stage_and_gradients_to_the_one_before(make_stage):
    stage = make_stage(1)
    stage.ports.put_hidden(7, 1, torch.full((2, 3), 2.0))
    stage.ports.put_gradient(7, 0, torch.full((2, 3), 3.0))
    after, before = stage.sent_to(WORKERS[2]), stage.sent_to(WORKERS[0])
    assert [frame.header.kind for frame in (after, before)] == [HIDDEN, GRADIENT]
    header = after.header
    assert (header.source, header.target, header.run, header.plan_version) == (WORKERS[1], WORKERS[2], RUN, 4)
    assert (header.step, header.micro_batch) == (7, 1)
    assert np.frombuffer(after.buffers[0], np.float32).tolist() == [2.0] * 6


def test_a_lossy_link_carries_fewer_bytes_in_both_directions_and_they_are_counted_as_sent(make_stage):
    stage = make_stage(1, codec="fp16")
    stage.ports.put_hidden(0, 0, torch.ones(4, 8))
    stage.ports.put_gradient(0, 0, torch.ones(4, 8))
    assert {frame.header.tensors[0].codec for frame in map(stage.sent_to, (WORKERS[2], WORKERS[0]))} == {"fp16"}
    stage.ports.step_done(
        StepReport(**(dict.fromkeys(StepReport.__struct_fields__[:-2], 0) | {"grad_norm_is_global": True}))
    )
    done = unpack(stage.sent_to(COORDINATOR).header.body)
    assert isinstance(done, StepDone)
    assert done.sent_next_bytes == done.sent_previous_bytes == 4 + 2 * 32
    assert done.peak_bytes > 0


def test_what_arrives_is_found_by_step_and_micro_batch_even_if_another_came_first(make_stage):
    stage = make_stage(1)
    for micro_batch in (1, 0):
        for kind in (HIDDEN, GRADIENT):
            value = torch.tensor([float(micro_batch), 1.0 if kind == HIDDEN else 2.0])
            stage.mailbox.put((kind, 5, micro_batch), tensor_frame(kind, value))
    assert stage.ports.take_hidden(5, 0).tolist() == [0.0, 1.0]
    assert stage.ports.take_gradient(5, 1).tolist() == [1.0, 2.0]


def test_a_batch_comes_with_its_labels_apart_and_its_counts(make_stage):
    stage = make_stage(2)
    body = BatchBody(rows=1, step_loss_tokens=9, micro_batch_loss_tokens=3, samples_seen=40)
    parts = [encode(torch.tensor([[1, 2]]), name, "raw") for name in ("input_ids", "labels")]
    header = FrameHeader(kind=BATCH, body=pack(body), tensors=tuple(spec for spec, _ in parts))
    stage.mailbox.put((BATCH, 3, 1), Frame(header, tuple(buffer for _, buffer in parts)))
    batch = stage.ports.take_batch(3, 1)
    assert (batch.step, batch.micro_batch, batch.rows, batch.step_loss_tokens, batch.samples_seen) == (3, 1, 1, 9, 40)
    assert set(batch.inputs) == {"input_ids"}
    assert batch.labels.tolist() == [[1, 2]]


def test_what_is_asked_of_a_generation_comes_with_its_prompts(make_stage):
    stage = make_stage(2)
    body = GenerationBody(group=4, position=0, rows=(7, 9), ended=(1,))
    parts = [encode(torch.tensor([[1, 2], [0, 3]]), "input_ids", "raw"), encode(torch.ones(2, 2), "mask", "raw")]
    header = FrameHeader(kind=BATCH, body=pack(body), tensors=tuple(spec for spec, _ in parts))
    stage.mailbox.put((BATCH, 3, 0), Frame(header, tuple(buffer for _, buffer in parts)))
    item = stage.ports.take_item(3)
    assert (item.group, item.position, item.rows, item.ended, item.is_last) == (4, 0, (7, 9), (1,), False)
    assert item.ids.tolist() == [[1, 2], [0, 3]]
    assert item.mask.shape == (2, 2)


@pytest.mark.parametrize("body", [GenerationBody(group=0, position=0, rows=(1,)), NormTotal(step=0, total=1.0)])
def test_a_generation_without_what_belongs_to_it_is_a_protocol_error(make_stage, body):
    stage = make_stage(1)
    stage.mailbox.put((BATCH, 0, 0), Frame(FrameHeader(kind=BATCH, body=pack(body))))
    with pytest.raises(ProtocolError, match="step 0 of a generation"):
        stage.ports.take_item(0)


def test_malformed_data_is_a_protocol_error(make_stage):
    stage = make_stage(1)
    stage.mailbox.put((HIDDEN, 0, 0), Frame(FrameHeader(kind=HIDDEN)))
    with pytest.raises(ProtocolError, match="0 tensors instead of one"):
        stage.ports.take_hidden(0, 0)
    stage.mailbox.put((BATCH, 0, 0), Frame(FrameHeader(kind=BATCH, body=pack(NormTotal(step=0, total=1.0)))))
    with pytest.raises(ProtocolError, match="without its description"):
        stage.ports.take_batch(0, 0)


def test_the_norm_is_added_by_the_coordinator_from_parts_in_unit_order(make_stage):
    stage = make_stage(0)
    stage.mailbox.put((NORM_TOTAL, 2, 0), control(NormTotal(step=2, total=12.5)))
    assert stage.ports.total_squared_norm(2, {3: 1.0, 1: 2.0}) == 12.5
    part = unpack(stage.sent_to(COORDINATOR).header.body)
    assert part == NormPart(step=2, squares=((1, 2.0), (3, 1.0)))


def test_both_ends_of_a_tied_matrix_add_in_the_same_order_and_get_the_same_bits(make_stage):
    torch.manual_seed(0)
    low, high = torch.randn(40, 8), torch.randn(40, 8) * 1e-3
    sums = []
    for number, (own, other) in ((0, (low, high)), (2, (high, low))):
        stage = make_stage(number)
        stage.mailbox.put((TIED, 1, 0), tensor_frame(TIED, other))
        sums.append(stage.ports.exchange_tied(1, own))
        sent = stage.sent_to(WORKERS[2 - number])
        assert sent.header.kind == TIED
        assert np.array_equal(np.frombuffer(sent.buffers[0], np.float32), own.numpy().ravel())
    assert torch.equal(*sums)


def test_reports_and_predictions_go_to_the_coordinator(make_stage):
    stage = make_stage(2)
    stage.ports.micro_batch_done(MicroBatchReport(step=1, micro_batch=2, loss_sum=3.5, loss_tokens=4))
    stage.ports.put_predictions(1, 2, torch.tensor([[5, 6]]))
    report, predictions = stage.sent_to(COORDINATOR), stage.sent_to(COORDINATOR)
    assert report.header.kind == CONTROL
    message = unpack(report.header.body)
    assert isinstance(message, MicroBatchDone)
    assert msgspec.structs.asdict(message) == {"step": 1, "micro_batch": 2, "loss_sum": 3.5, "loss_tokens": 4}
    assert predictions.header.tensors[0].dtype == "int64"


def test_a_stage_that_waits_is_woken_when_the_run_ends(make_stage):
    stage = make_stage(1)
    errors = []

    def wait():
        try:
            stage.ports.take_gradient(0, 0)
        except NetworkError as error:
            errors.append(error.message)

    thread = threading.Thread(target=wait)
    thread.start()
    stage.mailbox.fail(NetworkError("over"))
    thread.join(60)
    assert errors == ["over"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_activations_that_are_no_numbers_are_the_senders_fault(make_stage, value):
    stage = make_stage(1)
    hidden = torch.zeros(2, 3)
    hidden[1, 2] = value
    stage.mailbox.put((HIDDEN, 5, 1), tensor_frame(HIDDEN, hidden))
    with pytest.raises(NonFiniteLossError, match="activations from first are not finite in step 6, micro-batch 2") as e:
        stage.ports.take_hidden(5, 1)
    assert (e.value.step, e.value.micro_batch) == (5, 1)


def test_gradients_may_be_infinite_by_themselves_and_are_no_numbers_only_by_somebodys_fault(make_stage):
    stage = make_stage(1)
    stage.mailbox.put((GRADIENT, 0, 0), tensor_frame(GRADIENT, torch.tensor([1.0, float("inf")])))
    stage.mailbox.put((GRADIENT, 0, 1), tensor_frame(GRADIENT, torch.tensor([1.0, float("nan")])))
    assert stage.ports.take_gradient(0, 0).tolist() == [1.0, float("inf")]
    with pytest.raises(NonFiniteLossError, match="gradients from last are not finite"):
        stage.ports.take_gradient(0, 1)


def test_finite_activations_whose_sum_is_not_are_taken(make_stage):
    stage = make_stage(1)
    stage.mailbox.put((HIDDEN, 0, 0), tensor_frame(HIDDEN, torch.full((4,), 3e38)))
    assert stage.ports.take_hidden(0, 0).tolist() == torch.full((4,), 3e38).tolist()


def test_what_is_told_names_the_plan_that_it_is_about(make_stage):
    stage = make_stage(2)
    stage.ports.micro_batch_done(MicroBatchReport(step=0, micro_batch=0, loss_sum=1.0, loss_tokens=2))
    assert stage.sent_to(COORDINATOR).header.plan_version == 4
