import itertools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.measure import timing
from coterie.measure.device_profile import profile_device
from coterie.measure.model_profile import profile_model
from coterie.models import describe
from coterie.profiles.cluster_profile import DeviceProfile

Make = Callable[..., ModelSpec]


def profile(
    spec: ModelSpec, speed: float | None = None, told: list[tuple[str, int, int]] | None = None
) -> DeviceProfile:
    model = profile_model(spec, memory_tokens=16, typical_tokens=16, name="tiny")
    return profile_device(
        spec,
        model,
        worker=WorkerId("w1"),
        name="laptop",
        device_type="cpu",
        threads=1,
        memory=123,
        throttle_speed=speed,
        progress=None if told is None else lambda *what: told.append(what),
    )


def test_every_kind_of_unit_gets_a_timing(bert: Make) -> None:
    spec = bert()
    told: list[tuple[str, int, int]] = []
    device = profile(spec, told=told)
    assert [timing.kind.split("-")[0] for timing in device.timings] == ["embedding", "block", "output layer"]
    assert all(timing.forward_s(2) > 0 and timing.backward_s(2) > 0 for timing in device.timings)
    assert device.flops_per_s > 0
    assert device.update_bytes_per_s > 0
    assert (device.worker, device.name, device.memory_bytes, device.threads) == ("w1", "laptop", 123, 1)
    assert device.base_bytes > 50 * 2**20
    assert told == [
        ("embedding", 1, 5),
        ("block 0", 2, 5),
        ("output layer", 3, 5),
        ("matrix product", 4, 5),
        ("optimizer update", 5, 5),
    ]


def test_the_speed_of_bfloat16_is_measured_where_a_run_computes_in_it(bert: Make) -> None:
    assert profile(bert()).bfloat16_speed == 1.0
    assert profile(msgspec.structs.replace(bert(), compute_dtype="bfloat16")).bfloat16_speed not in {0.0, 1.0}


def test_nothing_goes_backward_below_what_is_trained(bert: Make) -> None:
    spec = bert()
    names = tuple(name for name, unit in describe(spec).unit_of.items() if unit != 5)
    embedding, block, output = profile(bert(frozen=names)).timings
    assert embedding.backward_s(4) == block.backward_s(4) == 0.0
    assert output.backward_s(4) > 0


def test_a_throttled_device_is_slower(bert: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count()
    monkeypatch.setattr(timing, "time", SimpleNamespace(thread_time=lambda: next(readings) * 0.01, perf_counter=int))
    full, tenth = (profile(bert(), speed=speed) for speed in (1.0, 0.1))
    assert full.flops_per_s == pytest.approx(10 * tenth.flops_per_s)
    assert full.update_bytes_per_s == pytest.approx(10 * tenth.update_bytes_per_s)
    for fast, slow in zip(full.timings, tenth.timings, strict=True):
        assert slow.forward_s(4) == pytest.approx(10 * fast.forward_s(4))
        assert slow.backward_s(4) == pytest.approx(10 * fast.backward_s(4))


def test_a_kind_that_does_not_fit_into_memory_is_left_to_the_flops() -> None:
    code = """
from transformers import BertConfig
from coterie.jobs.model_spec import ModelSpec
from coterie.measure import timing
from coterie.measure import device_profile
from coterie.measure.device_profile import profile_device
from coterie.measure.model_profile import profile_model
from coterie.measure.process_memory import current_rss_bytes, limit_memory
config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=2_000_000)
spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForTokenClassification")
model = profile_model(spec, memory_tokens=8, typical_tokens=8, name="wide")
device_profile._BUDGET_S = 0.0
limit = current_rss_bytes() + 300 * 2**20
assert limit_memory(limit)
device = profile_device(spec, model, worker="w", name="phone", device_type="cpu", threads=1, memory=limit)
print([timing.kind.split("-")[0] for timing in device.timings])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "['block', 'output layer']", done.stderr
