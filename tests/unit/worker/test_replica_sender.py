"""Copies of the trained state on their way out: what is sent, what is skipped, and when the next update waits."""

import asyncio
import json
import threading

import pytest
import torch
from transformers import AutoModelForTokenClassification, BertConfig

from coterie.checkpoint.shard_file import state_digest
from coterie.cluster.fault_messages import REPLICA, CopyTerms, Replicated
from coterie.cluster.messages import CONTROL, Assign, unpack
from coterie.errors import NetworkError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import MappingWeights, build_stage
from coterie.pipeline.optimizer import StageOptimizer
from coterie.planner.plan import Plan
from coterie.tensors.codecs import decode
from coterie.transport.memory_link import memory_pair
from coterie.worker.outbox import Outbox
from coterie.worker.replica_sender import ReplicaSender
from coterie.worker.trained_copies import TrainedCopies

OWN, PEER = WorkerId("own"), WorkerId("peer")
SHORT_S = 0.1
"""Long enough for a thread that is not blocked."""


@pytest.fixture(scope="module")
def spec():
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=23,
        max_position_embeddings=16,
        num_labels=3,
    )
    return ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForTokenClassification")


class Stage:
    """A stage of the last two units with its optimizer, and the receivers' ends of its links."""

    def __init__(self, spec, *, every=1, receivers=(COORDINATOR,), slow=(), live=False, folder=None):
        config = BertConfig.from_dict(json.loads(spec.config_json))
        model = AutoModelForTokenClassification.from_config(config)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.stage = build_stage(spec, 2, 4, MappingWeights(weights))
        self.optimizer = StageOptimizer(OptimizerSpec())
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.far, self.outboxes = {}, {}
        for receiver in receivers:
            near, self.far[receiver] = memory_pair(max_unsent_bytes=1 if receiver in slow else 1 << 20)
            self.outboxes[receiver] = self.do(self._outbox(near))
        plan = Plan(
            version=3,
            schedule="flush",
            objective="time",
            batch_rows=1,
            micro_batches=1,
            units=4,
            stages=(),
            left_out=(),
            predicted_step_s=0,
            one_device_step_s=0,
            one_device_peak=0,
        )
        assign = Assign(
            run=RunId("run"),
            plan=plan,
            stage=0,
            spec=spec,
            optimizer=OptimizerSpec(),
            task="token-classification",
            gradient_below=True,
            tied_peer=WorkerId(""),
            replicate_every=every,
            copies=CopyTerms(limit_bytes=1 << 20),
        )
        limit_bytes = {"clone_limit_bytes": 0} if live else {}
        self.copies = TrainedCopies(folder)
        self.copies.begin(assign)
        self.sender = ReplicaSender(self.stage, assign, OWN, self.outboxes, copies=self.copies, **limit_bytes)

    async def _outbox(self, link):
        return Outbox(link, self.loop, limit_bytes=1 << 30)

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def step(self, number):
        """An update, announced and handed out as the executor does."""
        self.sender.before_update()
        parameters = self.stage.trainable()
        self.optimizer.apply(parameters, {name: torch.ones_like(p) * number for name, p in parameters.items()}, 0.1)
        self.sender.after_step(number, parameters, self.optimizer.state())
        return {name: p.detach().clone() for name, p in parameters.items()}

    def replica(self, receiver=COORDINATOR):
        """The next whole replica that a receiver gets: step, and tensors by name."""
        tensors = {}
        for _ in range(2):
            frame = self.do(self.far[receiver].receive())
            assert (frame.header.kind, frame.header.source, frame.header.plan_version) == (REPLICA, OWN, 3)
            assert frame.header.target == receiver
            named = zip(frame.header.tensors, frame.buffers, strict=True)
            tensors |= {spec.name: decode(spec, data) for spec, data in named}
        if receiver == COORDINATOR:
            frame = self.do(self.far[receiver].receive())
            assert frame.header.kind == CONTROL
            assert unpack(frame.header.body) == Replicated(step=frame_step(frame))
            return frame_step(frame), tensors
        return frame.header.step, tensors

    async def _stop(self):
        for outbox in self.outboxes.values():
            outbox.abandon(NetworkError("over"))
        await asyncio.sleep(0)

    def close(self):
        self.do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


def frame_step(frame):
    return unpack(frame.header.body).step


@pytest.fixture
def make_stage(spec):
    made = []

    def make(**options):
        made.append(Stage(spec, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_holds(tensors, parameters):
    for name, parameter in parameters.items():
        assert torch.equal(tensors[f"param/{name}"], parameter)
        assert f"optim/{name}/exp_avg" in tensors
    assert len(tensors) == 4 * len(parameters)


def test_every_due_step_is_sent_to_every_receiver_though_the_weights_have_changed_since(make_stage):
    stage = make_stage(every=2, receivers=(COORDINATOR, PEER))
    expected = {number: stage.step(number) for number in (1, 2, 3)}
    for receiver in (COORDINATOR, PEER):
        step, tensors = stage.replica(receiver)
        assert step == 2
        assert_holds(tensors, expected[2])


def test_where_links_are_slow_replicas_get_rarer_and_never_pile_up(make_stage):
    stage = make_stage(slow=(COORDINATOR,))
    expected = {number: stage.step(number) for number in range(1, 8)}
    step, tensors = stage.replica()
    assert step == 1
    assert_holds(tensors, expected[1])
    for future in stage.sender._pending.values():
        future.result(60)
    # Steps 2, 4 were due while the first was under way: now every eighth is.
    expected |= {number: stage.step(number) for number in range(8, 10)}
    step, tensors = stage.replica()
    assert step == 8
    assert_holds(tensors, expected[8])


def test_a_state_too_large_to_copy_holds_the_next_update_until_it_is_out(make_stage):
    stage = make_stage(slow=(COORDINATOR,), live=True)
    first = stage.step(1)
    thread = threading.Thread(target=stage.step, args=(2,))
    thread.start()
    thread.join(SHORT_S)
    assert thread.is_alive()
    step, tensors = stage.replica()
    assert step == 1
    assert_holds(tensors, first)
    stage.replica()
    thread.join(60)
    assert not thread.is_alive()


def test_a_receiver_that_goes_is_done_without_unless_it_is_the_coordinator(make_stage):
    stage = make_stage(receivers=(COORDINATOR, PEER))
    stage.outboxes[PEER].fail(NetworkError("gone"))
    stage.step(1)
    assert stage.replica()[0] == 1
    stage.outboxes[COORDINATOR].fail(NetworkError("gone too"))
    for future in stage.sender._pending.values():
        future.result(60)
    with pytest.raises(NetworkError, match="gone too"):
        stage.step(2)


def test_a_slow_neighbour_misses_steps_and_the_coordinator_does_not(make_stage):
    stage = make_stage(receivers=(COORDINATOR, PEER), slow=(PEER,))
    expected = {}
    for number in (1, 2, 3):
        expected[number] = stage.step(number)
        step, tensors = stage.replica()
        assert step == number
        assert_holds(tensors, expected[number])
        stage.sender._pending[COORDINATOR].result(60)
    assert stage.replica(PEER)[0] == 1
    stage.sender._pending[PEER].result(60)
    stage.step(4)
    step, _ = stage.replica(PEER)
    assert step == 4


@pytest.mark.parametrize("live", [False, True], ids=["copied", "sent as it is"])
def test_a_stage_keeps_its_own_copies_though_the_weights_have_changed_since(make_stage, tmp_path, live):
    stage = make_stage(receivers=(COORDINATOR, PEER), live=live, folder=tmp_path)
    sent = {}
    for number in (1, 2):
        stage.step(number)
        sent[number] = stage.replica()[1]
        if not live:
            assert stage.replica(PEER)[0] == number
    assert stage.copies.own.places == {(1, 2), (1, 3), (2, 2), (2, 3)}
    for number, tensors in sent.items():
        for unit in (2, 3):
            own = {name: tensor for name, tensor in tensors.items() if ("classifier" in name) == (unit == 3)}
            assert stage.copies.own.find(number, unit, state_digest(own)) is not None
    assert not live or PEER not in stage.sender._pending, "what is large goes to the coordinator alone"
