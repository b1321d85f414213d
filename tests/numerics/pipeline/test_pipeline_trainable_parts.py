"""Whatever is trained, several stages train it as one device does, which trains it as plain transformers or PEFT do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from coterie.jobs.model_spec import LoraSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import RandomKey
from coterie.models.adapters import clean_name
from coterie.pipeline.memory_ports import MemoryPipeline
from coterie.pipeline.single_device import SingleDeviceTrainer
from coterie.schedules import make_schedule
from coterie.schedules.figures import peak_in_flight

STEPS = 3
ADAMW = OptimizerSpec(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.0, total_samples=60)
SGD = OptimizerSpec(name="sgd", learning_rate=0.5, max_grad_norm=0.0, weight_decay=0.0, lr_schedule="constant")

LLAMA_CHOSEN = ("block 2..3", "model.norm.weight")
"""Not the whole output layer: its tied matrix has two gradients, which one stage adds up in another order."""


def adapters(variant: str) -> dict[str, Any]:
    lora = LoraSpec(variant=variant, rank=2, alpha=3, dropout=0.1, target_modules=("all-linear",))  # type: ignore[arg-type]
    return {"method": "lora", "lora": lora}


CASES: dict[str, Callable[[Any], Any]] = {
    "bert bitfit": lambda lab: lab.bert(method="bitfit"),
    "bert bitfit above a frozen embedding": lambda lab: lab.bert(method="bitfit", frozen_patterns=("embedding",)),
    "bert head": lambda lab: lab.bert(method="head"),
    "bert chosen": lambda lab: lab.bert(trainable_patterns=("block 1", "output layer")),
    "llama chosen": lambda lab: lab.llama(trainable_patterns=LLAMA_CHOSEN),
    "bert last adapters": lambda lab: lab.bert(trainable_patterns=("block 2..",), **adapters("lora")),
    **{f"bert {v}": lambda lab, v=v: lab.bert(**adapters(v)) for v in ("rslora", "dora")},
    **{f"llama {v}": lambda lab, v=v: lab.llama(**adapters(v)) for v in ("lora", "rslora", "dora")},
}
TWO_STAGES_TOO = ("bert bitfit", "bert dora", "llama chosen", "llama lora")
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_any_number_of_stages_trains_as_one_device_bit_for_bit(lab: Any, name: str) -> None:
    case = CASES[name](lab)
    expected = lab.Reference(case, ADAMW)
    start = expected.parameters()
    expected.run(STEPS)
    assert not lab.equal(expected.parameters(), start)
    for stages in (2, 3) if name in TWO_STAGES_TOO else (3,):
        got = lab.Pipeline(case, case.cuts(stages), ADAMW).run("flush", STEPS)
        assert got.losses == expected.losses
        assert lab.equal(got.parameters(), expected.parameters())


@every_case
def test_one_plain_step_gives_the_gradients_of_one_device(lab: Any, name: str) -> None:
    """Plain gradient descent moves every parameter by its gradient, so equal weights are equal gradients."""
    case = CASES[name](lab)
    expected = lab.Reference(case, SGD)
    start = expected.parameters()
    expected.run(1)
    after = expected.parameters()
    got = lab.Pipeline(case, case.cuts(3), SGD, recompute=True).run("flush", 1)
    assert lab.equal(got.parameters(), after)
    unmoved = {parameter for parameter, value in after.items() if torch.equal(value, start[parameter])}
    # B of an adapter starts at zero, and so hides A's gradient; a key's bias has none under a softmax.
    assert all(".lora_A." in parameter or parameter.endswith("key.bias") for parameter in unmoved), unmoved


def plain_model(case: Any) -> torch.nn.Module:
    """The model as a user of transformers and PEFT would make it, with our new adapters' random numbers."""
    model = getattr(transformers, case.spec.auto_class).from_pretrained(case.source.folder)
    lora = case.spec.lora
    if lora is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in case.trained_names())
        return model
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",
        target_modules=list(lora.target_modules),
        modules_to_save=list(lora.modules_to_save) or None,
    )
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_A." in name:
                ours = clean_name(name.removeprefix("base_model.model."))
                parameter.copy_(case.weights().get([ours])[ours])
    return wrapped.base_model.model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", [name for name in CASES if "chosen" not in name])
def test_three_stages_train_as_a_plain_loop_over_plain_transformers_or_peft(lab: Any, name: str) -> None:
    case = CASES[name](lab)
    model = plain_model(case)
    trainer = SingleDeviceTrainer(model, case.anatomy, ADAMW, lab.TokenLoss(), seed=lab.seed)
    losses: list[float] = []
    for step in range(STEPS):
        losses += trainer.run_step(lab.make_batch(step)).micro_batch_loss_sums
    got = lab.Pipeline(case, case.cuts(3), ADAMW).run("flush", STEPS)
    assert got.losses == pytest.approx(losses, rel=1e-6)
    trained = {
        clean_name(name.replace(".modules_to_save.default.", ".")): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert lab.max_relative_difference(got.parameters(), trained) < 1e-5


@pytest.mark.parametrize("kind", ["stash", "2bw", "gpipe"])
@pytest.mark.parametrize("name", ["bert head", "bert last adapters"])
def test_other_schedules_give_the_same_for_every_cut_of_stages_without_anything_to_train(
    lab: Any, name: str, kind: str
) -> None:
    """Depths are given, so that a stage in front which runs forward only changes nothing for those behind it."""
    case = CASES[name](lab)
    lowest = case.anatomy.first_backward_unit
    units = case.anatomy.unit_count
    depths = (4,) if kind == "gpipe" else (2,)
    alone = lab.Pipeline(case, (0, units), ADAMW).run(kind, STEPS, in_flight=depths)
    split = lab.Pipeline(case, (0, 1, lowest, units), ADAMW).run(kind, STEPS, in_flight=(*depths, *depths, *depths))
    assert split.losses == alone.losses
    assert lab.equal(split.parameters(), alone.parameters())


class CountingPipeline(MemoryPipeline):
    """Notes what crosses which link, and how far each stage is ahead of the one after it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords, hidden_capacity=1_000)
        self.sent: list[tuple[str, int]] = []
        self.most_waiting = 0

    def put(self, key: Any, tensor: torch.Tensor) -> None:
        self.sent.append((key[0], key[1]))
        super().put(key, tensor)
        self.most_waiting = max(self.most_waiting, self._waiting_hidden[key[1]])


@pytest.mark.parametrize("kind", ["flush", "stash"])
def test_a_stage_that_runs_forward_only_runs_no_further_ahead_than_its_depth(lab: Any, kind: str) -> None:
    case = lab.bert(method="head")
    pipeline = lab.Pipeline(case, (0, 2, 4, 6), ADAMW, ports_class=CountingPipeline).run(kind, STEPS)
    schedule = make_schedule(kind, stages=3, micro_batches=lab.micro_batches, steps=STEPS)
    assert pipeline.links.most_waiting <= peak_in_flight(schedule, 0)
    assert {what for what, _ in pipeline.links.sent} == {"hidden"}
    assert pipeline.links._done == set()
    assert all(report.weight_versions == 1 for reports in pipeline.reports[:2] for report in reports)


def test_a_stage_with_nothing_to_train_passes_gradients_only_down_to_what_is_trained(lab: Any) -> None:
    case = lab.bert(trainable_patterns=("block 1", "output layer"))
    pipeline = lab.Pipeline(case, (0, 2, 3, 5, 6), ADAMW, ports_class=CountingPipeline).run("flush", 1)
    assert not pipeline.stages[0].trainable()
    assert not pipeline.stages[2].trainable()
    assert {target for what, target in pipeline.links.sent if what == "gradient"} == {1, 2}


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_below_everything_that_is_trained_keep_nothing_for_a_backward(lab: Any, recompute: bool) -> None:
    """In one stage: as many tensors are saved as by a stage that begins with the lowest trained block."""
    case = lab.bert(trainable_patterns=("block 2..",), **adapters("lora"))
    lowest = case.anatomy.first_backward_unit
    counts = []
    for first in (0, lowest - 1, lowest):
        stage = lab.Pipeline(case, (0, first, 6) if first else (0, 6), ADAMW).stages[-1]
        part = lab.make_batch(0)[0]
        hidden = None if first == 0 else torch.randn(part.rows, part.inputs["input_ids"].shape[1], 16)
        saved: list[int] = []
        parameters = {p.untyped_storage().data_ptr() for p in stage.module.parameters() if not p.is_meta}

        def keep(tensor: torch.Tensor, saved: list[int] = saved, known: set[int] = parameters) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in known:
                saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = stage.forward(part.inputs, hidden, RandomKey(0, 0, 0), recompute=recompute)
        assert output.requires_grad
        counts.append(sum(saved))
    assert counts[0] == counts[1] == counts[2] > 0
