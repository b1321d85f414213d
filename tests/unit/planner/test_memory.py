"""Memory of a stage: sums done by hand, and one arithmetic for one stage and for all."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.planner.memory import (
    FORWARD_RUNTIME_BYTES,
    HOLES_OF_STASH_PERCENT,
    HOLES_PERCENT,
    LINK_COPIES,
    RUNTIME_BYTES,
    TIGHT_ALLOCATOR_PERCENT,
    MemorySettings,
    all_stage_sizes,
    estimate_memory,
    stage_bytes,
    stage_sizes,
)
from coterie.planner.problem import Problem
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.model_profile import AffineBytes
from coterie.units import MIB


def test_full_training_keeps_weights_gradients_two_moments_and_what_is_in_flight(make_model):
    model = make_model(4)  # blocks of 28 MiB, ends of 4 MiB, 4 MiB saved, 0.5 MiB boundary, 2 MiB transient a row
    estimate = estimate_memory(
        model, (1, 3), rows=2, in_flight=3, settings=MemorySettings(allocator="tight"), base_bytes=300 * MIB
    )
    assert estimate.base == 300 * MIB
    assert estimate.weights == estimate.gradients == 56 * MIB
    assert estimate.optimizer == 112 * MIB
    assert estimate.weight_versions == 0
    assert estimate.activations == 3 * (2 * 2 * 4 * MIB * TIGHT_ALLOCATOR_PERCENT // 100)
    assert estimate.transient == 4 * MIB * TIGHT_ALLOCATOR_PERCENT // 100
    assert estimate.buffers == RUNTIME_BYTES + 2 * LINK_COPIES * 2 * MIB  # two links of 1 MiB
    assert estimate.total == estimate.base + estimate.above_base


@pytest.mark.parametrize(("schedule", "extra"), [("flush", 0), ("gpipe", 0), ("stash", 2), ("2bw", 1)])
def test_each_schedule_keeps_its_further_weight_versions_of_what_is_trained(make_model, schedule, extra):
    memory_settings = MemorySettings(schedule=schedule)
    full = estimate_memory(make_model(4), (1, 3), rows=1, in_flight=3, settings=memory_settings)
    frozen = estimate_memory(make_model(4, trained=False), (1, 3), rows=1, in_flight=3, settings=memory_settings)
    assert full.weight_versions == extra * 56 * MIB
    assert frozen.weight_versions == frozen.gradients == frozen.optimizer == 0
    assert frozen.weights == 56 * MIB


def test_recomputation_keeps_block_inputs_and_one_block(make_model):
    model = make_model(4)
    estimate = estimate_memory(
        model, (0, 3), rows=1, in_flight=2, settings=MemorySettings(recompute=True, allocator="tight")
    )
    kept = 4 * MIB + 2 * MIB // 2  # what the embedding saves, two block inputs
    assert estimate.activations == 2 * (kept * TIGHT_ALLOCATOR_PERCENT // 100)
    assert estimate.transient == (4 + 2) * MIB * TIGHT_ALLOCATOR_PERCENT // 100  # the last block again, and its work


def test_gradients_that_come_up_in_the_backward_are_not_there_while_all_is_saved(make_model):
    model = make_model(4)
    tight = MemorySettings(schedule="stash", allocator="tight")
    estimate = estimate_memory(model, (1, 3), rows=1, in_flight=1, settings=tight)
    # At the first block: 4 MiB saved and two gradients of 28; at the last one: 8 MiB saved and one gradient.
    assert estimate.gradients + estimate.activations + estimate.transient == pytest.approx(60 * MIB, rel=0.01)
    adding = estimate_memory(model, (1, 3), rows=1, in_flight=1, settings=MemorySettings(allocator="tight"))
    assert adding.gradients + adding.activations + adding.transient == pytest.approx((56 + 8 + 2) * MIB, rel=0.01)
    once = MemorySettings(allocator="tight", accumulates=False)
    assert estimate_memory(model, (1, 3), rows=1, in_flight=1, settings=once) == estimate


def test_the_largest_working_memory_counts_where_it_comes_up(make_model):
    model = make_model(4)
    big = AffineBytes(fixed=90 * MIB)
    layers = (msgspec.structs.replace(model.layers[0], transient=big), *model.layers[1:])
    model = msgspec.structs.replace(model, layers=layers)
    tight, default = (
        estimate_memory(model, (0, 3), rows=1, in_flight=1, settings=MemorySettings(allocator=allocator))
        for allocator in ("tight", "default")
    )
    # The embedding's backward comes last: by then only its own 4 MiB are saved. The default allocator keeps the rest.
    assert tight.activations + tight.transient == pytest.approx((4 + 90) * MIB, rel=0.03)
    assert default.activations + default.transient == pytest.approx((12 + 90) * MIB, rel=0.03)


@pytest.mark.parametrize(
    ("schedule", "trained", "percent", "first"),
    [
        ("flush", True, HOLES_PERCENT, 0),
        ("stash", True, HOLES_OF_STASH_PERCENT, 0),
        ("flush", False, HOLES_PERCENT, HOLES_PERCENT),
    ],
)
def test_the_default_allocator_leaves_holes_for_each_micro_batch_that_gradients_do_not_fill(
    make_model, schedule, trained, percent, first
):
    model = make_model(4, trained=trained)
    loose = MemorySettings(allocator="default", schedule=schedule)
    one, two, three = (
        estimate_memory(model, (1, 3), rows=2, in_flight=depth, settings=loose).activations for depth in (1, 2, 3)
    )
    kept = 16 * MIB * TIGHT_ALLOCATOR_PERCENT // 100
    assert one == kept + 16 * MIB * first // 100
    assert two - one == three - two == kept + 16 * MIB * percent // 100


def test_the_tight_allocator_costs_less_for_activations_only(make_model):
    loose, tight = (
        estimate_memory(make_model(4), (1, 3), rows=2, in_flight=2, settings=MemorySettings(allocator=allocator))
        for allocator in ("default", "tight")
    )
    assert loose.activations > tight.activations
    assert loose.weights == tight.weights
    assert loose.optimizer == tight.optimizer


def test_tied_ends_on_two_stages_each_hold_the_matrix_and_one_stage_holds_it_once(make_model):
    model = make_model(2, ends_mib=10, tied=True)
    memory_settings = MemorySettings()
    whole, first, last = (
        estimate_memory(model, units, rows=1, in_flight=1, settings=memory_settings)
        for units in ((0, 4), (0, 2), (2, 4))
    )
    assert whole.weights == (2 * 28 + 10) * MIB
    assert whole.gradients == whole.weights
    assert first.weights == last.weights == 38 * MIB
    # The exchange needs a buffer for the other end's gradient, and only where ends are apart.
    assert first.buffers - RUNTIME_BYTES == 10 * MIB + 2 * LINK_COPIES * MIB // 2
    assert whole.buffers == RUNTIME_BYTES


def test_a_frozen_tied_matrix_needs_no_exchange(make_model):
    model = make_model(2, ends_mib=10, tied=True, trained=False)
    first = estimate_memory(model, (0, 2), rows=1, in_flight=1, settings=MemorySettings())
    assert first.buffers == RUNTIME_BYTES + 2 * LINK_COPIES * MIB // 2


def frozen_below(model, unit):
    """The model with nothing trained, and so nothing saved, before `unit`."""
    below = [
        msgspec.structs.replace(
            layer, trainable_bytes=0, saved=AffineBytes(), fresh_transient=layer.transient, backward_flops_per_row=0.0
        )
        for layer in model.layers[:unit]
    ]
    return msgspec.structs.replace(model, layers=(*below, *model.layers[unit:]), shared=AffineBytes(fixed=3 * MIB))


@pytest.mark.parametrize("schedule", ["flush", "gpipe", "stash", "2bw"])
@pytest.mark.parametrize("recompute", [False, True])
def test_below_what_is_trained_a_stage_takes_weights_working_memory_and_buffers_of_one_way(
    make_model, schedule, recompute
):
    model = frozen_below(make_model(4), 3)
    memory_settings = MemorySettings(schedule=schedule, recompute=recompute, allocator="tight")
    shallow, deep = (
        estimate_memory(model, (1, 3), rows=2, in_flight=depth, settings=memory_settings) for depth in (1, 9)
    )
    assert shallow == deep
    assert shallow.weights == 56 * MIB
    assert shallow.gradients == shallow.optimizer == shallow.weight_versions == shallow.activations == 0
    assert shallow.transient == 4 * MIB * TIGHT_ALLOCATOR_PERCENT // 100
    assert shallow.buffers == FORWARD_RUNTIME_BYTES + LINK_COPIES * 2 * MIB


def test_a_stage_across_the_lowest_trained_unit_saves_for_the_units_above_it_and_sends_no_gradient(make_model):
    model = frozen_below(make_model(4), 3)
    across, above = (
        estimate_memory(model, units, rows=2, in_flight=1, settings=MemorySettings(allocator="tight"))
        for units in ((2, 5), (3, 5))
    )
    assert across.activations == above.activations == (2 * 8 + 3) * MIB * TIGHT_ALLOCATOR_PERCENT // 100
    assert across.buffers == above.buffers == RUNTIME_BYTES + LINK_COPIES * 3 * MIB  # in, out, and the way back of out
    again = MemorySettings(allocator="tight", recompute=True)
    kept = estimate_memory(model, (2, 5), rows=2, in_flight=1, settings=again).activations
    assert kept == (2 * 1 + 3) * MIB * TIGHT_ALLOCATOR_PERCENT // 100  # the inputs of two blocks, not of three


def test_forward_only_keeps_weights_and_working_memory(make_model):
    estimate = estimate_memory(make_model(4), (1, 3), rows=2, in_flight=1, settings=MemorySettings(schedule="forward"))
    assert estimate.gradients == estimate.optimizer == estimate.weight_versions == estimate.activations == 0
    assert estimate.weights == 56 * MIB


def test_rows_that_are_continued_keep_their_keys_and_values_on_every_stage(make_model):
    model = make_model(4)
    layers = tuple(
        msgspec.structs.replace(layer, kept_bytes_per_row=MIB if 0 < unit < 5 else 0)
        for unit, layer in enumerate(model.layers)
    )
    model = msgspec.structs.replace(model, layers=layers)
    memory_settings = MemorySettings(schedule="forward", kept_rows=10)
    estimate = estimate_memory(model, (1, 3), rows=2, in_flight=1, settings=memory_settings)
    assert estimate.activations == 2 * 10 * MIB * 102 // 100
    for first, stop in itertools.combinations(range(7), 2):
        one = stage_bytes(stage_sizes(model, first, stop, 2), memory_settings)
        every = stage_bytes(all_stage_sizes(model, 2), memory_settings)
        assert every.activations[first, stop] == one.activations


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 8),
    depth=st.integers(1, 6),
    schedule=st.sampled_from(["flush", "gpipe", "stash", "2bw", "forward"]),
    recompute=st.booleans(),
    allocator=st.sampled_from(["default", "tight"]),
    device_type=st.sampled_from(["cpu", "cuda"]),
    shared=st.sampled_from([SharedMemory(), SharedMemory(copies=5 * MIB, working=3 * MIB)]),
)
def test_the_search_counts_every_stage_to_the_byte_as_the_estimate_does(
    random_request, seed, rows, depth, schedule, recompute, allocator, device_type, shared
):
    model = random_request(seed).model
    memory_settings = MemorySettings(
        schedule=schedule, recompute=recompute, allocator=allocator, device_type=device_type, shared=shared
    )
    parts = stage_bytes(all_stage_sizes(model, rows), memory_settings)
    units = len(model.layers)
    for first in range(units):
        for stop in range(first + 1, units + 1):
            estimate = estimate_memory(model, (first, stop), rows=rows, in_flight=depth, settings=memory_settings)
            assert estimate.above_base == parts.fixed[first, stop] + depth * parts.per_depth[first, stop]


@pytest.mark.parametrize(("schedule", "versions"), [("flush", 0), ("stash", 2), ("2bw", 1), ("forward", 0)])
@pytest.mark.parametrize("trained", [True, False])
def test_backends_that_share_blocks_copy_the_weights_of_each_and_every_trained_version_of_them(
    make_model, schedule, versions, trained
):
    model = make_model(4, trained=trained)

    def estimate(units, shared):
        memory_settings = MemorySettings(schedule=schedule, shared=shared)
        return estimate_memory(model, units, rows=1, in_flight=3, settings=memory_settings)

    shared = SharedMemory(copies=10 * MIB, working=5 * MIB)
    alone, copied = estimate((0, 3), SharedMemory()), estimate((0, 3), shared)
    assert copied.weights - alone.weights == 2 * 10 * MIB  # of two blocks, and none of the embedding
    more = copied.weight_versions - alone.weight_versions
    assert more == (versions * 2 * 10 * MIB if trained else 0)
    assert copied.transient - alone.transient == (0 if schedule == "forward" else 5 * MIB)
    assert estimate((5, 6), shared).total == estimate((5, 6), SharedMemory()).total


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 8))
def test_more_rows_more_units_or_more_in_flight_never_take_less(random_request, seed, rows):
    model = random_request(seed).model
    units = len(model.layers)
    memory_settings = MemorySettings(schedule="stash")

    def peak(stop: int, rows: int, depth: int) -> int:
        return estimate_memory(model, (0, stop), rows=rows, in_flight=depth, settings=memory_settings).total

    base = peak(units, rows, 1)
    assert peak(units, rows + 1, 1) >= base
    assert peak(units, rows, 2) >= base
    if units > 2:
        assert stage_sizes(model, 0, units - 1, rows).saved <= stage_sizes(model, 0, units, rows).saved


def test_an_estimate_survives_json(make_model):
    estimate = estimate_memory(make_model(2), (0, 4), rows=1, in_flight=1, settings=MemorySettings())
    assert msgspec.json.decode(msgspec.json.encode(estimate), type=type(estimate)) == estimate
    assert all(
        isinstance(value, int) and not isinstance(value, np.integer) for value in msgspec.structs.astuple(estimate)
    )


def test_weights_that_are_unpacked_for_each_use_get_the_allocator_whose_peaks_can_be_predicted(random_request):
    request = random_request(7, allocator="auto", codecs=("fp32",))
    plain, unpacking = (
        Problem(msgspec.structs.replace(request, model=msgspec.structs.replace(request.model, unpacks=unpacks)), 4)
        for unpacks in (False, True)
    )
    assert plain.allocators(0) == ("default", "tight")
    assert unpacking.allocators(0) == ("tight",)
    told = Problem(msgspec.structs.replace(unpacking.request, allocator="default"), 4)
    assert told.allocators(0) == ("default",)
