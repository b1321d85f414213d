"""A tiny model's trained state whose numbers follow from the step, and the manifest that goes with it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec

SHAPES: dict[int, dict[str, tuple[int, ...]]] = {
    0: {"embed.weight": (7, 4)},
    1: {"block.0.weight": (4, 4), "block.0.bias": (4,)},
    2: {},
    3: {"head.weight": (3, 4), "head.scale": ()},
}

TERMS = RunTerms(
    run_id=RunId("run-a"),
    model=ModelSpec(config_json='{"model_type": "bert", "hidden_size": 4}', auto_class="AutoModel"),
    optimizer=OptimizerSpec(total_samples=100),
    seed=7,
    batch_rows=8,
    micro_batches=4,
    schedule="flush",
)


@dataclass(frozen=True)
class Tiny:
    """What the tests need to write and to compare checkpoints."""

    shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    terms: RunTerms

    def state(self, step: int, unit: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        generator = torch.Generator().manual_seed(step * 100 + unit)
        parameters = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes[unit].items()}
        optimizer_state = {
            name: {
                "exp_avg": torch.randn(shape, generator=generator),
                "exp_avg_sq": torch.rand(shape, generator=generator),
                "step": torch.tensor(float(step)),
            }
            for name, shape in self.shapes[unit].items()
        }
        return parameters, optimizer_state

    def manifest(self, step: int, terms: RunTerms | None = None) -> Manifest:
        return Manifest(
            terms=terms or self.terms, global_step=step, epoch=0, data_position=step, samples_seen=8 * step,
            loss_tail=(2.5, 0.1), libraries={"torch": torch.__version__},
        )  # fmt: skip

    def save(self, store: CheckpointStore, step: int, terms: RunTerms | None = None) -> Checkpoint:
        with store.begin(step, self.shapes) as writer:
            for unit in self.shapes:
                writer.write_unit(unit, *self.state(step, unit))
            return writer.commit(self.manifest(step, terms))

    def assert_equal(self, checkpoint: Checkpoint, step: int) -> None:
        assert checkpoint.step == step
        for unit in self.shapes:
            parameters, optimizer_state = checkpoint.read_unit(unit)
            wanted, wanted_state = self.state(step, unit)
            assert list(parameters) == list(wanted)
            for name, tensor in wanted.items():
                assert torch.equal(parameters[name], tensor)
                assert optimizer_state[name].keys() == wanted_state[name].keys()
                for field, value in wanted_state[name].items():
                    assert torch.equal(optimizer_state[name][field], value)


@pytest.fixture
def tiny() -> Tiny:
    return Tiny(SHAPES, TERMS)


@pytest.fixture
def names_in() -> Callable[[Path], list[str]]:
    return lambda folder: sorted(path.name for path in folder.iterdir())


@pytest.fixture
def write_newer_manifest() -> Callable[[Path], None]:
    def write(path: Path) -> None:
        body = b'{"format_version": 99, "terms": {"something": "new"}}'
        seal = hashlib.sha256(body).hexdigest().encode()
        path.write_bytes(b'{"sha256": "%s", "manifest": %s}' % (seal, body))

    return write
