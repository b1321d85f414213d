"""The server's training: the same bits live and replayed, in one piece or in many, through a stop and a resume."""

import pytest
import torch

from coterie.errors import CheckpointError, NonFiniteLossError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec
from coterie.planner import side_memory
from coterie.sidetuning.activations import ActivationBatch, join_rows
from coterie.sidetuning.trainer import SideTrainer
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.sequence_classification import SequenceClassification
from coterie.tasks.token_classification import TokenClassification

SIDE = SideSpec(rank=4)
ADAMW = OptimizerSpec(learning_rate=1e-2, warmup_samples=4, total_samples=80, lr_schedule="cosine")


def trainer_of(case, side: SideSpec = SIDE, optimizer: OptimizerSpec = ADAMW, task=None) -> SideTrainer:
    return SideTrainer(case.side_model(side), task or SequenceClassification(), optimizer)


def same_state(one: SideTrainer, other: SideTrainer) -> bool:
    first, second = one.state(), other.state()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_replay_from_stored_rows_gives_the_bits_of_live_training(side_case):
    """Live: batches as they came. Replay: joined from single rows, in the same order."""
    case = side_case("bert tags")
    batch = case.taps(SIDE)
    stored = {int(row.samples[0]): row for row in batch.split()}
    live, replay = trainer_of(case), trainer_of(case)
    for seen, rows in enumerate([[0, 1], [3, 2], [1, 3], [2], [0, 2]]):
        first = live.step(batch.pick(rows), 2 * seen)
        second = replay.step(join_rows([stored[row] for row in rows]), 2 * seen)
        assert first == second
    assert live.steps == 5
    assert same_state(live, replay)


def test_a_trainer_that_goes_on_from_a_state_gives_the_bits_of_one_that_never_stopped(side_case):
    case = side_case("llama labels")
    batch = case.taps(SIDE)
    through, before = trainer_of(case), trainer_of(case)
    for seen in range(3):
        through.step(batch, 4 * seen)
        before.step(batch, 4 * seen)
    saved = before.state()
    before.step(batch, 12)  # what was saved does not change any more
    after = trainer_of(case)
    after.load_state(saved)
    assert after.steps == 3
    for seen in range(3, 6):
        assert after.step(batch, 4 * seen) == through.step(batch, 4 * seen)
    assert same_state(after, through)


@pytest.mark.parametrize("selects_tokens", [True, False])
def test_a_batch_in_pieces_of_tokens_learns_what_the_whole_batch_learns(side_case, monkeypatch, selects_tokens):
    case = side_case("gpt2 text")
    side = SideSpec(rank=4, selects_tokens=selects_tokens)
    batch = case.taps(side)
    sgd = OptimizerSpec(name="sgd", learning_rate=0.05, weight_decay=0.0, lr_schedule="constant")
    whole = trainer_of(case, side, sgd, CausalLm())
    monkeypatch.setattr(side_memory, "PIECE_ELEMENTS", 3 * 96)
    pieces = trainer_of(case, side, sgd, CausalLm())
    assert batch.tokens > 2 * 3
    for _ in range(4):
        wanted, found = whole.step(batch, 0), pieces.step(batch, 0)
        assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    first, second = whole.state(), pieces.state()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-7)


def test_selected_and_all_tokens_train_the_same_network(side_case):
    case = side_case("bert tags")
    everything = SideSpec(rank=4, selects_tokens=False)
    chosen, full = (
        trainer_of(case, task=TokenClassification()),
        trainer_of(case, everything, task=TokenClassification()),
    )
    for seen in range(6):
        wanted = chosen.step(case.taps(SIDE), 4 * seen)
        found = full.step(case.taps(everything), 4 * seen)
        assert found.loss_tokens == wanted.loss_tokens
        assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)


@pytest.mark.parametrize("name", ["bert labels", "gpt2 labels"])
def test_the_last_gate_opens_within_a_few_steps_and_all_parameters_move(side_case, name):
    case = side_case(name)
    trainer = trainer_of(case, optimizer=OptimizerSpec(learning_rate=1e-2, lr_schedule="constant"))
    start = {key: parameter.detach().clone() for key, parameter in trainer.model.parameters().items()}
    losses = [trainer.step(case.taps(SIDE), 0).loss_sum for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    assert trainer.model.network.output_gate.abs() / SIDE.temperature > 0.1
    still = [key for key, parameter in trainer.model.parameters().items() if torch.equal(parameter, start[key])]
    assert still == []


def test_a_language_models_output_matrix_stays_as_it_is(side_case):
    case = side_case("llama text, tied")
    trainer = trainer_of(case, task=CausalLm())
    assert all(name.startswith("side_network.") for name in trainer.model.parameters())
    before = {name: parameter.clone() for name, parameter in trainer.model.output.parameters().items()}
    losses = [trainer.step(case.taps(SIDE), 10).loss_sum for _ in range(10)]
    assert losses[-1] < losses[0]
    after = trainer.model.output.parameters()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_step_without_loss_tokens_changes_nothing_but_the_count(side_case):
    case = side_case("bert labels")
    trainer = trainer_of(case)
    trainer.step(case.taps(SIDE), 8)
    before = trainer.state()
    step = trainer.step(case.taps(SIDE).pick([2]), 12)
    assert (step.loss_tokens, step.loss_sum, trainer.steps) == (0, 0.0, 2)
    after = trainer.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "steps")


def test_a_loss_that_is_not_finite_is_refused_before_anything_moves(side_case):
    case = side_case("bert labels")
    trainer = trainer_of(case)
    trainer.step(case.taps(SIDE), 8)
    before, good = trainer.state(), case.taps(SIDE)
    taps = good.taps.clone()
    taps[0, 1, 3] = torch.inf
    bad = ActivationBatch(samples=good.samples, counts=good.counts, layers=good.layers, taps=taps, labels=good.labels)
    with pytest.raises(NonFiniteLossError, match="step 2 of the side network"):
        trainer.step(bad, 12)
    after = trainer.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert trainer.step(good, 12).loss_tokens == 3


def test_a_state_of_another_network_or_optimizer_is_refused(side_case):
    case = side_case("bert labels")
    trainer = trainer_of(case)
    trainer.step(case.taps(SIDE), 8)
    saved = trainer.state()
    with pytest.raises(CheckpointError, match=r"down.1.weight of shape \(4, 32\), and \(8, 32\) is wanted"):
        trainer_of(case, SideSpec(rank=8)).load_state(saved)
    with pytest.raises(CheckpointError, match="of shape None"):
        trainer_of(case).load_state({name: saved[name] for name in saved if "output_gate" not in name})
    with pytest.raises(CheckpointError, match="sgd needs"):
        trainer_of(case, optimizer=OptimizerSpec(name="sgd", momentum=0.9)).load_state(saved)
