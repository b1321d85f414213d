"""Local LoRA, pipeline LoRA, side-tuning and both: every figure by hand, for devices whose speed is a round number."""

import json

import msgspec
import pytest

from coterie.errors import RecipeError
from coterie.ids import WorkerId
from coterie.jobs.side_spec import SideSpec
from coterie.planner.explain_ways import explain_ways, ways_table
from coterie.planner.request import PlanRequest
from coterie.planner.side_bytes import Backbone, TokenCounts, side_network_bytes
from coterie.planner.side_way import STEP_OPERATIONS_PER_TAP
from coterie.planner.way import WAYS, RunData, WaysRequest
from coterie.planner.ways import compare_ways
from coterie.profiles.power import PowerModel
from coterie.units import MIB

BLOCKS, WIDTH, TOKENS = 6, 1024, 128  # of conftest's model: half a MiB of hidden states for a row of 128 tokens
ROWS, BATCH, EPOCHS = 80, 8, 5
EPOCH = TokenCounts(padded=ROWS * 64, real=ROWS * 50, selected=ROWS)
LARGEST = TokenCounts(padded=BATCH * 100, real=BATCH * 80, selected=BATCH)
RATE = 10e6  # bytes per second


def request(make_model, make_cluster, *, speeds=(1, 1, 10), memory=(4000, 4000, 9000), rate=RATE, **changes):
    cluster = make_cluster(speeds, memory, mbit_per_s=rate * 8 / 1e6)
    model = make_model(BLOCKS)
    adapted = tuple(
        layer if number == 0 else msgspec.structs.replace(layer, trainable_bytes=MIB, largest_trainable_bytes=MIB)
        for number, layer in enumerate(make_model(BLOCKS, trained=False).layers)
    )
    frozen = make_model(BLOCKS, trained=False).layers
    settings = {"cluster": cluster, "batch_rows": BATCH, "micro_batches": 2, "allocator": "default"}
    return WaysRequest(
        **{
            "adapters": PlanRequest(model=msgspec.structs.replace(model, layers=adapted), **settings),
            "frozen": PlanRequest(model=msgspec.structs.replace(model, layers=frozen), schedule="forward", **settings),
            "side": SideSpec(rank=16),
            "data": RunData(
                rows=ROWS, epoch=EPOCH, largest=LARGEST, steps_per_epoch=10, steps=10 * EPOCHS, task_bytes=4 * MIB
            ),
            "owner": WorkerId("w0"),
            "server": WorkerId("w2"),
            **changes,
        }
    )


@pytest.fixture
def ways(make_model, make_cluster):
    def compare(**changes):
        return dict(zip(WAYS, compare_ways(request(make_model, make_cluster, **changes)), strict=True))

    return compare


def spans(way):
    return {span.name: span.seconds for span in way.spans}


def test_training_on_the_owners_device_alone_sends_nothing_and_takes_all_epochs(ways):
    way = ways()["local LoRA"]
    (device,) = way.devices
    flops = (BLOCKS * 1e9 + 2e6) * 3  # forward, and twice that backward
    assert way.total_s == pytest.approx(10 * EPOCHS * BATCH * flops / 1e10, rel=1e-5)  # and a short update
    assert device.compute_s == pytest.approx(way.total_s)
    assert (device.sent_bytes, device.received_bytes, device.network_s) == (0, 0, 0)
    assert way.device_passes == EPOCHS
    assert way.exposes == ("nobody: text, labels and weights stay on device-0",)


def test_a_pipeline_sends_hidden_states_and_their_gradients_each_time(ways):
    way = ways(server=WorkerId("w1"), speeds=(1, 1), memory=(4000, 4000))["pipeline LoRA"]
    owner, other = way.devices
    crossing = 10 * EPOCHS * BATCH * (MIB // 2) // 2  # at the 64 tokens of a typical row, of 128
    number, stage = next((n, stage) for n, stage in enumerate(way.plan.stages) if stage.worker == "w1")
    inputs = 16 * EPOCH.padded * EPOCHS + (8 * EPOCH.selected * EPOCHS if number else 0)
    trained = MIB * (stage.stop_unit - stage.first_unit - (0 if number else 1))
    assert owner.sent_bytes == other.received_bytes == crossing + inputs + stage.memory.weights
    assert owner.received_bytes == other.sent_bytes == crossing + trained
    assert owner.network_s == pytest.approx((owner.sent_bytes + owner.received_bytes) / RATE)
    assert {device.worker: device.does.rpartition(", ")[2] for device in way.devices} == {
        stage.worker: "forward only" if stage.stop_unit == 1 else "forward and backward" for stage in way.plan.stages
    }
    (told,) = way.exposes
    assert told.startswith("device-1: all text (token ids), the hidden states that cross its cuts, ")
    assert ("all labels" in told) == (number == 1)


def test_side_tuning_collects_once_and_replays_on_the_server(ways):
    way = ways()["side-tuning"]
    device, server = way.devices
    forward_s = (BLOCKS * 1e9 + 1e6) / 1e10
    taps = BLOCKS * WIDTH * 2
    network = 3 * BLOCKS * 4 * WIDTH * 16
    output = 6 * 4 * MIB / 4
    trained = 4 * MIB + side_network_bytes(Backbone(blocks=BLOCKS, width=WIDTH), SideSpec(rank=16))
    step_s = (BATCH * (network + output) + BLOCKS * STEP_OPERATIONS_PER_TAP) / 1e11 + trained / 1e12
    assert way.device_passes == 1
    assert device.compute_s == pytest.approx(ROWS * forward_s)
    assert spans(way)["replay"] == pytest.approx(10 * (EPOCHS - 1) * step_s)
    assert server.compute_s == pytest.approx(10 * EPOCHS * step_s)
    upload_s = (4 * taps + 4) / RATE  # of the last micro-batch, 4 rows
    assert spans(way)["collect"] == pytest.approx(ROWS * forward_s + upload_s + step_s)
    assert spans(way)["fetch the network"] == pytest.approx(trained / RATE)
    labels = 8 * (EPOCH.selected + ROWS)
    assert device.sent_bytes == ROWS * taps + 4 + labels + 4 * MIB  # the output layer's weights; a scale of float16
    assert device.received_bytes == server.sent_bytes == trained
    assert way.cache_bytes == ROWS * (taps + 4 * BLOCKS)  # a scale for each token and layer


def test_a_slow_link_and_no_token_selector_make_the_upload_set_the_pace(ways):
    way = ways(side=SideSpec(rank=16, selects_tokens=False), rate=RATE / 20)["side-tuning"]
    uploaded = EPOCH.real * BLOCKS * WIDTH * 2
    step_s = spans(way)["replay"] / (10 * (EPOCHS - 1))
    forward_s = 8 * (BLOCKS * 1e9 + 1e6) / 1e10  # of the first batch; the uploads of 19 micro-batches and the last one
    assert spans(way)["collect"] == pytest.approx(forward_s + 19 / 20 * uploaded * 20 / RATE + step_s, rel=1e-5)
    assert way.cache_bytes == uploaded + EPOCH.real * 4 * BLOCKS
    assert "every token of every row" in way.exposes[0]


def test_without_two_phases_the_devices_run_in_every_epoch(ways):
    once, always = (ways(side=SideSpec(rank=16, two_phases=phases))["side-tuning"] for phases in (True, False))
    assert (once.device_passes, always.device_passes) == (1, EPOCHS)
    assert always.devices[0].compute_s == pytest.approx(EPOCHS * once.devices[0].compute_s)
    assert always.cache_bytes == 0
    assert "replay" not in spans(always)


def test_a_run_that_ends_within_its_first_epoch_collects_no_more_than_it_uses(ways):
    way = ways(data=RunData(rows=ROWS, epoch=EPOCH, largest=LARGEST, steps_per_epoch=10, steps=4))["side-tuning"]
    assert way.device_passes == 0.4
    assert "replay" not in spans(way)


def test_both_together_split_the_backbone_and_send_as_much_to_the_server(ways):
    found = ways()
    both, alone = found["pipeline + side-tuning"], found["side-tuning"]
    owner, other, server = both.devices
    number, stage = next((n, stage) for n, stage in enumerate(both.plan.stages) if stage.worker == "w1")
    crossing = ROWS * (MIB // 2) // 2
    blocks = min(stage.stop_unit, BLOCKS + 1) - max(stage.first_unit, 1)
    received = 16 * EPOCH.padded + stage.memory.weights
    assert other.received_bytes == received + (crossing if number else 0)
    assert other.sent_bytes == blocks * ROWS * WIDTH * 2 + 4 + (0 if number else crossing)
    assert owner.sent_bytes >= received
    assert server.does == "trains the side network"
    assert server.received_bytes == alone.devices[1].received_bytes + 4  # one scale more
    assert max(owner.peak_bytes, other.peak_bytes) < alone.devices[0].peak_bytes
    assert "device-1: all text (token ids)" in both.exposes[0]
    assert "labels" not in both.exposes[0]
    assert "device-2: the outputs of blocks 1 to 6 at the tokens that enter the loss" in both.exposes[1]


def test_a_backbone_that_no_device_holds_fits_when_it_is_split(ways):
    found = ways(memory=(240, 240, 9000))
    for name in ("local LoRA", "side-tuning"):
        assert not found[name].fits
        assert "MiB short" in found[name].reason
        assert found[name].total_s == 0
        assert found[name].devices == ()
    assert found["pipeline + side-tuning"].fits


def test_a_server_that_is_too_small_says_so_in_numbers(ways):
    found = ways(memory=(4000, 4000, 110))["side-tuning"]
    assert found.reason.startswith("device-2 has 110 MiB and needs 1")
    assert "weights 4.80 MiB" in found.reason


def test_a_cache_in_memory_counts_and_one_over_its_quota_is_refused(ways):
    on_disk, in_memory = (ways(cache_in_memory=where)["side-tuning"] for where in (False, True))
    assert in_memory.devices[1].peak_bytes - on_disk.devices[1].peak_bytes == on_disk.cache_bytes
    refused = ways(cache_quota_bytes=1000)["side-tuning"]
    assert refused.reason == "the cache needs 962 KiB on device-2, and its quota is 1000 B"


def test_energy_is_the_stated_watts_times_the_modelled_seconds(ways):
    power = {WorkerId("w0"): PowerModel(compute_w=5, network_w=2)}
    device, server = ways(power=power)["side-tuning"].devices
    assert device.energy_j == pytest.approx(5 * device.compute_s + 2 * device.network_s)
    assert server.energy_j == pytest.approx(10 * server.compute_s + 1 * server.network_s)


def test_an_additive_server_sees_differences_and_the_docs_promise_nothing(ways):
    way = ways(side=SideSpec(rank=16, mode="additive"))["side-tuning"]
    assert "prediction differences, whose only positive entry is the label" in way.exposes[0]
    assert way.plan.units == BLOCKS + 2  # the device makes predictions, so it needs the output layer
    both = ways(side=SideSpec(rank=16, mode="additive"))["pipeline + side-tuning"]
    is_last = both.plan.stages[-1].worker == "w1"
    assert ("all labels" in both.exposes[0]) == is_last  # differences are taken there


def test_a_ladder_from_above_sends_only_its_own_layers(ways):
    way = ways(side=SideSpec(rank=16, first_layer=5))["side-tuning"]
    assert way.cache_bytes == ROWS * 2 * (WIDTH * 2 + 4)
    assert "blocks 5 to 6" in way.exposes[0]


def test_what_needs_more_devices_than_there_are_says_so(ways):
    found = ways(speeds=(1,), memory=(4000,), server=WorkerId("w0"))
    assert found["local LoRA"].fits
    assert "two devices" in found["pipeline LoRA"].reason
    assert "needs a device beside it" in found["side-tuning"].reason


def test_an_unknown_server_is_refused(ways):
    with pytest.raises(RecipeError, match="the server 'w9' is no device"):
        ways(server=WorkerId("w9"))


def test_the_text_names_every_way_and_its_modelled_energy(make_model, make_cluster):
    asked = request(make_model, make_cluster, memory=(240, 4000, 9000))
    found = compare_ways(asked)
    text = explain_ways(found, asked)
    for way in found:
        assert way.name in text
        assert all(sentence in text for sentence in way.exposes)
    assert "does not fit: test does not fit on the 1 device" in text
    assert "energy (modelled)" in text
    assert "Fastest: " in text
    rows = json.loads(json.dumps(ways_table(found)))
    assert [row["way"] for row in rows] == list(WAYS)
    assert rows[0]["seconds"] is None
    assert rows[3]["modelled_energy_j"] > 0
