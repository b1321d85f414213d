"""Tiny models of every family whose blocks can be split, run split and unsplit."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from coterie.backends.backend import Backend
from coterie.backends.catalog import find_backends
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.torch_backend import TorchBackend
from coterie.errors import BackendError
from coterie.heads.install import SplitReport, install_split
from coterie.heads.pool import BackendPool
from coterie.jobs.model_spec import LoraSpec
from coterie.models import FolderWeights, PackedWeights, RandomKey, StageModule, build_stage, describe, make_model_spec
from coterie.models.adapters import is_adapter
from coterie.models.source import open_model
from coterie.planner.head_allocation import HeadAllocation, PartAllocation, PartShare
from coterie.profiles.backend_profile import Strategy

TAGS = "AutoModelForTokenClassification"
CAUSAL = "AutoModelForCausalLM"
KEY = RandomKey(seed=7, step=2, micro_batch=1)
ROWS, TOKENS, VOCABULARY = 3, 7, 61
SHARED = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS_4 = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 40}
GROUPS_9_3 = {**HEADS_4, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
GROUPS_14_2 = {**HEADS_4, "hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}
GROUPS_4_1 = {**HEADS_4, "num_key_value_heads": 1}
DROPS = {"attention_dropout": 0.2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{kind: (kind, TAGS, HEADS_4) for kind in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie")},
    "distilbert": (
        "distilbert",
        TAGS,
        {"dim": 24, "n_heads": 4, "hidden_dim": 40, "n_layers": 2, "max_position_embeddings": 40},
    ),
    "llama 9/3": ("llama", CAUSAL, {**GROUPS_9_3, **DROPS}),
    "llama with biases": (
        "llama",
        CAUSAL,
        {**GROUPS_9_3, **DROPS, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral 14/2, sliding window": ("mistral", CAUSAL, {**GROUPS_14_2, **DROPS, "sliding_window": 3}),
    "qwen2 4/1, biased queries": ("qwen2", CAUSAL, {**GROUPS_4_1, **DROPS}),
    "gemma 4/1, wide heads": ("gemma", CAUSAL, {**GROUPS_4_1, **DROPS, "head_dim": 8}),
    "granite": ("granite", CAUSAL, {**GROUPS_9_3, **DROPS, "attention_multiplier": 0.3}),
    "smollm3, no positions in one block": (
        "smollm3",
        CAUSAL,
        {**GROUPS_9_3, **DROPS, "no_rope_layers": [1, 0], "use_sliding_window": False},
    ),
    "phi3, fused": ("phi3", CAUSAL, {**GROUPS_9_3, **DROPS, "resid_pdrop": 0.1}),
    "gpt2, transposed and fused": (
        "gpt2",
        CAUSAL,
        {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 40},
    ),
    "gpt-neox, fused by head, partly turned": (
        "gpt_neox",
        CAUSAL,
        {**HEADS_4, **DROPS, "hidden_size": 32, "rotary_pct": 0.5, "hidden_dropout": 0.1},
    ),
    "bloom, ALiBi": (
        "bloom",
        CAUSAL,
        {"hidden_size": 24, "n_layer": 2, "n_head": 4, "attention_dropout": 0.2, "hidden_dropout": 0.1},
    ),
    "opt": (
        "opt",
        CAUSAL,
        {**HEADS_4, **DROPS, "ffn_dim": 40, "word_embed_proj_dim": 24},
    ),
}


def dealt(
    total: int, names: Sequence[str], counts: Sequence[int] | None = None, *, strategy: Strategy = "fused"
) -> PartAllocation:
    """Counts, or unequal parts of `total`, in the order of the names."""
    if counts is None:
        counts = [max(total // 3, 1)] * (len(names) - 1) if total >= len(names) else [1] * (total - 1)
        counts = [*counts, total - sum(counts)]
    shares = [
        PartShare(backend=name, count=count, strategy=strategy, predicted_s=1.0)
        for name, count in zip(names, counts, strict=False)
        if count
    ]
    return PartAllocation(shares=tuple(shares), predicted_s=1.0, best_single_s=1.0, best_single=names[0])


class Result:
    """What one forward and backward gave."""

    def __init__(self, output: Tensor, hidden: Tensor, gradients: dict[str, Tensor]) -> None:
        self.output = output
        self.hidden = hidden
        self.gradients = gradients

    def difference(self, other: "Result") -> float:
        """The largest relative difference of the output, dX and each weight's gradient.

        A key projection's bias has a gradient of nothing but rounding, since a softmax ignores it.
        """
        assert self.gradients.keys() == other.gradients.keys()
        pairs = {"output": (self.output, other.output), "dX": (self.hidden, other.hidden)}
        pairs |= {n: (g, other.gradients[n]) for n, g in self.gradients.items() if not _key_bias(n)}
        errors = {n: float((a.double() - b.double()).norm() / b.double().norm()) for n, (a, b) in pairs.items()}
        return max(errors.values())


def _key_bias(name: str) -> bool:
    return name.endswith(("key.bias", "k_lin.bias", "k_proj.bias"))


class Model:
    """A family's tiny model on disk."""

    def __init__(self, folder: Path, family: str, **wishes: Any) -> None:
        kind, self.auto_class, values = FAMILIES.get(family, (family, CAUSAL, GROUPS_4_1))
        folder = folder / "".join(c for c in family if c.isalnum())
        if not folder.exists():
            _save(folder, self.auto_class, AutoConfig.for_model(kind, **{**SHARED, **values}))
        self.source = open_model(str(folder))
        wishes = {"config_overrides": {}, **wishes}
        self.spec = make_model_spec(self.source, auto_class=self.auto_class, seed=3, **wishes)
        self.anatomy = describe(self.spec)

    def stage(self, first_unit: int = 1, stop_unit: int | None = None) -> StageModule:
        """Blocks and the output layer by default; adapters with values in all their matrices."""
        weights = PackedWeights(FolderWeights(self.source, self.spec), self.spec)
        stage = build_stage(self.spec, first_unit, stop_unit or self.anatomy.unit_count, weights)
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in stage.parameters().items():
                if is_adapter(name):
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
        return stage

    def inputs(self, *, lengths: Sequence[int] | None = None, left: bool = False) -> dict[str, Tensor]:
        """Token ids, padded to `TOKENS` where lengths are given."""
        draw = torch.Generator().manual_seed(5)
        ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=draw)
        mask = torch.ones_like(ids)
        for row, length in enumerate(lengths or ()):
            if left:
                mask[row, : TOKENS - length] = 0
            else:
                mask[row, length:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def hidden(self) -> Tensor:
        return torch.randn(ROWS, TOKENS, self.spec_width, generator=torch.Generator().manual_seed(6))

    @property
    def spec_width(self) -> int:
        return int(self.source.config.hidden_size)


def _save(folder: Path, auto_class: str, config: Any) -> None:
    torch.manual_seed(5)
    model = getattr(transformers, auto_class).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no bias and no norm at its starting value
    model.save_pretrained(folder)


def run(stage: StageModule, model: Model, inputs: Mapping[str, Tensor], *, recompute: bool = False) -> Result:
    """One forward and backward of a stage that begins with the first block."""
    dtype = next(iter(stage.parameters().values())).dtype
    hidden = model.hidden().to(dtype).requires_grad_()
    for parameter in stage.parameters().values():
        parameter.grad = None
    output = stage.forward(inputs, hidden, KEY, recompute=recompute)
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(8)).to(output)
    seen = inputs["attention_mask"].bool()
    (output * target)[seen].sum().backward()
    gradients = {name: p.grad for name, p in stage.trainable().items() if p.grad is not None}
    assert hidden.grad is not None
    return Result(output.detach()[seen], hidden.grad[seen], gradients)


def in_float64(stage: StageModule) -> StageModule:
    """The same stage, all its numbers in float64; without dropout, whose draws differ there."""
    stage.module.double()
    stage.eval()
    return stage


class Heads:
    """What the tests of this folder work with."""

    key = KEY
    dealt = staticmethod(dealt)
    run = staticmethod(run)
    in_float64 = staticmethod(in_float64)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, family: str, **wishes: Any) -> Model:
        return Model(self._folder, family, **wishes)

    def lora(self, family: str, **lora: Any) -> Model:
        spec = LoraSpec(**{"rank": 2, "alpha": 4, "dropout": 0.2, "target_modules": ("all-linear",), **lora})
        return self.model(family, method="lora", lora=spec)

    def split(self, stage: StageModule, pool: BackendPool, names: Sequence[str] | None = None) -> SplitReport:
        """Heads and neurons of all blocks over all backends of a pool, or the named."""
        groups, neurons = sizes_of(stage)
        names = names or [info.name for info in pool.infos]
        allocation = HeadAllocation(attention=dealt(groups, names), neurons=dealt(neurons, names))
        return install_split(stage, allocation, pool)


def sizes_of(stage: StageModule) -> tuple[int, int]:
    """KV groups and neurons of a stage's blocks, by its config alone."""
    config = stage.module.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for name in ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"):
        if getattr(config, name, None):
            return groups, int(getattr(config, name))
    return groups, 4 * config.hidden_size


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def pool() -> Iterator[BackendPool]:
    """torch and numpy."""
    with BackendPool([TorchBackend(), NumpyBackend()]) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[BackendPool]:
    """torch, numpy and OpenCL."""
    backends: list[Backend] = [TorchBackend(), NumpyBackend()]
    try:
        backends += find_backends(1, ("opencl",)).backends[:1]
    except BackendError as error:
        pytest.skip(error.message)
    with contextlib.closing(BackendPool(backends)) as made:
        yield made
