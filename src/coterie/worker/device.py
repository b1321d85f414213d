"""What this device can do for a run: measured once, kept on disk, and its memory asked for anew each time."""

import msgspec
import torch

from coterie.clock import Clock, SystemClock
from coterie.cluster.messages import Profiled, ProfileRequest
from coterie.errors import UsageError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.measure.allocator import set_aside
from coterie.measure.budget import memory_budget
from coterie.measure.cached import keep, refreshed_device_profile
from coterie.measure.device_profile import profile_device
from coterie.measure.keys import device_profile_key
from coterie.models.anatomy import describe
from coterie.profiles.cache import ProfileCache
from coterie.profiles.cluster_profile import DeviceProfile, DeviceType, plannable_bytes
from coterie.profiles.head_allocation import HeadAllocation
from coterie.worker.settings import WorkerSettings
from coterie.worker.sharing import DeviceSharing

log = get_logger(__name__)


def require_device(device_type: DeviceType) -> None:
    """Check that torch can compute there.

    Raises:
        UsageError: It cannot.
    """
    present = ["cpu"]
    present += ["cuda"] if torch.cuda.is_available() else []
    present += ["mps"] if torch.backends.mps.is_available() else []
    present += ["xpu"] if torch.xpu.is_available() else []
    if device_type not in present:
        raise UsageError(
            f"torch finds no {device_type} device on this machine (it has {', '.join(present)})",
            hint="`coterie doctor` says what is there; a build of torch for another device may be installed",
        )


def measured_device(
    settings: WorkerSettings,
    request: ProfileRequest,
    worker: WorkerId,
    clock: Clock | None = None,
    sharing: DeviceSharing | None = None,
) -> Profiled:
    """This device on the request's model: from the cache if it was measured so before, unless somebody says otherwise.

    Args:
        settings: The owner's; a throttled device is measured throttled.
        request: The model, at how many rows, and whether to measure again.
        worker: The name of this worker in the run.
        clock: Tells when the device is measured.
        sharing: Its compute backends, if more than torch may take part; they are measured first.
    """
    clock = clock or SystemClock()
    describe(request.spec)  # imports its library
    set_aside()
    if sharing is not None:
        sharing.measure(request)
    speed = settings.full_speed if settings.full_speed < 1 else None
    memory = plannable_bytes(memory_budget(settings.memory_bytes, device_type=settings.device_type).bytes)
    key = device_profile_key(
        request.model.key,
        device_type=settings.device_type,
        device_name=settings.name,
        threads=settings.threads,
        throttle_speed=speed,
        rows=request.rows,
        sharing=() if sharing is None else sharing.key,
    )
    cache = ProfileCache()
    known = None if settings.measure_again or request.again else cache.read(key, DeviceProfile)
    if known is not None:
        log.info("this device was measured on this model before")
        profile = refreshed_device_profile(
            known, worker=worker, name=settings.name, memory=memory, base=known.base_bytes
        )
        return Profiled(profile=_noted(profile, sharing), age_s=max(clock.wall() - known.measured_at_s, 0.0))
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
        sharing=sharing if sharing is not None and sharing.allocation != HeadAllocation() else None,
        must_share=settings.allocation is not None,
    )
    profile = msgspec.structs.replace(profile, measured_at_s=clock.wall())
    keep(cache, key, profile)
    return Profiled(profile=_noted(profile, sharing))


def _noted(profile: DeviceProfile, sharing: DeviceSharing | None) -> DeviceProfile:
    """With what its backends were found to do."""
    notes = () if sharing is None else sharing.notes
    return msgspec.structs.replace(profile, backend_notes=(*notes, *profile.backend_notes))
