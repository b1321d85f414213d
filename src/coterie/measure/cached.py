"""Profiles out of the cache, measured only where it has none. With a hit, a model's profile needs no torch."""

import msgspec

from coterie.errors import StorageError
from coterie.jobs.model_spec import ModelSpec
from coterie.logs import get_logger
from coterie.measure.keys import model_profile_key
from coterie.profiles.cache import ProfileCache
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.profiles.model_profile import ModelProfile

_LOG = get_logger(__name__)


def cached_model_profile(
    spec: ModelSpec, *, memory_tokens: int, typical_tokens: int, name: str, cache: ProfileCache
) -> ModelProfile:
    """`profile_model`, or its result from an earlier run under this name.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
    """
    key = model_profile_key(spec, memory_tokens=memory_tokens, typical_tokens=typical_tokens)
    kept = cache.read(key, ModelProfile)
    if kept is not None:
        return msgspec.structs.replace(kept, name=name)
    from coterie.measure.model_profile import profile_model  # noqa: PLC0415 - imports torch, which a hit does not need

    profile = profile_model(spec, memory_tokens=memory_tokens, typical_tokens=typical_tokens, name=name)
    keep(cache, key, profile)
    return profile


def refreshed_device_profile(kept: DeviceProfile, *, worker: str, name: str, memory: int, base: int) -> DeviceProfile:
    """A cached device profile with what belongs to this start of the worker: its name and its memory, in bytes."""
    return msgspec.structs.replace(kept, worker=worker, name=name, memory_bytes=memory, base_bytes=base)


def keep(cache: ProfileCache, key: str, profile: msgspec.Struct) -> None:
    """Write a profile to the cache; a cache that cannot be written costs time, not the run."""
    try:
        cache.write(key, profile)
    except StorageError as error:
        _LOG.warning("%s (%s)", error.message, error.hint)
