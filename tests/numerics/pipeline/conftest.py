"""Tiny models with dropout on, batches of changing shapes, a pipeline in threads, and the single-device reference."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
)

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import (
    Anatomy,
    FolderWeights,
    PackedWeights,
    build_stage,
    describe,
    load_whole_model,
    make_model_spec,
    named_by_unit,
    open_model,
)
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings, OutputTask, trains_below
from coterie.pipeline.memory_ports import MemoryPipeline, run_in_threads
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.pipeline.optimizer import ParameterState, StageOptimizer
from coterie.pipeline.reports import StepReport
from coterie.pipeline.single_device import SingleDeviceTrainer
from coterie.schedules import make_schedule

SEED = 11
LABELS = 5
VOCABULARY = 61
MICRO_BATCHES = 4
BATCH_ROWS = (8, 7, 3, 8, 5, 8, 6, 4)
BATCH_TOKENS = (9, 12, 5, 14, 7, 9, 11, 6)
STEP_WITH_MASKED_MICRO_BATCH = 1
MASKED_STEP = 4


class TokenLoss:
    """Cross-entropy of every labelled token, added up."""

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def make_batch(step: int, *, masked_step: int | None = MASKED_STEP) -> tuple[MicroBatch, ...]:
    """The micro-batches of a step: padded rows, unlabelled tokens, fewer rows than micro-batches at step 2."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows, tokens = BATCH_ROWS[step % len(BATCH_ROWS)], BATCH_TOKENS[step % len(BATCH_TOKENS)]
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    labels = torch.randint(0, LABELS, (rows, tokens), generator=generator)
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=generator)
    real = torch.arange(tokens)[None] < lengths
    labels[~real | (torch.rand(rows, tokens, generator=generator) < 0.2)] = -100
    if step == STEP_WITH_MASKED_MICRO_BATCH:
        labels[2:4] = -100
    if step == masked_step:
        labels[:] = -100
    seen = sum(BATCH_ROWS[earlier % len(BATCH_ROWS)] for earlier in range(step))
    inputs = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    return split_batch(inputs, labels, micro_batches=MICRO_BATCHES, step=step, samples_seen=seen)


class Case:
    """One model on disk and what of it is trained."""

    def __init__(self, folder: Path, auto_class: str, **wishes: Any) -> None:
        self.source = open_model(folder)
        self.spec: ModelSpec = make_model_spec(
            self.source, auto_class=auto_class, config_overrides={}, seed=SEED, **wishes
        )
        self.anatomy: Anatomy = describe(self.spec)

    def weights(self) -> FolderWeights:
        return FolderWeights(self.source, self.spec)

    def trained_names(self) -> set[str]:
        return {name for names in self.anatomy.trainable for name in names}

    def cuts(self, stages: int) -> tuple[int, ...]:
        """Unequal stages whose first has the embedding and whose last has more than the output layer."""
        units = self.anatomy.unit_count
        return {1: (0, units), 2: (0, 2, units), 3: (0, 1, 3, units), 4: (0, 1, 2, 4, units)}[stages]


class Pipeline:
    """All stages of a model in this process."""

    def __init__(
        self,
        case: Case,
        cuts: tuple[int, ...],
        optimizer: OptimizerSpec,
        *,
        recompute: bool = False,
        task: OutputTask | None = None,
        batches: Callable[[int], tuple[MicroBatch, ...]] = make_batch,
        ports_class: type[MemoryPipeline] = MemoryPipeline,
    ) -> None:
        weights = PackedWeights(case.weights(), case.spec)
        self.stages = [build_stage(case.spec, first, stop, weights) for first, stop in itertools.pairwise(cuts)]
        self.optimizers = [StageOptimizer(optimizer) for _ in self.stages]
        self.links = ports_class(len(self.stages), lambda step, micro_batch: batches(step)[micro_batch])
        self.executors = [
            StageExecutor(
                stage,
                self.optimizers[index],
                task or TokenLoss(),
                self.links.ports(index),
                ExecutorSettings(
                    seed=SEED,
                    sends_gradient=trains_below(case.anatomy.trainable, stage.first_unit),
                    recompute=recompute,
                    name=f"stage {index}",
                ),
            )
            for index, stage in enumerate(self.stages)
        ]

    def run(
        self, kind: str, steps: int, *, first_step: int = 0, in_flight: tuple[int, ...] | None = None
    ) -> "Pipeline":
        schedule = make_schedule(
            kind, stages=len(self.stages), micro_batches=MICRO_BATCHES, steps=steps, in_flight=in_flight
        )
        run_in_threads(
            self.links,
            lambda index: self.executors[index].run_segment(schedule, index, first_step),
            range(len(self.stages)),
        )
        return self

    @property
    def losses(self) -> list[float]:
        """Loss sums of all micro-batches, in order."""
        ordered = sorted(self.links.losses, key=lambda report: (report.step, report.micro_batch))
        return [report.loss_sum for report in ordered]

    @property
    def reports(self) -> list[list[StepReport]]:
        return self.links.steps

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all trained parameters; both copies of a tied one must be equal."""
        merged: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.trainable().items():
                if name in merged:
                    assert torch.equal(merged[name], parameter), f"the copies of {name} differ"
                merged[name] = parameter.detach().clone()
        return merged

    def optimizer_state(self) -> dict[str, ParameterState]:
        merged: dict[str, ParameterState] = {}
        for optimizer in self.optimizers:
            merged.update(optimizer.state())
        return {name: {key: tensor.clone() for key, tensor in state.items()} for name, state in merged.items()}

    def load(self, parameters: Mapping[str, Tensor], state: Mapping[str, ParameterState]) -> None:
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            own = stage.trainable()
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(parameters[name])
            optimizer.load_state({name: state[name] for name in own if name in state}, own)


class Reference:
    """The same training on one device, without any of the pipeline's code."""

    def __init__(self, case: Case, optimizer: OptimizerSpec, task: OutputTask | None = None) -> None:
        self.case = case
        self.model = load_whole_model(case.spec, case.weights())
        self.trainer = SingleDeviceTrainer(self.model, case.anatomy, optimizer, task or TokenLoss(), seed=SEED)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, steps: int, batches: Callable[[int], tuple[MicroBatch, ...]] = make_batch) -> "Reference":
        for step in range(steps):
            result = self.trainer.run_step(batches(step))
            self.losses += result.micro_batch_loss_sums
            self.norms.append(result.grad_norm)
        return self

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in named_by_unit(self.model).items() if p.requires_grad}


class Lab:
    """What the tests of this folder work with."""

    Case = Case
    Pipeline = Pipeline
    Reference = Reference
    TokenLoss = TokenLoss
    make_batch = staticmethod(make_batch)
    micro_batches = MICRO_BATCHES
    masked_step = MASKED_STEP
    seed = SEED

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def bert(self, **wishes: Any) -> Case:
        """Four blocks, dropout everywhere; untied."""
        folder = self._folder / "bert"
        if not folder.exists():
            config = BertConfig(
                hidden_size=16,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=24,
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
                num_labels=LABELS,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
            )
            _save(AutoModelForTokenClassification, config, folder)
        return Case(folder, "AutoModelForTokenClassification", **wishes)

    def llama(self, **wishes: Any) -> Case:
        """Four blocks, attention dropout, the embedding tied to the output layer."""
        folder = self._folder / "llama"
        if not folder.exists():
            config = LlamaConfig(
                hidden_size=16,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=24,
                vocab_size=VOCABULARY,
                attention_dropout=0.1,
                tie_word_embeddings=True,
                pad_token_id=0,
            )
            _save(AutoModelForCausalLM, config, folder)
        return Case(folder, "AutoModelForCausalLM", **wishes)

    def odd_opt(self, **wishes: Any) -> Case:
        """Shaped like OPT-350m: narrow embedding with projections, norms after the layers, dropout; tied."""
        folder = self._folder / "opt"
        if not folder.exists():
            config = OPTConfig(
                hidden_size=16,
                word_embed_proj_dim=8,
                do_layer_norm_before=False,
                num_hidden_layers=4,
                num_attention_heads=2,
                ffn_dim=24,
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
                dropout=0.1,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
            _save(AutoModelForCausalLM, config, folder)
        return Case(folder, "AutoModelForCausalLM", **wishes)

    def gpt2(self, **wishes: Any) -> Case:
        """Fused q, k and v, weights [in, out]; dropout everywhere; tied."""
        folder = self._folder / "gpt2"
        if not folder.exists():
            shape = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
            config = GPT2Config(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
            _save(AutoModelForCausalLM, config, folder)
        return Case(folder, "AutoModelForCausalLM", **wishes)

    def bert_lora(self, **lora: Any) -> Case:
        return self.bert(method="lora", lora=LoraSpec(rank=2, alpha=4, dropout=0.1, **lora))

    def max_relative_difference(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
        """The largest relative difference of any parameter, in the 2-norm.

        Biases of key projections are left out: a softmax ignores them, so that their gradient is nothing but rounding,
        which AdamW then divides by itself.
        """
        assert got.keys() == expected.keys()
        names = [name for name in expected if not name.endswith("key.bias")]
        return max(float((got[n] - expected[n]).norm() / (expected[n].norm() + 1e-12)) for n in names)

    def equal(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
        assert got.keys() == expected.keys()
        return all(torch.equal(got[name], expected[name]) for name in expected)


def _save(auto_class: Any, config: Any, folder: Path) -> None:
    torch.manual_seed(5)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # no bias and no norm at its starting value
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("models"))
