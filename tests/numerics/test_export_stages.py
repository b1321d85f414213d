"""What real stages have trained: saved unit by unit, exported, and resumed at another cut, with equal numbers."""

import itertools
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig

from coterie.checkpoint.export import export_model
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.checkpoint.weights import CheckpointWeights, unit_shapes
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models.keys import RandomKey
from coterie.models.source import open_model
from coterie.models.spec import make_model_spec
from coterie.models.stage import StageModule, build_stage
from coterie.models.weights import FolderWeights

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
CASES = {
    "bert": ("AutoModelForTokenClassification", BASE, {"num_labels": 5}),
    "llama": ("AutoModelForCausalLM", {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": True}, {}),
}
UNITS = 5


def micro_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def through(stages: list[StageModule], step: int) -> torch.Tensor:
    hidden = None
    for stage in stages:
        hidden = stage.forward(micro_batch(), hidden, RandomKey(5, step, 0))
    return hidden


def optimizer_of(stages: list[StageModule]) -> torch.optim.AdamW:
    named = {name: parameter for stage in stages for name, parameter in stage.trainable().items()}
    return torch.optim.AdamW(list(named.values()), lr=1e-2, fused=True)


def train(stages: list[StageModule], optimizer: torch.optim.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = through(stages, step).logsumexp(-1).sum() - through(stages, step)[..., 1].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(
    folder: Path, spec: ModelSpec, stages: list[StageModule], optimizer: torch.optim.AdamW, step: int
) -> Checkpoint:
    terms = RunTerms(run_id=RunId("r"), model=spec, optimizer=OptimizerSpec(), seed=5, batch_rows=3, micro_batches=1,
                     schedule="flush")  # fmt: skip
    shapes = unit_shapes(spec)
    with CheckpointStore(folder).begin(step, shapes) as writer:
        for stage in reversed(stages):
            trained = stage.trainable()
            for unit in range(stage.first_unit, stage.stop_unit):
                own = {name: trained[name] for name in shapes[unit]}
                writer.write_unit(unit, own, {name: optimizer.state[parameter] for name, parameter in own.items()})
        return writer.commit(
            Manifest(terms=terms, global_step=step, epoch=0, data_position=step, samples_seen=3 * step)
        )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", CASES)
def test_stages_that_trained_are_exported_and_resumed_exactly(tmp_path, kind, method):
    auto_class, values, overrides = CASES[kind]
    auto = getattr(transformers, auto_class)
    torch.manual_seed(3)
    transformers.AutoModel.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(tmp_path / "base")
    source = open_model(str(tmp_path / "base"))
    spec = make_model_spec(source, auto_class=auto_class, config_overrides=overrides, seed=5, method=method,
                           lora=LoraSpec(rank=4, dropout=0.1) if method == "lora" else None)  # fmt: skip
    base = FolderWeights(source, spec)
    # A trained tied matrix on two stages needs its gradients exchanged, which is the pipeline's work: one stage then.
    cut = [0, UNITS] if kind == "llama" and method == "full" else [0, 2, UNITS]
    stages = [build_stage(spec, a, b, base) for a, b in itertools.pairwise(cut)]
    optimizer = optimizer_of(stages)
    train(stages, optimizer, range(3))
    checkpoint = save(tmp_path / "checkpoints", spec, stages, optimizer, 3)

    going_on = train(stages, optimizer, range(3, 5))

    resumed_cut = [0, UNITS] if len(cut) == 2 else [0, 1, 3, UNITS]
    weights = CheckpointWeights(checkpoint, base)
    resumed = [build_stage(spec, a, b, weights) for a, b in itertools.pairwise(resumed_cut)]
    again = optimizer_of(resumed)
    for stage in resumed:
        trained = stage.trainable()
        _, state = checkpoint.read(trained)
        for name, parameter in trained.items():
            again.state[parameter] = state[name]
    before = through_eval(resumed)
    assert train(resumed, again, range(3, 5)) == going_on

    out = export_model(source, checkpoint, None, tmp_path / "out")
    if method == "lora":
        plain = auto.from_pretrained(tmp_path / "base", config=AutoConfig.from_pretrained(out))
        loaded = PeftModel.from_pretrained(plain, out)
    else:
        loaded = auto.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**micro_batch()).logits, before)


def through_eval(stages: list[StageModule]) -> torch.Tensor:
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        logits = through(stages, 0)
    for stage in stages:
        stage.train()
    return logits
