"""Training from the cache is training on what devices sent: bit for bit in float32, with a stated difference else."""

import random

import pytest
import torch
from torch.nn import functional

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.cache_layout import CacheLayout
from coterie.sidetuning.trainer import SideTrainer
from coterie.units import MIB

OPTIMIZER = OptimizerSpec(learning_rate=3e-3, lr_schedule="constant")
FAMILIES = ["bert tags", "distilbert labels", "gpt2 labels", "llama text, tied"]
EPOCHS = 6


class CrossEntropy:
    """The loss of every task here."""

    def loss_sum(self, logits, labels):
        return functional.cross_entropy(logits, labels, reduction="sum")

    def predictions(self, logits):
        return logits.argmax(-1)


def trainer_of(case, side):
    return SideTrainer(case.side_model(side, opened=True), CrossEntropy(), OPTIMIZER)


def epochs_of(rows):
    """Rows of every step: two a step, shuffled anew in every epoch but the first."""
    draw = random.Random(1)
    order = list(range(rows))
    for epoch in range(EPOCHS):
        if epoch:
            draw.shuffle(order)
        yield from (order[start : start + 2] for start in range(0, rows, 2))


def trained(trainer, read, rows):
    """Train on what `read` gives for every step's rows; all losses and the last state."""
    losses = [trainer.step(read(chosen), 2 * step).loss_sum for step, chosen in enumerate(epochs_of(rows))]
    return torch.tensor(losses), trainer.state()


def filled(folder, batch, side, width):
    """A cache of a batch's rows that came two at a time, opened again after it was closed."""
    layout = CacheLayout(layers=batch.layers, width=width, dtype=side.upload, key={})
    with ActivationCache.open(folder, layout, MIB) as cache:
        for start in range(0, batch.rows, 2):
            cache.put(batch.pick(range(start, start + 2)), (start,))
    return ActivationCache.open(folder, layout, MIB)


@pytest.mark.parametrize("selects_tokens", [True, False], ids=["selected tokens", "all tokens"])
@pytest.mark.parametrize("name", FAMILIES)
def test_replay_in_float32_is_live_training_bit_for_bit(side_case, tmp_path, name, selects_tokens):
    case = side_case(name)
    side = SideSpec(rank=4, upload="float32", selects_tokens=selects_tokens)
    batch = case.taps(side)
    live_losses, live = trained(trainer_of(case, side), batch.pick, batch.rows)
    with filled(tmp_path, batch, side, batch.taps.shape[2]) as cache:
        losses, replayed = trained(trainer_of(case, side), cache.read, batch.rows)
    assert torch.equal(losses, live_losses)
    assert float(losses[-2:].sum()) < float(losses[:2].sum())
    assert live.keys() == replayed.keys()
    assert all(torch.equal(replayed[key], tensor) for key, tensor in live.items())


@pytest.mark.parametrize(("upload", "bound"), [("float16", 2e-3), ("int8", 5e-3), ("int4", 0.1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_replay_from_fewer_bits_follows_live_training_within_a_stated_difference(
    side_case, tmp_path, name, upload, bound
):
    """Of the losses of all steps, in the 2-norm, relative to those of live training in float32."""
    case = side_case(name)
    side = SideSpec(rank=4, upload=upload)
    batch = case.taps(side)
    live, _ = trained(trainer_of(case, side), batch.pick, batch.rows)
    with filled(tmp_path, batch, side, batch.taps.shape[2]) as cache:
        losses, _ = trained(trainer_of(case, side), cache.read, batch.rows)
    difference = float((losses - live).norm() / live.norm())
    assert 0 < difference < bound
