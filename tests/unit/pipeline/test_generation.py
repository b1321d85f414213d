"""The executor of a generation: in order, over stages in threads, and nothing kept of what has ended."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from coterie.errors import ProtocolError, WorkerLostError
from coterie.jobs.generation_spec import GenerationSpec
from coterie.jobs.model_spec import ModelSpec
from coterie.models import MappingWeights, build_stage
from coterie.models.generation import GenerationStage
from coterie.pipeline.generation import GenerationExecutor
from coterie.pipeline.generation_ports import GenerationItem

CONFIG = LlamaConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    vocab_size=31,
)
SPEC = ModelSpec(config_json=CONFIG.to_json_string(), auto_class="AutoModelForCausalLM", method="none")
FIRST = 1000
NEW_TOKENS = 3


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(CONFIG).eval()


@pytest.fixture(scope="module")
def stage(whole):
    """The whole model as one stage."""
    tensors = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    return GenerationStage(build_stage(SPEC, 0, CONFIG.num_hidden_layers + 2, MappingWeights(tensors)))


class Boxes:
    """What the stages of a test share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.content: dict[tuple, object] = {}
        self.failed = False

    def put(self, key, value):
        with self.changed:
            self.content[key] = value
            self.changed.notify_all()

    def take(self, key):
        with self.changed:
            self.changed.wait_for(lambda: key in self.content or self.failed)
            if self.failed:
                raise WorkerLostError("a test stage is gone")
            return self.content.pop(key)

    def fail(self):
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class Ports:
    """`GenerationPorts` of one stage."""

    def __init__(self, boxes: Boxes, stage: int) -> None:
        self.boxes, self.stage = boxes, stage

    def take_item(self, step):
        return self.boxes.take(("item", self.stage, step))

    def take_hidden(self, step, _micro_batch):
        return self.boxes.take(("hidden", self.stage, step))

    def put_hidden(self, step, _micro_batch, hidden):
        self.boxes.put(("hidden", self.stage + 1, step), hidden)

    def put_predictions(self, step, _micro_batch, predictions):
        self.boxes.put(("tokens", step), predictions)


class Pipeline:
    """Stages in threads, and a coordinator's way to ask them."""

    def __init__(self, whole, *cuts: int) -> None:
        tensors = {name: parameter.detach() for name, parameter in whole.named_parameters()}
        self.boxes = Boxes()
        self.executors = []
        self.step = FIRST
        for number, (first, stop) in enumerate(itertools.pairwise(cuts)):
            stage = GenerationStage(build_stage(SPEC, first, stop, MappingWeights(tensors)))
            spec = GenerationSpec(max_new_tokens=NEW_TOKENS)
            self.executors.append(GenerationExecutor(stage, Ports(self.boxes, number), spec))
        self.errors: list[Exception] = []
        self.threads = [threading.Thread(target=self._run, args=(e,)) for e in self.executors]
        for thread in self.threads:
            thread.start()

    def _run(self, executor):
        try:
            executor.run(FIRST)
        except (WorkerLostError, ProtocolError) as error:
            self.errors.append(error)

    def ask(self, **fields) -> int:
        for stage in range(len(self.executors)):
            self.boxes.put(("item", stage, self.step), GenerationItem(**fields))
        self.step += 1
        return self.step - 1

    def tokens(self, step):
        return self.boxes.take(("tokens", step))

    def end(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_groups_in_turn_get_the_tokens_that_each_would_get_alone(whole):
    pipeline = Pipeline(whole, 0, 1, 3, 4)
    prompts = [torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[9, 10]])]
    steps = [
        pipeline.ask(group=number, position=0, rows=tuple(range(len(ids))), ids=ids)
        for number, ids in enumerate(prompts)
    ]
    found = [[], []]
    for position in range(1, NEW_TOKENS + 1):
        for number in (0, 1):
            found[number].append(pipeline.tokens(steps[number]))
            if position < NEW_TOKENS:
                steps[number] = pipeline.ask(group=number, position=position, ids=found[number][-1][:, None])
    pipeline.ask(group=0, position=0, is_last=True, ended=(0, 1))
    pipeline.end()
    for ids, tokens in zip(prompts, found, strict=True):
        expected = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.stack(tokens, dim=1).tolist() == expected[:, ids.shape[1] :].tolist()


def test_what_is_kept_of_a_group_goes_when_it_has_ended(whole):
    pipeline = Pipeline(whole, 0, 2, 4)
    first = pipeline.ask(group=0, position=0, rows=(0,), ids=torch.tensor([[3, 4]]))
    pipeline.tokens(first)
    kept = [weakref.ref(executor._groups[0].kept.cache) for executor in pipeline.executors]
    second = pipeline.ask(group=1, position=0, rows=(1,), ids=torch.tensor([[5]]), ended=(0,))
    pipeline.tokens(second)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert [list(executor._groups) for executor in pipeline.executors] == [[1], [1]]
    pipeline.ask(group=0, position=0, is_last=True)
    pipeline.end()
    assert [executor._groups for executor in pipeline.executors] == [{}, {}]


def test_a_lost_neighbour_ends_a_stage_and_frees_what_it_keeps(whole):
    pipeline = Pipeline(whole, 0, 2, 4)
    pipeline.tokens(pipeline.ask(group=0, position=0, rows=(0,), ids=torch.tensor([[3, 4]])))
    pipeline.boxes.fail()
    pipeline.end()
    assert len(pipeline.errors) == 2
    assert [executor._groups for executor in pipeline.executors] == [{}, {}]


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (0, 2)])
def test_a_group_that_a_stage_does_not_have_cannot_be_continued(whole, group, rows):
    pipeline = Pipeline(whole, 0, 4)
    pipeline.tokens(pipeline.ask(group=0, position=0, rows=(0,), ids=torch.tensor([[3, 4]])))
    pipeline.ask(group=group, position=1, ids=torch.ones(rows, 1, dtype=torch.long))
    pipeline.end()
    (error,) = pipeline.errors
    assert isinstance(error, ProtocolError)


IDS = torch.tensor([[3, 4], [5, 6]])


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [
        ({"position": 0, "rows": (0, 1), "ids": IDS}, True),
        ({"position": 0, "rows": (0, 1), "ids": IDS, "mask": torch.ones_like(IDS)}, True),
        ({"position": 0, "rows": (0, 1), "ids": IDS, "mask": torch.ones(2, 3)}, False),
        ({"position": 0, "rows": (0,), "ids": IDS}, False),
        ({"position": 0, "rows": (0, 1), "ids": IDS.float()}, False),
        ({"position": 1, "ids": IDS[:, :1]}, True),
        ({"position": 1, "ids": IDS}, False),
        ({"position": 1}, False),
        ({"position": 0, "is_last": True}, True),
        ({"position": 0, "is_last": True, "ids": IDS}, False),
    ],
)
def test_an_item_whose_tensors_do_not_belong_to_it_is_seen(fields, is_whole):
    assert GenerationItem(group=0, **fields).is_whole == is_whole


class ListedPorts:
    """`GenerationPorts` of a stage that is alone: items from a list, refused as by a worker's ports, then the last."""

    def __init__(self, items: list[GenerationItem]) -> None:
        self.items, self.tokens = items, []

    def take_item(self, step):
        rest = [*self.items[step - FIRST :], GenerationItem(group=0, position=0, is_last=True)]
        if not rest[0].is_whole:
            raise ProtocolError("tensors that do not belong to it")
        return rest[0]

    def put_predictions(self, _step, _micro_batch, predictions):
        self.tokens.append(predictions)


@st.composite
def items(draw):
    """What anybody might ask for: mostly what could be, so that groups do go on."""
    rows, position = draw(st.integers(1, 2)), draw(st.sampled_from((0, 0, 1, 1, 2, NEW_TOKENS, 2**64, -1)))
    width = 1 if position else draw(st.integers(1, 3))
    tokens = st.sampled_from((*range(4), CONFIG.vocab_size - 1, CONFIG.vocab_size, -1))
    ids = torch.tensor([[draw(tokens) for _ in range(width)] for _ in range(rows)])
    masks = st.sampled_from((None, None, torch.ones_like(ids), torch.zeros_like(ids)))
    return GenerationItem(
        group=draw(st.integers(0, 1)),
        position=position,
        rows=() if position else tuple(draw(st.sampled_from((0, 5, 2**63 - 1, 2**63, -1))) for _ in range(rows)),
        ids=ids,
        mask=draw(masks),
        ended=tuple(draw(st.lists(st.integers(-1, 2), max_size=2))),
    )


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(items(), max_size=6), temperature=st.sampled_from([0.0, 1.0]))
def test_whatever_is_asked_ends_in_tokens_or_in_a_protocol_error(stage, asked, temperature):
    ports = ListedPorts(asked)
    executor = GenerationExecutor(stage, ports, GenerationSpec(max_new_tokens=NEW_TOKENS, temperature=temperature))
    try:
        executor.run(FIRST)
    except ProtocolError:
        assert len(ports.tokens) < len(asked)
    else:
        assert len(ports.tokens) == len(asked)
    assert executor._groups == {}
