"""Keys of cached profiles: everything that a profile's figures depend on, and nothing else. Imports no torch."""

import platform

import msgspec

from coterie.jobs.model_spec import ModelSpec
from coterie.profiles.cache import profile_key


def model_profile_key(spec: ModelSpec, *, memory_tokens: int, typical_tokens: int) -> str:
    """The key of `profile_model`'s result; the seed does not change what a model costs."""
    return profile_key(
        "model",
        spec=msgspec.structs.replace(spec, seed=0),
        memory_tokens=memory_tokens,
        typical_tokens=typical_tokens,
    )


def device_profile_key(  # noqa: PLR0913 - all that timings depend on, each named at the call
    model_key: str,
    *,
    device_type: str,
    device_name: str,
    threads: int,
    throttle_speed: float | None,
    rows: tuple[int, int],
    sharing: tuple[object, ...] = (),
) -> str:
    """The key of `profile_device`'s timings; memory is not part of them and is asked for anew at each start."""
    return profile_key(
        "device",
        model=model_key,
        device_type=device_type,
        device_name=device_name,
        machine=(platform.machine(), platform.processor(), platform.node()),
        threads=threads,
        throttle_speed=throttle_speed,
        rows=rows,
        **({"sharing": sharing} if sharing else {}),
    )
