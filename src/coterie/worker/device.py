"""What this device can do for a run: measured once, kept on disk, and its memory asked for anew each time."""

import msgspec

from coterie.cluster.messages import ProfileRequest
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.measure.budget import memory_budget
from coterie.measure.device_profile import profile_device
from coterie.measure.keys import device_profile_key
from coterie.profiles.cache import ProfileCache
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.worker.settings import WorkerSettings

log = get_logger(__name__)

RESERVE_PERCENT = 5
"""Part of the budget that no plan uses: a prediction may be that far off, and so may other programs' needs."""


def plannable_bytes(budget_bytes: int) -> int:
    """What a plan may use of a budget."""
    return budget_bytes - budget_bytes * RESERVE_PERCENT // 100


def measured_device(settings: WorkerSettings, request: ProfileRequest, worker: WorkerId) -> DeviceProfile:
    """This device on the request's model: from the cache if it was measured so before, unless the owner says otherwise.

    Args:
        settings: The owner's; a throttled device is measured throttled.
        request: The model, and at how many rows.
        worker: The name of this worker in the run.
    """
    speed = settings.speed if settings.speed < 1 else None
    memory = plannable_bytes(memory_budget(settings.memory_bytes, device_type=settings.device_type).bytes)
    key = device_profile_key(
        request.model.key,
        device_type=settings.device_type,
        device_name=settings.name,
        threads=settings.threads,
        throttle_speed=speed,
        rows=request.rows,
    )
    cache = ProfileCache()
    known = None if settings.measure_again else cache.read(key, DeviceProfile)
    if known is not None:
        log.info("this device was measured on this model before")
        return msgspec.structs.replace(known, worker=worker, memory_bytes=memory)
    profile = profile_device(
        request.spec,
        request.model,
        worker=worker,
        name=settings.name,
        device_type=settings.device_type,
        threads=settings.threads,
        memory=memory,
        throttle_speed=speed,
        rows=request.rows,
    )
    cache.write(key, profile)
    return profile
