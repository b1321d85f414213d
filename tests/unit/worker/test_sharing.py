"""How a device shares layers among backends: what it measures and says, and what it does when one is gone."""

import msgspec
import pytest
import torch
from transformers import BertConfig, LlamaConfig, MambaConfig

from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.torch_backend import TorchBackend
from coterie.cluster.messages import ProfileRequest
from coterie.heads.pool import BackendPool
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import RandomKey, build_stage
from coterie.planner.head_allocation import allocate
from coterie.planner.head_drift import LONGEST_WINDOW_JOBS, WINDOW_JOBS, Dealt
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, ShareTiming
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare
from coterie.profiles.model_profile import ModelProfile
from coterie.worker.settings import WorkerSettings
from coterie.worker.sharing import DeviceSharing, StageSharing

GROUPS, NEURONS = 4, 24
SIZES = {"hidden_size": 16, "num_attention_heads": GROUPS, "intermediate_size": NEURONS, "num_hidden_layers": 2}
BERT = ModelSpec(
    config_json=BertConfig(**SIZES, vocab_size=20, num_labels=2).to_json_string(),
    auto_class="AutoModelForTokenClassification",
)


MODEL = ModelProfile(key="k", name="tiny", layers=(), tied=False, tied_bytes=0, memory_tokens=4, typical_tokens=4)
"""Figures of a model, of which only the tokens matter here."""


def part(total, first):
    shares = tuple(
        PartShare(backend=name, count=count, predicted_s=1.0)
        for name, count in (("torch", first), ("numpy", total - first))
    )
    return PartAllocation(shares=shares, predicted_s=1.0, best_single_s=2.0, best_single="torch")


HALVES = HeadAllocation(attention=part(GROUPS, 2), neurons=part(NEURONS, 12))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A device with torch and NumPy, asked for what it would do with a model; and what it said."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    made = []

    def measure(spec, **settings):
        said = []
        sharing = DeviceSharing(WorkerSettings(name="board", backends=("torch", "numpy"), **settings), said.append)
        made.append(sharing)
        sharing.measure(ProfileRequest(spec=spec, model=MODEL, rows=(1, 2)))
        return sharing, said

    yield measure
    for sharing in made:
        sharing.close()


def test_heads_and_neurons_are_measured_and_the_figures_told(measured):
    sharing, said = measured(BERT)
    assert "compute backends: torch (processor), numpy (processor)" in said
    assert any(line.startswith("measuring backends, 1 of ") for line in said)
    for words in ("heads: ", "neurons: "):
        assert any(note.startswith(words) for note in sharing.notes)


def test_a_prescribed_allocation_is_not_measured_and_its_memory_counted_all_the_same(measured):
    sharing, said = measured(BERT, allocation=HALVES)
    assert sharing.allocation == HALVES
    assert not any("measuring" in line for line in said)
    columns = 4 * 16 * (16 + NEURONS)  # of both second products: cut out for the two that share them
    assert sharing.memory == SharedMemory(copies=columns, working=2 * 4 * (4 * 16 * 16 + 3 * 16))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, vocab_size=20), "mamba blocks are not among"),
        (LlamaConfig(**SIZES, vocab_size=20, hidden_act="tanh"), "the activation of its neurons (Tanh) is none"),
    ],
)
def test_what_cannot_be_shared_is_said(measured, config, reason):
    sharing, _ = measured(ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM"))
    assert any(reason in note for note in sharing.notes)
    assert sharing.allocation.neurons is None


def step(stage, number):
    """A forward and a backward of a block; its output."""
    draw = torch.Generator().manual_seed(number)
    hidden = torch.randn(2, 5, 16, generator=draw).requires_grad_()
    ids = torch.zeros(2, 5, dtype=torch.long)
    key = RandomKey(seed=1, step=number, micro_batch=0)
    output = stage.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, hidden, key)
    output.sum().backward()
    return output.detach()


class Mortal(NumpyBackend):
    """Ends when it is told to."""

    gone = False

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        outputs, saved = super().forward(loaded, inputs, inner=inner, keep=keep)
        return (msgspec.structs.replace(outputs, y=outputs.y * float("nan")) if self.gone else outputs), saved


def timings(total):
    return tuple(
        ShareTiming(count=count, seconds=count / total, fused_s=count / total) for count in range(1, total + 1)
    )


def test_the_share_of_a_backend_that_is_gone_is_dealt_out_anew_between_steps_and_results_stay():
    numpy = Mortal()
    backends = [
        BackendProfile(name=n, device="processor", attention=timings(GROUPS), neurons=timings(NEURONS), threads=1)
        for n in ("torch", "numpy")
    ]
    profiles = DeviceBackends(key="k", groups=GROUPS, neurons=NEURONS, rows=2, tokens=5, backends=tuple(backends))
    stages = [build_stage(BERT, 1, 2, StandInWeights(BERT)) for _ in range(2)]
    said = []
    with BackendPool([TorchBackend(), numpy]) as pool:
        allocation = allocate(profiles)
        assert len(allocation.attention.shares) == 2
        sharing = StageSharing(
            stages[0], pool, allocation, Dealt(profiles=profiles, allocation=allocation), said.append
        )
        assert said == [
            "heads of 1 block are shared: torch 2, numpy 2",
            "neurons of 1 block are shared: torch 12, numpy 12",
        ]
        said.clear()
        for number in range(4):
            numpy.gone = number >= 2
            torch.testing.assert_close(step(stages[0], number), step(stages[1], number), rtol=1e-5, atol=1e-6)
            busy, failed = sharing.since_last()
            assert set(busy) == {"torch", "numpy"}
            assert list(failed) == (["numpy"] if number == 2 else [])
            assert (busy["numpy"] > 0) == (number < 3)
            sharing.step_ended(is_idle=number != 2)  # what is in flight keeps its shares
            assert bool(said) == (number == 3)
    assert said[0].startswith("heads and neurons are dealt out anew")
    assert said[1:] == ["torch computes alone from now on"]


@pytest.fixture
def shared():
    """A block that two equal backends share, with what can be told of the work they did; and what was said."""
    backends = tuple(
        BackendProfile(name=n, device="processor", attention=timings(GROUPS), neurons=timings(NEURONS), threads=1)
        for n in ("torch", "numpy")
    )
    profiles = DeviceBackends(key="k", groups=GROUPS, neurons=NEURONS, rows=2, tokens=5, backends=backends)
    said = []
    with BackendPool([TorchBackend(), NumpyBackend()]) as pool:

        def begin(profiles):
            allocation = allocate(profiles)
            stage = build_stage(BERT, 1, 2, StandInWeights(BERT))
            return StageSharing(stage, pool, allocation, Dealt(profiles=profiles, allocation=allocation), said.append)

        def worked(jobs, **seconds_a_job):
            for name, each_s in seconds_a_job.items():
                pool.usage[name].jobs += jobs
                pool.usage[name].busy_s += jobs * each_s

        yield profiles, begin, worked, said


def test_a_backend_that_is_slowed_late_in_a_run_is_noticed_as_soon_as_in_an_early_one(shared):
    profiles, begin, worked, said = shared
    sharing = begin(profiles)
    sharing.step_ended(is_idle=True)
    said.clear()
    for each_s in (0.25,) * 30 + (0.75,) * 2:
        worked(LONGEST_WINDOW_JOBS, torch=0.25, numpy=each_s)
        sharing.step_ended(is_idle=True)
        assert bool(said) == (each_s > 0.25)
    assert said[0] == "heads and neurons are dealt out anew: backends take other times than were measured"


def test_a_part_that_torch_computes_alone_since_shares_were_dealt_out_anew_is_no_drift(shared):
    profiles, begin, worked, said = shared
    costly = tuple(msgspec.structs.replace(t, seconds=max(t.seconds, 0.9)) for t in timings(GROUPS))
    mixed = msgspec.structs.replace(
        profiles,
        backends=(profiles.backends[0], msgspec.structs.replace(profiles.backends[1], attention=costly)),
    )
    sharing = begin(mixed)
    sharing.step_ended(is_idle=True)
    # numpy takes twice as long: no share of the heads pays any more.
    worked(WINDOW_JOBS, torch=0.25, numpy=0.9)
    sharing.step_ended(is_idle=True)
    assert said[-1].startswith("neurons of 1 block are shared"), said
    said.clear()
    sharing.step_ended(is_idle=True)
    # Both take as long for their neurons; the heads are none of the pool's jobs any more.
    worked(WINDOW_JOBS, torch=1.0, numpy=1.0)
    sharing.step_ended(is_idle=True)
    assert said == []
