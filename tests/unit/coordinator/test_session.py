"""What a session says of the devices that joined."""

from coterie.coordinator.session import slow_in_bfloat16
from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile


def test_devices_that_are_slow_in_bfloat16_are_named_where_it_is_asked_for():
    devices = tuple(
        DeviceProfile(
            worker=WorkerId(name), name=name, memory_bytes=1, base_bytes=0, flops_per_s=1.0, bfloat16_speed=speed
        )
        for name, speed in (("old-laptop", 0.25), ("new-laptop", 3.0))
    )
    cluster = ClusterProfile(devices=devices)
    spec = ModelSpec(config_json="{}", auto_class="AutoModelForCausalLM", compute_dtype="bfloat16")
    (notice,) = slow_in_bfloat16(cluster, spec)
    assert "old-laptop computes bfloat16 at 0.25 times its float32 speed" in notice
    assert slow_in_bfloat16(cluster, ModelSpec(config_json="{}", auto_class="AutoModelForCausalLM")) == ()
