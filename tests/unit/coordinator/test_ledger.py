"""Reports of steps, in whatever order workers deliver them."""

from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster.messages import MicroBatchDone, StepDone
from coterie.coordinator.ledger import Ledger
from coterie.ids import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def done(step):
    return StepDone(
        step=step,
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.5,
        wait_s=0.0,
        cpu_s=3.5,
        grad_norm=1.0,
        grad_norm_is_global=True,
        learning_rate=1e-3,
        updates=1,
        weight_versions=1,
        stashed_bytes=0,
        peak_bytes=1,
        sent_next_bytes=0,
        sent_previous_bytes=0,
    )


def test_a_step_is_whole_when_all_workers_have_ended_it():
    ledger = Ledger((A, B))
    ledger.micro_batch_done(MicroBatchDone(step=0, micro_batch=0, loss_sum=6.0, loss_tokens=3))
    ledger.micro_batch_done(MicroBatchDone(step=0, micro_batch=1, loss_sum=1.0, loss_tokens=1))
    assert ledger.step_done(A, done(0)) is None
    entry = ledger.step_done(B, done(0))
    assert entry is not None
    assert entry.loss == 7.0 / 4


def test_a_step_without_any_label_has_loss_zero():
    ledger = Ledger((A,))
    ledger.micro_batch_done(MicroBatchDone(step=0, micro_batch=0, loss_sum=0.0, loss_tokens=0))
    entry = ledger.step_done(A, done(0))
    assert entry is not None
    assert entry.loss == 0.0


def test_a_fast_worker_may_be_a_step_ahead():
    ledger = Ledger((A, B))
    assert ledger.step_done(A, done(0)) is None
    assert ledger.step_done(A, done(1)) is None
    assert ledger.step_done(B, done(0)) is not None
    assert ledger.step_done(B, done(1)) is not None


@given(st.permutations(range(5)))
def test_the_loss_does_not_depend_on_the_order_in_which_micro_batches_report(order):
    sums = [0.1, 1e9, -3.7, 2.2, 1e-9]
    ledger = Ledger((A,))
    for index in order:
        ledger.micro_batch_done(MicroBatchDone(step=0, micro_batch=index, loss_sum=sums[index], loss_tokens=2))
    entry = ledger.step_done(A, done(0))
    assert entry is not None
    assert entry.loss == sum(sums) / 10
