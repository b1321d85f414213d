import threading

import pytest
import torch

from coterie.errors import WorkerLostError
from coterie.pipeline.memory_ports import MemoryPipeline, run_in_threads
from coterie.pipeline.micro_batch import MicroBatch


def _no_batches(step: int, micro_batch: int) -> MicroBatch:
    raise AssertionError(f"batch {step}, {micro_batch} is not asked for here")


def test_hidden_states_and_gradients_reach_the_neighbour_they_are_meant_for() -> None:
    pipeline = MemoryPipeline(3, _no_batches)
    tensors = {key: torch.rand(1) for key in ("hidden", "gradient")}
    pipeline.ports(0).put_hidden(4, 1, tensors["hidden"])
    pipeline.ports(2).put_gradient(4, 1, tensors["gradient"])
    assert pipeline.ports(1).take_hidden(4, 1) is tensors["hidden"]
    assert pipeline.ports(1).take_gradient(4, 1) is tensors["gradient"]


def test_norms_are_summed_in_unit_order_whoever_comes_first() -> None:
    values = {unit: 0.1 * 3.0**unit for unit in range(6)}
    expected = 0.0
    for unit in range(6):
        expected += values[unit]
    pipeline = MemoryPipeline(3, _no_batches)
    totals: dict[int, list[float]] = {0: [], 1: [], 2: []}

    def run(stage: int) -> None:
        own = {unit: values[unit] for unit in (2 * stage, 2 * stage + 1)}
        totals[stage] = [pipeline.ports(stage).total_squared_norm(step, own) for step in range(20)]

    run_in_threads(pipeline, run, [2, 0, 1])
    assert totals == {stage: [expected] * 20 for stage in range(3)}


def test_both_ends_of_a_tied_matrix_get_equal_bits_in_tensors_of_their_own() -> None:
    pipeline = MemoryPipeline(3, _no_batches)
    ends = {0: torch.rand(50), 2: torch.rand(50)}
    sums: dict[int, torch.Tensor] = {}
    run_in_threads(
        pipeline, lambda stage: sums.update({stage: pipeline.ports(stage).exchange_tied(1, ends[stage])}), [0, 2]
    )
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[0], ends[0] + ends[2])
    assert sums[0].data_ptr() != sums[2].data_ptr()


def test_a_full_box_makes_the_sender_wait_until_the_receiver_takes() -> None:
    pipeline = MemoryPipeline(2, _no_batches, hidden_capacity=1)
    order: list[str] = []
    full = threading.Event()

    def run(stage: int) -> None:
        ports = pipeline.ports(stage)
        if stage == 0:
            ports.put_hidden(0, 0, torch.zeros(1))
            full.set()
            ports.put_hidden(0, 1, torch.zeros(1))
            order.append("second sent")
        else:
            full.wait()
            order.append("first taken")
            ports.take_hidden(0, 0)
            ports.take_hidden(0, 1)

    run_in_threads(pipeline, run, [0, 1])
    assert order == ["first taken", "second sent"]


def test_one_stages_failure_wakes_the_others_and_is_what_the_caller_sees() -> None:
    pipeline = MemoryPipeline(3, _no_batches)
    seen: list[BaseException] = []

    def run(stage: int) -> None:
        if stage == 1:
            raise ValueError("stage 1 is broken")
        try:
            pipeline.ports(stage).take_gradient(0, 0)
        except WorkerLostError as error:
            seen.append(error)
            raise

    with pytest.raises(ValueError, match="stage 1 is broken"):
        run_in_threads(pipeline, run, [0, 1, 2])
    assert len(seen) == 2
    assert "stage 1 is broken" in str(seen[0])
