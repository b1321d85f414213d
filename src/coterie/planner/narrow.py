"""Which devices the search looks at: all, unless there are too many for an exact search or the user named them."""

import msgspec

from coterie.planner.plan import LeftOut
from coterie.planner.problem import unit_seconds
from coterie.planner.request import PlanRequest
from coterie.profiles.cluster_profile import DeviceProfile

MOST_DEVICES = 10
"""An exact search doubles with every device: under a second for 8, a few seconds for 10."""

FASTEST = 7
"""Of more devices the fastest this many are looked at, and of the others those with most memory.

Those that alone may hold the ends come before the fastest."""


def narrow(request: PlanRequest) -> tuple[PlanRequest, tuple[LeftOut, ...]]:
    """The request with the devices to look at, and the others with the reason."""
    devices = request.cluster.devices
    if request.fixed_stages is not None:
        named = {stage.worker for stage in request.fixed_stages}
        kept = [device for device in devices if device.worker in named]
        reason = "the prescribed stages do not use it"
    elif len(devices) > MOST_DEVICES:

        def seconds(device: DeviceProfile) -> float:
            return sum(sum(unit_seconds(device, layer, 1)) for layer in request.model.layers)

        owners = set(request.owner_workers)
        by_speed = sorted(devices, key=lambda device: (device.worker not in owners, seconds(device)))
        by_memory = sorted(by_speed[FASTEST:], key=lambda device: device.base_bytes - device.memory_bytes)
        chosen = {device.worker for device in by_speed[:FASTEST] + by_memory[: MOST_DEVICES - FASTEST]}
        kept = [device for device in devices if device.worker in chosen]
        reason = f"of {len(devices)} devices only {MOST_DEVICES} are looked at, the fastest and those with most memory"
    else:
        return request, ()
    cluster = msgspec.structs.replace(request.cluster, devices=tuple(kept))
    left = tuple(
        LeftOut(worker=device.worker, device_name=device.name, reason=reason)
        for device in devices
        if device not in kept
    )
    return msgspec.structs.replace(request, cluster=cluster), left
