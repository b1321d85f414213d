"""What a worker takes from the stage beside it, which may be anybody's."""

import pytest
import torch
from transformers import BertConfig

from coterie.cluster.fault_messages import REPLICA, CopyTerms
from coterie.cluster.messages import Assign
from coterie.ids import RunId, WorkerId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models.anatomy import describe
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.worker.trained_copies import TrainedCopies
from coterie.worker.trained_state import unit_frame

OWN, BESIDE = WorkerId("own"), WorkerId("beside")
NOTHING = MemoryEstimate(
    base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
)


def stage(index, worker, first, stop):
    return StageAssignment(
        stage=index,
        worker=worker,
        device_name=worker,
        first_unit=first,
        stop_unit=stop,
        in_flight=1,
        recompute=False,
        allocator="default",
        send_codec="fp32",
        memory=NOTHING,
        memory_limit=0,
        forward_s=0,
        backward_s=0,
        update_s=0,
        send_s=0,
    )


@pytest.fixture(scope="module")
def assign():
    """The upper of two stages; the lower one trains adapters in its block and nothing in its embedding."""
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=23,
        max_position_embeddings=16,
        num_labels=3,
    )
    targets = tuple(f"bert.encoder.layer.{block}.attention.self.query" for block in range(2))
    spec = ModelSpec(
        config_json=config.to_json_string(),
        auto_class="AutoModelForTokenClassification",
        method="lora",
        lora=LoraSpec(rank=2, target_modules=targets),
    )
    plan = Plan(
        version=1,
        schedule="flush",
        objective="time",
        batch_rows=1,
        micro_batches=1,
        units=4,
        stages=(stage(0, BESIDE, 0, 2), stage(1, OWN, 2, 4)),
        left_out=(),
        predicted_step_s=0,
        one_device_step_s=0,
        one_device_peak=0,
    )
    return Assign(
        run=RunId("run"),
        plan=plan,
        stage=1,
        spec=spec,
        optimizer=OptimizerSpec(),
        task="token-classification",
        gradient_below=True,
        tied_peer=WorkerId(""),
        replicate_every=1,
        copies=CopyTerms(sources=(BESIDE,), limit_bytes=1 << 20),
    )


@pytest.fixture
def copies(assign):
    copies = TrainedCopies(None)
    copies.begin(assign)
    return copies


def frame(assign, step, unit, tensors):
    return unit_frame(REPLICA, (BESIDE, OWN), assign, (step, unit), tensors)


def adapters(assign):
    anatomy = describe(assign.spec)
    return {f"param/{name}": torch.zeros(anatomy.shapes[name]) for name in anatomy.trainable[1]}


def test_a_units_trained_tensors_are_kept(assign, copies):
    copies.take(frame(assign, 1, 1, adapters(assign)))
    assert copies.others.places == {(1, 1)}


def test_copies_of_nothing_are_not_kept_since_no_limit_would_ever_end_them(assign, copies):
    assert not describe(assign.spec).trainable[0]
    for step in range(1, 4):
        copies.take(frame(assign, step, 0, {}))
    assert copies.others.places == set()
