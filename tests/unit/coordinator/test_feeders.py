"""What the stages are fed: every row once an epoch, labels for the last stage, and never more than the plan allows."""

import numpy as np
import pytest

from coterie.cluster.messages import BATCH, BatchBody, unpack
from coterie.coordinator.feeders import MOST_EVALUATION_ROWS, EvaluationFeeder, TrainingFeeder
from coterie.coordinator.feeding import LABELS, Audience, batch_frame
from coterie.ids import RunId, WorkerId
from coterie.tasks.examples import IGNORED_LABEL


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_every_training_row_is_fed_once_an_epoch_with_counts_that_add_up(job, micro_batches):
    feeder = TrainingFeeder(job, micro_batches)
    assert job.total_steps == 6
    for epoch in (0, 1):
        rows = 0
        for step in range(3 * epoch, 3 * epoch + 3):
            fed = feeder.micro_batches(step)
            assert len(fed) == micro_batches
            labelled = [int(np.count_nonzero(part.labels != IGNORED_LABEL)) for part in fed]
            assert [part.body.micro_batch_loss_tokens for part in fed] == labelled
            assert {part.body.step_loss_tokens for part in fed} == {sum(labelled)}
            assert [part.body.samples_seen for part in fed] == [
                epoch * 11 + rows + sum(other.body.rows for other in fed[:index]) for index in range(micro_batches)
            ]
            rows += sum(part.body.rows for part in fed)
        assert rows == 11


def test_a_micro_batch_without_rows_carries_no_tensors(job):
    fed = TrainingFeeder(job, 7).micro_batches(0)
    empty = [part for part in fed if part.body.rows == 0]
    assert len(empty) == 3
    assert all(part.inputs == {} and part.body.micro_batch_loss_tokens == 0 for part in empty)


def test_tokens_are_counted_without_padding(job):
    feeder = TrainingFeeder(job, 2)
    masks = [part.inputs["attention_mask"] for part in feeder.micro_batches(0) if part.body.rows]
    assert feeder.tokens(0) == sum(int(mask.sum()) for mask in masks)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_no_evaluation_micro_batch_needs_more_than_the_plan_gave_to_training(job, micro_batches):
    feeder = EvaluationFeeder(job, "dev", micro_batches)
    most = -(-4 // micro_batches) * job.model_profile.memory_tokens
    seen = []
    for step in range(feeder.steps):
        (fed,) = feeder.micro_batches(step)
        shape = fed.inputs["input_ids"].shape
        assert len(feeder.rows(step)) == fed.body.rows == shape[0] <= MOST_EVALUATION_ROWS
        assert shape[0] == 1 or shape[0] * shape[1] <= most
        seen += feeder.rows(step)
    assert sorted(seen) == list(range(71))


def test_evaluation_counts_the_labels_of_its_rows(job):
    feeder = EvaluationFeeder(job, "dev", 2)
    counted = sum(feeder.micro_batches(step)[0].body.step_loss_tokens for step in range(feeder.steps))
    assert counted == job.splits["dev"].summary.loss_tokens


def test_only_the_last_stage_gets_the_labels_and_every_frame_says_where_it_belongs(job):
    fed = TrainingFeeder(job, 2).micro_batches(0)[0]
    with_labels, without = (
        batch_frame(fed, RunId("run"), 3, (7, 1), Audience(worker=WorkerId("board"), sees_labels=labelled))
        for labelled in (True, False)
    )
    for frame in (with_labels, without):
        header = frame.header
        assert (header.kind, header.run, header.plan_version) == (BATCH, "run", 3)
        assert (header.step, header.micro_batch, header.target) == (7, 1, "board")
        assert isinstance(unpack(header.body), BatchBody)
        assert [spec.nbytes for spec in header.tensors] == [memoryview(buffer).nbytes for buffer in frame.buffers]
    assert LABELS in {spec.name for spec in with_labels.header.tensors}
    assert LABELS not in {spec.name for spec in without.header.tensors}
