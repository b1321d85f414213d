"""What sharing a block takes more: counted by the allocation and by how often each backend copies weights."""

import pytest

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import AttentionShape, NeuronShape
from coterie.heads.copies import shared_memory
from coterie.heads.shapes import BlockShapes
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare

# Four matrices of 64 x 64, and two of 96 x 64: 64 KiB and 48 KiB.
SHAPES = BlockShapes(
    attention=AttentionShape(hidden=64, output=64, head_dim=16, heads=4, groups=4, scale=0.25, biased=False),
    neurons=NeuronShape(hidden=64, output=64, neurons=96, biased=False),
)
MATRIX, W1 = 4 * 64 * 64, 4 * 96 * 64
INFOS = [
    BackendInfo(name=name, device="processor", kind="cpu", driver="none", weight_copies=copies)
    for name, copies in (("torch", 0), ("opencl", 2), ("hosted", 1))
]


def part(strategy="fused", **counts):
    shares = tuple(
        PartShare(backend=name, count=count, strategy=strategy, predicted_s=1.0) for name, count in counts.items()
    )
    return PartAllocation(shares=shares, predicted_s=1.0, best_single_s=1.0, best_single="torch")


def counted(*, trains_weights=False, **parts):
    return shared_memory(SHAPES, HeadAllocation(**parts), INFOS, trains_weights=trains_weights)


def test_a_backend_that_works_in_place_takes_the_columns_that_are_cut_out_for_it():
    assert counted(attention=part(torch=3, hosted=1)).copies == MATRIX + MATRIX  # all of wo, and a quarter of four


def test_what_a_backend_copies_counts_as_often_as_it_does():
    assert counted(neurons=part(torch=48, opencl=48)).copies == W1 + 2 * W1
    assert counted(neurons=part(opencl=96)).copies == 2 * 2 * W1  # nothing is cut out of a whole layer


def test_one_by_one_cuts_columns_out_once_more():
    assert counted(attention=part("each", torch=4)).copies == MATRIX
    assert counted(attention=part("each", torch=2, opencl=2)).copies == 2 * MATRIX + 2 * 2 * MATRIX


@pytest.mark.parametrize(("trains", "expected"), [(True, 2 * 4 * MATRIX), (False, 0)])
def test_gradients_come_in_parts_and_are_joined_one_part_of_the_block_after_the_other(trains, expected):
    both = {"attention": part(torch=2, opencl=2), "neurons": part(torch=48, opencl=48)}
    assert counted(trains_weights=trains, **both).working == expected


def test_what_is_not_shared_takes_nothing():
    assert counted() == SharedMemory()
    assert counted(attention=part(torch=2, opencl=3)) == SharedMemory()  # of another block: it runs as it is
    assert shared_memory(BlockShapes(), HeadAllocation(attention=part(opencl=4)), INFOS, trains_weights=True) == (
        SharedMemory()
    )
