"""Who is sent token ids and labels where they are to stay with their owner: by the bytes of the frames."""

import asyncio

import msgspec
import numpy as np
import pytest

from coterie.api.quiet import QuietObserver
from coterie.cluster.messages import BATCH, PREDICTIONS, BatchBody, Hello, unpack
from coterie.config.loading import load_recipe
from coterie.coordinator.feeding import LABELS, FedMicroBatch, audiences, batch_frame
from coterie.coordinator.generation import GENERATION_STEPS, PipelineGeneration
from coterie.coordinator.planning import make_job_plan, plan_request
from coterie.coordinator.prompt_groups import Prompts
from coterie.coordinator.session import Session
from coterie.errors import ProtocolError, RecipeError, UnsupportedModelError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.generation_spec import GenerationSpec
from coterie.planner import make_plan
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile
from coterie.tasks.examples import Example
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.join_link import JoinLink
from coterie.units import MIB

NAMES = ("phone", "mine-1", "board", "mine-2")
MINE = (WorkerId("mine-1"), WorkerId("mine-2"))


@pytest.fixture(scope="module")
def model():
    units = ("embedding", *(f"block {number}" for number in range(4)), "output layer")
    layers = tuple(
        LayerProfile(
            name=name,
            kind="k",
            parameter_bytes=MIB,
            trainable_bytes=MIB,
            largest_trainable_bytes=MIB,
            saved=AffineBytes(per_row=MIB),
            boundary=AffineBytes(per_row=1024),
            transient=AffineBytes(),
            forward_flops_per_row=1e9,
            backward_flops_per_row=2e9,
        )
        for name in units
    )
    return ModelProfile(key="m", name="m", layers=layers, tied=False, tied_bytes=0, memory_tokens=16, typical_tokens=16)


@pytest.fixture(scope="module")
def cluster():
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(worker=WorkerId(name), name=name, memory_bytes=4096 * MIB, base_bytes=MIB, flops_per_s=1e10)
            for name in NAMES
        )
    )


def recipe(**options):
    given = {"model.name": "m", "data.train": "t", "keep_data_local": True, "workers": 4, "micro_batches": 4}
    return load_recipe(None, given | {"local_workers": [f"name={name}" for name in MINE], **options})


@pytest.fixture(scope="module")
def plan(model, cluster):
    made = make_plan(plan_request(recipe(min_workers=4), model, cluster, owner_workers=MINE))
    assert len(made.stages) == 4
    return made


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    ids = rng.integers(1000, 30_000, (3, 7))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    body = BatchBody(rows=3, step_loss_tokens=9, micro_batch_loss_tokens=9, samples_seen=0)
    return FedMicroBatch(body, inputs, rng.integers(1000, 30_000, (3, 7)))


def owned(plan):
    return [stage.worker in MINE for stage in plan.stages]


def sent(plan, batch):
    """Per stage the tensors of its frame by name, and all its bytes."""
    for target in audiences(plan, owned(plan)):
        frame = batch_frame(batch, RunId("r"), plan.version, (0, 0), target)
        tensors = {spec.name: bytes(data) for spec, data in zip(frame.header.tensors, frame.buffers, strict=True)}
        yield frame.header, tensors, frame.header.body + b"".join(tensors.values())


def test_a_plan_that_keeps_data_local_says_so_and_has_its_ends_there(plan):
    assert plan.keeps_data_local
    assert {plan.stages[0].worker, plan.stages[-1].worker} == set(MINE)


def test_no_frame_to_another_device_holds_an_id_or_a_label(plan, batch):
    secret = {
        int(value).to_bytes(8, "little") for value in np.concatenate([batch.inputs["input_ids"], batch.labels]).ravel()
    }
    for header, tensors, data in sent(plan, batch):
        if header.target in MINE:
            continue
        assert LABELS not in tensors
        assert not any(value in data for value in secret)
        assert tensors["input_ids"] == bytes(3 * 7 * 8)
        assert tensors["attention_mask"] == batch.inputs["attention_mask"].tobytes()


def test_the_owners_workers_get_all_of_it(plan, batch):
    frames = {header.target: tensors for header, tensors, _ in sent(plan, batch)}
    for worker in MINE:
        assert frames[worker]["input_ids"] == batch.inputs["input_ids"].tobytes()
    last = plan.stages[-1].worker
    assert [worker for worker, tensors in frames.items() if LABELS in tensors] == [last]


def test_without_the_option_every_stage_gets_the_ids(plan, batch):
    free = msgspec.structs.replace(plan, keeps_data_local=False)
    assert all(tensors["input_ids"] == batch.inputs["input_ids"].tobytes() for _, tensors, _ in sent(free, batch))


@pytest.mark.parametrize("end", [0, -1])
def test_an_end_on_another_device_is_never_fed(plan, end):
    where = owned(plan)
    where[end] = False
    with pytest.raises(ProtocolError, match="keeps the data local"):
        audiences(plan, where)


def test_without_a_worker_of_the_owner_no_question_is_asked(model, cluster):
    with pytest.raises(RecipeError, match="none of them is there"):
        plan_request(recipe(), model, cluster)


def test_prescribed_cuts_go_to_the_owners_workers_at_both_ends(model, cluster):
    request = plan_request(recipe(cuts=(1, 3, 5)), model, cluster, owner_workers=MINE)
    assert [stage.worker for stage in request.fixed_stages] == ["mine-1", "phone", "board", "mine-2"]
    request = plan_request(recipe(cuts=(2,)), model, cluster, owner_workers=MINE)
    assert [stage.worker for stage in request.fixed_stages] == ["mine-1", "mine-2"]
    assert make_plan(request).keeps_data_local


# ---- whose workers they are


def test_only_who_shows_the_coordinators_own_token_is_the_owners_whatever_it_calls_itself(at_table):
    async def test(table):
        own = table.door.issue(own=True)
        _, stranger = await table.join("mine-1")
        await table.answer(table.hello(own, "mine-1"))
        assert stranger == "mine-1"
        assert table.members.owner_workers == ("mine-1-2",)

    at_table(test)


def test_the_link_of_local_workers_has_a_token_of_its_own(job):
    session = Session(job, QuietObserver())
    public = JoinLink(
        hosts=("127.0.0.1",), port=7, fingerprint=session.door.fingerprint, token=session.door.issue(uses=1)
    )
    own = JoinLink.from_text(session.own_link(public.to_text()))
    assert msgspec.structs.replace(own, token=public.token) == public
    assert own.token != public.token
    assert session.door.is_own(_hello(own.token))
    assert not session.door.is_own(_hello(public.token))


def _hello(token):
    fields = {"wire_version": 1, "package_version": "0", "name": "n", "device_type": "cpu", "threads": 1}
    return Hello(token=token, memory_bytes=1, host_id="h", hosts=(), port=0, fingerprint="", **fields)


def test_in_a_generation_another_device_is_told_no_prompt_and_no_new_token(at_table, plan):
    prompts = Prompts(
        examples=(Example(), Example()),
        ids=(np.array([3001, 3002, 3003]), np.array([3004])),
        stop_ids=frozenset({9}),
        pad_id=0,
        spec=GenerationSpec(max_new_tokens=2),
    )
    one_group = msgspec.structs.replace(plan, micro_batches=1, batch_rows=2)

    async def fed(link):
        """The ids of the next frame that feeds a stage."""
        while (frame := await link.receive()).header.kind != BATCH:
            pass
        specs = [spec.name for spec in frame.header.tensors]
        return np.frombuffer(frame.buffers[specs.index("input_ids")], dtype=np.int64).tolist()

    async def test(table):
        own, links = table.door.issue(uses=2, own=True), {}
        for stage in one_group.stages:
            token = own if stage.worker in MINE else table.token
            links[stage.worker] = await table.knock(table.hello(token, stage.device_name))
            assert unpack((await links[stage.worker].receive()).header.body).worker == stage.worker
        await table.members.wait_for(4, 1.0)
        task = asyncio.create_task(
            PipelineGeneration(table.members, one_group, prompts, vocabulary=5000).run(lambda _done, _all: None)
        )
        for told in ([3001, 3002, 3003, 0, 0, 3004], [4001, 4002]):
            for worker, link in links.items():
                assert await fed(link) == (told if worker in MINE else [0] * len(told))
            last = one_group.stages[-1].worker
            tokens = np.array([4001, 4002])
            spec = TensorSpec(name="predictions", dtype="int64", shape=(2,), nbytes=16)
            header = FrameHeader(kind=PREDICTIONS, source=last, target=COORDINATOR, step=step_of(told), tensors=(spec,))
            await links[last].send(Frame(header, (tokens.data.cast("B"),)))
        assert (await task) == {0: (4001, 4001), 1: (4002, 4002)}

    at_table(test)


def step_of(told):
    return GENERATION_STEPS + (0 if len(told) > 2 else 1)


def test_a_model_whose_blocks_read_token_ids_is_refused(job, cluster):
    reading = msgspec.structs.replace(
        job,
        anatomy=msgspec.structs.replace(job.anatomy, blocks_read_ids=True),
        recipe=msgspec.structs.replace(job.recipe, plan=recipe().plan),
    )
    with pytest.raises(UnsupportedModelError, match="read token ids"):
        make_job_plan(reading, cluster, owner_workers=MINE)
