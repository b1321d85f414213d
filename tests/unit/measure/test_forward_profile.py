"""A model that only predicts keeps nothing for a backward; what its forward needs is working memory."""

import msgspec

from coterie.jobs.model_spec import ModelSpec
from coterie.measure.device_profile import profile_device
from coterie.measure.model_profile import profile_model
from coterie.profiles.model_profile import ModelProfile


def profiles(bert: object) -> tuple[ModelProfile, ModelProfile, ModelSpec]:
    spec = bert()  # type: ignore[operator] # a fixture that makes specs
    forward = msgspec.structs.replace(spec, method="none")
    shapes = {"memory_tokens": 16, "typical_tokens": 16, "name": "m"}
    return profile_model(spec, **shapes), profile_model(forward, **shapes), forward


def test_nothing_is_kept_and_nothing_is_trained(bert: object) -> None:
    trained, forward, _ = profiles(bert)
    for layer, other in zip(forward.layers, trained.layers, strict=True):
        assert layer.saved.at(8) == 0
        assert layer.trainable_bytes == 0
        assert layer.backward_flops_per_row == 0
        assert layer.parameter_bytes == other.parameter_bytes
        assert layer.forward_flops_per_row == other.forward_flops_per_row


def test_a_blocks_working_memory_holds_at_least_its_widest_activation(bert: object) -> None:
    _, forward, spec = profiles(bert)
    width = msgspec.json.decode(spec.config_json)["intermediate_size"]
    assert forward.layers[1].transient.at(8) >= 8 * 16 * width * 4


def test_only_forwards_are_timed(bert: object) -> None:
    _, forward, spec = profiles(bert)
    device = profile_device(
        spec, forward, worker="w", name="w", device_type="cpu", threads=1, memory=1 << 30, rows=(1, 2)
    )
    assert len(device.timings) == 3
    assert all(timing.forward_s(2) > 0 for timing in device.timings)
