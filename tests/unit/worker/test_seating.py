"""Two workers and a coordinator in one process: stages that give way to those of another plan in mid-run."""

import asyncio
import contextlib
import json
import threading

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, BertConfig

from coterie.checkpoint.shard_file import split_state
from coterie.cluster.fault_messages import (
    REPLICA,
    Committed,
    CopyTerms,
    Replicated,
    StandBy,
    Standing,
    TrainedWants,
)
from coterie.cluster.messages import (
    BATCH,
    CONTROL,
    STATE,
    WEIGHTS,
    Assign,
    BatchBody,
    Failed,
    NormPart,
    NormTotal,
    RunSegment,
    SaveState,
    StageReady,
    StateSent,
    StepDone,
    UnitBody,
    control,
    pack,
    unpack,
)
from coterie.coordinator.shards import ShardSource, parts_due
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.process_memory import is_out_of_memory
from coterie.models import MappingWeights, describe
from coterie.models.adapters import is_adapter, new_adapter
from coterie.pipeline.micro_batch import split_batch
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.tensors.codecs import decode, encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.memory_link import memory_pair
from coterie.worker.own_device import OwnDevice
from coterie.worker.peers import Peers
from coterie.worker.seating import Seating
from coterie.worker.settings import WorkerSettings

RUN = RunId("run")
LEFT, RIGHT = WorkerId("left"), WorkerId("right")
UNITS = 5
MICRO_BATCHES = 2
LIMIT_S = 100


def make_spec(*, lora=True, frozen_dtype="float32"):
    """BERT with three blocks, dropout on; with adapters on queries and values, or trained whole."""
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=23,
        max_position_embeddings=16,
        num_labels=3,
    )
    targets = tuple(f"bert.encoder.layer.{block}.attention.self.query" for block in range(3))
    return ModelSpec(
        config_json=config.to_json_string(),
        auto_class="AutoModelForTokenClassification",
        seed=3,
        method="lora" if lora else "full",
        lora=LoraSpec(rank=2, target_modules=targets, modules_to_save=("classifier",)) if lora else None,
        frozen_dtype=frozen_dtype,
    )


def weights_of(spec):
    torch.manual_seed(0)
    model: nn.Module = AutoModelForTokenClassification.from_config(BertConfig.from_dict(json.loads(spec.config_json)))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, shape in describe(spec).shapes.items():
        if is_adapter(name):
            tensors[name] = new_adapter(name, shape, spec.seed)
    return MappingWeights({name: tensor.clone() for name, tensor in tensors.items()})


def make_plan(version, cut, schedule="flush", workers=(LEFT, RIGHT)):
    memory = MemoryEstimate(
        base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
    )
    borders = (0, cut, UNITS) if len(workers) == 2 else (0, UNITS)
    stages = tuple(
        StageAssignment(
            stage=index,
            worker=worker,
            device_name=worker,
            first_unit=borders[index],
            stop_unit=borders[index + 1],
            in_flight=MICRO_BATCHES if schedule == "gpipe" else len(workers) - index,
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
        for index, worker in enumerate(workers)
    )
    return Plan(
        version=version,
        schedule=schedule,
        objective="time",
        batch_rows=4,
        micro_batches=MICRO_BATCHES,
        units=UNITS,
        stages=stages,
        left_out=(),
        predicted_step_s=0,
        one_device_step_s=0,
        one_device_peak=0,
    )


class State:
    """Trained tensors of every unit after some steps; a `TrainedState`."""

    def __init__(self, step, units):
        self.step = step
        self.tensors = {unit: dict(tensors) for unit, tensors in units.items()}
        self._units = {unit: split_state(tensors) for unit, tensors in units.items()}
        self.unit_of = {name: unit for unit, (parameters, _) in self._units.items() for name in parameters}

    def read(self, names):
        parameters = {name: self._units[self.unit_of[name]][0][name] for name in names}
        state = {}
        for name in names:
            fields = self._units[self.unit_of[name]][1]
            if name in fields:
                state[name] = fields[name]
        return parameters, state

    def equals(self, other):
        mine, theirs = (
            {(unit, name): tensor for unit, tensors in one.tensors.items() for name, tensor in tensors.items()}
            for one in (self, other)
        )
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


class Cluster:
    """The coordinator's side: what it sends, what it hears, and the frames that it passes on."""

    def __init__(self, spec):
        self.spec = spec
        self.source = weights_of(spec)
        self.optimizer = OptimizerSpec(learning_rate=0.05)
        self.heard = asyncio.Queue()
        self.replicas = {}
        self.norms = {}
        self.plan = None
        self.links = {}
        self.seatings = {}
        self.peers = {}
        self.sent = {}
        self.tasks = []
        self.failures = []

    async def open(self, workers=(LEFT, RIGHT)):
        for worker in workers:
            here, there = memory_pair()
            self.links[worker] = here
            device = OwnDevice(WorkerSettings(name=worker, keep_awake=False), lambda _line: None)
            peers = Peers(lambda _frame: None, lambda _worker, _error: None, "host")

            async def send(message, version, link=there, worker=worker):
                await link.send(control(message, source=worker, plan_version=version))

            seating = Seating(device, peers, there, send=send, fail=self._failed)
            seating.worker = worker
            self.seatings[worker] = seating
            self.peers[worker] = peers
            works = (self._work(there, seating), self._listen(here))
            self.tasks += [asyncio.create_task(self._told(work)) for work in works]

    def join_directly(self):
        """A direct link between the two workers."""
        for (worker, other), end in zip(((LEFT, RIGHT), (RIGHT, LEFT)), memory_pair(), strict=True):
            self.peers[worker].links[other] = end
            self.peers[worker].carriers[other] = "memory"
            self.tasks.append(asyncio.create_task(self._told(self._hear(end, self.seatings[worker]))))

    async def _hear(self, link, seating):
        while True:
            seating.take_data(await link.receive())

    async def close(self):
        for seating in self.seatings.values():
            await seating.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.failures == []

    def _failed(self, error):
        self.failures.append(error)
        self.heard.put_nowait(error)

    async def _told(self, work):
        """What goes wrong is told to whoever waits."""
        try:
            await work
        except Exception as error:
            self.heard.put_nowait(error)
            raise

    async def next(self):
        heard = await asyncio.wait_for(self.heard.get(), LIMIT_S)
        if isinstance(heard, Exception):
            raise heard
        return heard

    async def _work(self, link, seating):
        """What `Visit` does with frames."""
        while True:
            frame = await link.receive()
            if 0 < frame.header.plan_version < seating.version:
                continue
            if frame.header.kind == CONTROL:
                assert await seating.handle(unpack(frame.header.body), frame)
            elif frame.header.kind == WEIGHTS:
                await seating.take_weights(frame)
            else:
                seating.take_data(frame)

    async def _listen(self, link):
        while True:
            frame = await link.receive()
            header = frame.header
            if header.target not in ("", COORDINATOR):
                await self.links[header.target].send(frame)
            elif header.kind == REPLICA:
                unit = unpack(header.body).unit
                assert self.replicas.setdefault(header.step, {}).setdefault(unit, frame) is frame
            elif header.kind == CONTROL and isinstance(message := unpack(header.body), NormPart):
                await self._add_norm(header, message)
            else:
                self.heard.put_nowait(frame)

    async def _add_norm(self, header, message):
        parts = self.norms.setdefault((header.plan_version, message.step), {})
        parts[header.source] = message.squares
        if self.plan.version == header.plan_version and len(parts) == len(self.plan.stages):
            total = sum(square for _, square in sorted(pair for part in parts.values() for pair in part))
            await self.tell(NormTotal(step=message.step, total=total))

    async def tell(self, message):
        for stage in self.plan.stages:
            await self.links[stage.worker].send(control(message, plan_version=self.plan.version))

    async def assign(self, plan, state=None, *, held=None, replicate_every=1, ready=True, copies=None):
        """`copies`: what each worker is told of them."""
        self.plan = plan
        source = ShardSource(self.spec, self.source, state)
        trainable = describe(self.spec).trainable
        for stage in plan.stages:
            units = range(stage.first_unit, stage.stop_unit)
            held_units = tuple(unit for unit in (held or {}).get(stage.worker, ()) if unit in units)
            assign = Assign(
                run=RUN,
                plan=plan,
                stage=stage.stage,
                spec=self.spec,
                optimizer=self.optimizer,
                task="token-classification",
                gradient_below=any(trainable[: stage.first_unit]),
                tied_peer=WorkerId(""),
                resumed_step=state.step if state else 0,
                held_units=held_units,
                replicate_every=replicate_every,
                copies=(copies or {}).get(stage.worker, CopyTerms()),
            )
            await self.links[stage.worker].send(control(assign, plan_version=plan.version))
            kept = {one.unit for one in assign.copies.begins_with}
            if kept:
                (wants,) = await self.wait_for(TrainedWants, 1)
                kept -= {*wants.units}
            for unit, part in parts_due(units, held_units, kept).items():
                tensors = source.read(unit, part=part)
                self.sent[plan.version, unit] = sorted(tensors)
                if tensors or part == "all":
                    await self.links[stage.worker].send(weights_frame(plan, unit, tensors))
        if ready:
            await self.wait_for(StageReady, len(plan.stages))

    async def run(self, steps, *, feed=None):
        """Announce steps; feed those of `feed`, or all of them, and wait until they are done."""
        first, stop = steps
        await self.tell(
            RunSegment(schedule=self.plan.schedule, first_step=first, steps=stop - first, micro_batches=MICRO_BATCHES)
        )
        for step, micro_batch in feed or [(s, m) for s in range(first, stop) for m in range(MICRO_BATCHES)]:
            for stage in self.plan.stages:
                last = stage is self.plan.stages[-1]
                await self.links[stage.worker].send(batch_frame(self.plan, step, micro_batch, labelled=last))
        if feed is None:
            await self.wait_for(StepDone, (stop - first) * len(self.plan.stages))

    async def wait_for(self, kind, count):
        """So many messages of a kind; whatever else comes meanwhile is normal or fails the test."""
        found = []
        while len(found) < count:
            frame = await self.next()
            message = unpack(frame.header.body) if frame.header.kind == CONTROL else None
            assert kind is Failed or not isinstance(message, Failed), message
            assert 0 < frame.header.plan_version <= self.plan.version
            if isinstance(message, kind) and frame.header.plan_version == self.plan.version:
                found.append(message)
        return found

    async def replica(self, step):
        """The trained state after some steps, once every unit's replica is here."""
        wanted = {unit for unit, names in enumerate(describe(self.spec).trainable) if names}
        async with asyncio.timeout(LIMIT_S):
            while self.replicas.get(step, {}).keys() != wanted:
                await asyncio.sleep(0.001)
        return state_of(step, self.replicas[step].items())

    async def saved(self, step):
        """The trained state that the stages send when they are asked for it."""
        await self.tell(SaveState(step=step))
        frames, left = {}, len(self.plan.stages)
        while left:
            frame = await self.next()
            if frame.header.kind == STATE:
                frames[unpack(frame.header.body).unit] = frame
            elif isinstance(unpack(frame.header.body), StateSent):
                left -= 1
        return state_of(step, frames.items())


def state_of(step, frames):
    return State(
        step,
        {
            unit: {spec.name: decode(spec, data) for spec, data in zip(f.header.tensors, f.buffers, strict=True)}
            for unit, f in frames
        },
    )


def weights_frame(plan, unit, tensors):
    parts = [encode(tensor, name, "raw") for name, tensor in tensors.items()]
    header = FrameHeader(
        kind=WEIGHTS,
        run=RUN,
        plan_version=plan.version,
        body=pack(UnitBody(unit=unit)),
        tensors=tuple(spec for spec, _ in parts),
    )
    return Frame(header, tuple(buffer for _, buffer in parts))


def batch_frame(plan, step, micro_batch, *, labelled):
    ids = (torch.arange(20).view(4, 5) + 3 * step) % 20
    labels = torch.where(ids % 5 == 0, -100, ids % 3)
    batch = split_batch({"input_ids": ids}, labels, micro_batches=MICRO_BATCHES, step=step, samples_seen=4 * step)[
        micro_batch
    ]
    tensors = dict(batch.inputs) | ({"labels": batch.labels} if labelled else {})
    parts = [encode(tensor, name, "raw") for name, tensor in tensors.items()]
    body = BatchBody(
        rows=batch.rows,
        step_loss_tokens=batch.step_loss_tokens,
        micro_batch_loss_tokens=batch.micro_batch_loss_tokens,
        samples_seen=batch.samples_seen,
    )
    header = FrameHeader(
        kind=BATCH,
        source=COORDINATOR,
        run=RUN,
        plan_version=plan.version,
        step=step,
        micro_batch=micro_batch,
        body=pack(body),
        tensors=tuple(spec for spec, _ in parts),
    )
    return Frame(header, tuple(buffer for _, buffer in parts))


@contextlib.asynccontextmanager
async def cluster(spec):
    one = Cluster(spec)
    await one.open()
    try:
        yield one
    finally:
        await one.close()


async def undisturbed(spec, steps, schedule="flush", cut=2):
    async with cluster(spec) as one:
        await one.assign(make_plan(1, cut, schedule))
        await one.run((0, steps))
        return await one.saved(steps)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_stages_that_give_way_in_the_middle_of_a_step_go_on_from_a_replica_as_if_nothing_had_happened(lora):
    async def work():
        spec = make_spec(lora=lora)
        expected = await undisturbed(spec, 4)
        async with cluster(spec) as one:
            await one.assign(make_plan(1, 3))
            # Steps 0 and 1 are whole, of step 2 one micro-batch: both stages wait for the rest of it.
            await one.run((0, 4), feed=[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
            replica = await one.replica(2)
            before = one.replicas.pop(2)
            await one.assign(make_plan(2, 2), replica, held={LEFT: (0, 1, 2), RIGHT: (3, 4)})
            await one.run((2, 4))
            assert (await one.saved(4)).equals(expected)
            assert (await one.replica(4)).equals(expected)
            assert before
            assert 2 not in one.replicas, "nothing more came of the old plan"

    asyncio.run(work())


@pytest.mark.parametrize("schedule", ["flush", "gpipe", "stash", "2bw"])
def test_replicas_are_what_the_stages_hold_at_that_step(schedule):
    async def work():
        spec = make_spec()
        async with cluster(spec) as one:
            await one.assign(make_plan(1, 2, schedule))
            await one.run((0, 3))
            await one.wait_for(Replicated, 0)
            replicas = [await one.replica(step) for step in (1, 2, 3)]
            assert replicas[2].equals(await one.saved(3))
        for step, replica in enumerate(replicas[:2], start=1):
            assert replica.equals(await undisturbed(spec, step, schedule))

    asyncio.run(work())


@pytest.mark.parametrize("frozen_dtype", ["float32", "bfloat16"])
def test_frozen_tensors_of_units_in_both_stages_stay_where_they_are_and_others_go(frozen_dtype):
    async def work():
        async with cluster(make_spec(frozen_dtype=frozen_dtype)) as one:
            await one.assign(make_plan(1, 3))
            left = one.seatings[LEFT]._holdings
            before = {name: tensor.data_ptr() for name, tensor in left.tensors.items()}
            assert left.units == {0, 1, 2}
            assert any(name.endswith("/packed") for name in before) == (frozen_dtype == "bfloat16")
            await one.run((0, 1))
            await one.assign(make_plan(2, 2), await one.replica(1), held={LEFT: (0, 1, 2), RIGHT: (3, 4)})
            after = {name: tensor.data_ptr() for name, tensor in left.tensors.items()}
            assert left.units == {0, 1}
            assert after
            assert all(before[name] == place for name, place in after.items())
            assert {name.split(".")[3] for name in before if ".layer." in name} == {"0", "1"}
            assert {name.split(".")[3] for name in after if ".layer." in name} == {"0"}
            await one.run((1, 2))

    asyncio.run(work())


def test_a_worker_that_is_taken_to_hold_what_it_does_not_says_so_and_is_given_all_of_it_then():
    async def work():
        async with cluster(make_spec()) as one:
            await one.assign(make_plan(1, 3), held={LEFT: (1,)}, ready=False)
            (told,) = await one.wait_for(Failed, 1)
            assert "units 1" in told.message
            await one.assign(make_plan(2, 3))
            await one.run((0, 1))

    asyncio.run(work())


def test_a_worker_without_a_stage_in_the_next_plan_stands_by_and_can_be_given_one_again():
    async def work():
        spec = make_spec()
        expected = await undisturbed(spec, 3)
        async with cluster(spec) as one:
            await one.assign(make_plan(1, 3))
            await one.run((0, 3), feed=[(0, 0), (0, 1), (1, 0)])
            replica = await one.replica(1)
            await one.links[RIGHT].send(control(StandBy(plan_version=2), plan_version=2))
            await one.assign(make_plan(2, 0, workers=(LEFT,)), replica, held={LEFT: (0, 1, 2)}, ready=False)
            await one.wait_for(Standing, 1)
            await one.wait_for(StageReady, 1)
            assert not one.seatings[RIGHT].has_stage
            await one.run((1, 2))
            await one.assign(make_plan(3, 1), await one.replica(2), held={LEFT: range(5), RIGHT: (3, 4)})
            await one.run((2, 3))
            assert (await one.saved(3)).equals(expected)

    asyncio.run(work())


def test_memory_that_runs_out_ends_the_stage_and_not_the_worker(monkeypatch):
    backward = torch.autograd.backward
    calls = []

    def run_out(*arguments, **options):
        calls.append(1)
        if len(calls) == 6:
            error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
            assert is_out_of_memory(error)
            raise error
        backward(*arguments, **options)

    async def work():
        spec = make_spec()
        expected = await undisturbed(spec, 2)
        async with cluster(spec) as one:
            await one.assign(make_plan(1, 3))
            monkeypatch.setattr(torch.autograd, "backward", run_out)
            await one.run((0, 2), feed=[(0, 0), (0, 1), (1, 0), (1, 1)])
            (told,) = await one.wait_for(Failed, 1)
            assert told.slug == "out-of-memory"
            await one.assign(make_plan(2, 2), await one.replica(1), held={LEFT: (0, 1, 2), RIGHT: (3, 4)})
            await one.run((1, 2))
            assert (await one.saved(2)).equals(expected)

    asyncio.run(work())


def test_a_worker_gives_signs_of_life_while_it_looks_at_a_model_for_the_first_time(monkeypatch):
    looking, loop_ran = threading.Event(), threading.Event()

    def look(spec):
        looking.set()
        assert loop_ran.wait(10), "the event loop stood still meanwhile"
        return describe(spec)

    async def beat():
        while not looking.is_set():
            await asyncio.sleep(0.001)
        loop_ran.set()

    async def work():
        spec = make_spec()
        async with cluster(spec) as devices:
            beating = asyncio.create_task(beat())
            await devices.assign(make_plan(1, 2))
            await beating

    monkeypatch.setattr("coterie.worker.seating.describe", look)
    asyncio.run(work())


def test_words_of_an_older_plan_are_not_heard():
    async def work():
        async with cluster(make_spec()) as one:
            await one.assign(make_plan(1, 3))
            old = one.plan
            await one.assign(make_plan(2, 2))
            for worker in (LEFT, RIGHT):
                late = RunSegment(schedule="flush", first_step=7, steps=1, micro_batches=MICRO_BATCHES)
                await one.links[worker].send(control(late, plan_version=old.version))
                await one.links[worker].send(batch_frame(old, 0, 0, labelled=True))
            await one.run((0, 1))
            assert (await one.saved(1)).equals(await undisturbed(make_spec(), 1))

    asyncio.run(work())


BESIDE = {
    LEFT: CopyTerms(peer=RIGHT, sources=(RIGHT,), limit_bytes=1 << 20),
    RIGHT: CopyTerms(peer=LEFT, sources=(LEFT,), limit_bytes=1 << 20),
}


async def until_kept(seating, step, units):
    """Until a worker has its neighbour's copies of some units after a step."""
    async with asyncio.timeout(LIMIT_S):
        while not {(step, unit) for unit in units} <= seating._holdings.trained.others.places:
            await asyncio.sleep(0.001)


def begins(spec, source_state, units):
    """What a coordinator says of the trained state of some units."""
    source = ShardSource(spec, weights_of(spec), source_state)
    return CopyTerms(limit_bytes=1 << 20, begins_with=tuple(source.trained_unit(unit) for unit in units))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("falsified", [False, True], ids=["right", "one wrong"])
def test_a_worker_takes_over_its_neighbours_layers_from_its_own_copies_as_from_the_coordinator(lora, falsified):
    async def work():
        spec = make_spec(lora=lora)
        expected = await undisturbed(spec, 4)
        trained = [unit for unit, names in enumerate(describe(spec).trainable) if names]
        async with cluster(spec) as one:
            one.join_directly()
            await one.assign(make_plan(1, 3), copies=BESIDE)
            await one.run((0, 4), feed=[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
            replica = await one.replica(2)
            copies = one.seatings[LEFT]._holdings.trained
            await until_kept(one.seatings[LEFT], 2, (3, 4))
            if falsified:  # as a neighbour may, or a bad memory
                tensors = copies.others._copies[2, 4].tensors
                next(iter(tensors.values())).view(-1)[0] += 1e-6
            wanted = [4] if falsified else []
            terms = {LEFT: begins(spec, replica, trained)}
            plan = make_plan(2, 0, workers=(LEFT,))
            await one.assign(plan, replica, held={LEFT: (0, 1, 2)}, copies=terms)
            assert [
                unit
                for (version, unit), names in one.sent.items()
                if version == 2 and any(name.removeprefix("param/") in describe(spec).trainable_names for name in names)
            ] == wanted
            await one.run((2, 4))
            assert (await one.saved(4)).equals(expected)

    asyncio.run(work())


def test_copies_that_a_commit_has_made_old_are_dropped_and_so_are_those_of_others_business():
    async def work():
        spec = make_spec()
        async with cluster(spec) as one:
            one.join_directly()
            await one.assign(make_plan(1, 3), copies=BESIDE)
            await one.run((0, 2))
            left = one.seatings[LEFT]
            for step in (1, 2):
                await until_kept(left, step, (3, 4))
            copies = left._holdings.trained
            before = copies.others.places
            right = one.replicas[2][4]
            changes = (
                {"source": WorkerId("stranger")},
                {"plan_version": 7},
                {"run": RunId("other")},
                {"body": pack(UnitBody(unit=1))},
                {"body": pack(UnitBody(unit=99))},
                {"tensors": right.header.tensors[1:]},
            )
            for change in changes:
                fields = {name: getattr(right.header, name) for name in right.header.__struct_fields__}
                buffers = right.buffers[1:] if "tensors" in change else right.buffers
                left.take_data(Frame(FrameHeader(**fields | {"step": 3} | change), buffers))
            assert copies.others.places == before
            for worker in (LEFT, RIGHT):
                await one.links[worker].send(control(Committed(step=2), plan_version=1))
            async with asyncio.timeout(LIMIT_S):
                while min(copies.own.places | copies.others.places)[0] < 2:
                    await asyncio.sleep(0.001)
            assert {unit for _, unit in copies.others.places} == {3, 4}

    asyncio.run(work())


def test_without_a_direct_link_nothing_goes_to_the_neighbour():
    async def work():
        async with cluster(make_spec()) as one:
            await one.assign(make_plan(1, 3), copies=BESIDE)
            await one.run((0, 2))
            await one.replica(2)
            assert one.seatings[LEFT]._holdings.trained.others.places == set()
            assert {step for step, _ in one.seatings[LEFT]._holdings.trained.own.places} == {1, 2}

    asyncio.run(work())
