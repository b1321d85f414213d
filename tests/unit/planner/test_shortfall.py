"""When nothing fits: how much is missing where, and what would help."""

import re

import msgspec
import pytest

from coterie.errors import DoesNotFitError
from coterie.planner import FixedStage, PlanRequest, make_plan
from coterie.planner.shortfall import fits


def refusal(request: PlanRequest) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(request)
    return caught.value


def test_the_message_says_by_how_many_mib_each_device_falls_short(make_model, make_cluster):
    request = PlanRequest(model=make_model(6), cluster=make_cluster((1, 1, 1), (300, 290, 120)), batch_rows=8)
    message = refusal(request).message
    for name in ("device-0", "device-1", "device-2"):
        assert name in message
    assert len(re.findall(r"\d+ MiB short", message)) >= 2


def test_adding_what_is_missing_makes_it_fit(make_model, make_cluster):
    request = PlanRequest(model=make_model(6), cluster=make_cluster((1, 1), (500, 450)), batch_rows=8)
    short = [int(mib) for mib in re.findall(r"(\d+) MiB short", refusal(request).message)]
    enough = make_cluster((1, 1), (500 + max(short) + 1, 450 + max(short) + 1))
    assert make_plan(msgspec.structs.replace(request, cluster=enough)).stages


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"micro_batches": 1}, "split the batch into", {"micro_batches": 8}),
        ({"micro_batches": 1}, r"a batch of \d row", {"batch_rows": 1}),
        ({"micro_batches": 1, "allow_recompute": False}, "allow recomputation", {"allow_recompute": True}),
        ({"micro_batches": 2, "schedule": "2bw"}, "the flush schedule", {"schedule": "flush"}),
    ],
)
def test_a_setting_that_the_hint_names_does_fit(make_model, make_cluster, changes, words, remedy):
    def at(mib: int) -> PlanRequest:
        return PlanRequest(model=make_model(6), cluster=make_cluster((1, 1), (mib, mib)), batch_rows=8, **changes)

    # A little less than the least memory that is enough without the remedy.
    mib = next(mib for mib in range(300, 1500, 10) if fits(at(mib))) - 10
    assert re.search(words, refusal(at(mib)).hint)
    assert make_plan(msgspec.structs.replace(at(mib), **remedy)).stages


def test_adapters_and_frozen_embeddings_are_proposed_for_full_training_only(make_model, make_cluster):
    cluster = make_cluster((1,), (500,))
    full = refusal(PlanRequest(model=make_model(6, ends_mib=40), cluster=cluster, batch_rows=1))
    assert "LoRA" in full.hint
    frozen = refusal(PlanRequest(model=make_model(6, ends_mib=400, trained=False), cluster=cluster, batch_rows=1))
    assert "LoRA" not in frozen.hint
    assert "freeze" not in frozen.hint


def test_a_device_smaller_than_an_idle_worker_is_refused_not_crashed_on(make_model, make_cluster):
    error = refusal(PlanRequest(model=make_model(2), cluster=make_cluster((1,), (50,)), batch_rows=1))
    assert "MiB short" in error.message
    assert error.hint


def test_prescribed_stages_that_do_not_fit_are_refused_with_their_numbers(make_model, make_cluster):
    cluster = make_cluster((1, 1), (3000, 300))
    stages = tuple(
        FixedStage(worker=device.worker, first_unit=first, stop_unit=first + 4)
        for device, first in zip(cluster.devices, (0, 4), strict=True)
    )
    request = PlanRequest(model=make_model(6), cluster=cluster, batch_rows=8, fixed_stages=stages)
    message = refusal(request).message
    assert re.search(r"device-1 has 300 MiB and needs \d+ MiB for blocks 3-5, output layer", message)
    assert "device-0 holds" in message
