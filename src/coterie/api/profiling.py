"""What this device's compute backends do with a model's layers, and how the scheduler would share them."""

from collections.abc import Callable
from typing import Literal

import msgspec

from coterie.backends.backend import BackendInfo
from coterie.backends.catalog import find_backends
from coterie.backends.shares import Need
from coterie.errors import BackendError, UnsupportedModelError
from coterie.heads.pool import BackendPool
from coterie.measure.backend_profile import ProfileSettings, profile_backends
from coterie.measure.layer_shapes import LayerShapes, layer_shapes
from coterie.measure.share_work import Conditions
from coterie.models import open_model
from coterie.planner.head_allocation import HeadAllocation, allocate
from coterie.profiles.backend_profile import DeviceBackends

_NEEDS = {"full": Need(), "lora": Need(weights=False, added=True)}


class ProfileWish(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        model: A folder, GGUF file or hub name; only its config is used.
        rows: Rows of a micro-batch.
        tokens: Tokens of a row.
        method: Whether weights are trained (and so sent anew each time), or adapters beside frozen ones.
        backends: Names; None for all there are.
        threads: Compute threads that each backend may take.
        again: Measure even if the cache has the answer.
    """

    model: str
    rows: int = 8
    tokens: int = 128
    method: Literal["full", "lora"] = "full"
    backends: tuple[str, ...] | None = None
    threads: int = 1
    again: bool = False


class BackendsProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        model: Its name.
        shapes: Of one block.
        backends: Those present.
        errors: Largest relative error of each in its self-test.
        absent: Why others are not.
        profile: The timings.
        allocation: What the scheduler would do.
    """

    model: str
    shapes: LayerShapes
    backends: tuple[BackendInfo, ...]
    errors: dict[str, float]
    absent: dict[str, str]
    profile: DeviceBackends
    allocation: HeadAllocation


def profile_compute(wish: ProfileWish, progress: Callable[[str, int, int], None] | None = None) -> BackendsProfile:
    """Find and test this device's backends, time shares of one of the model's layers, and allocate them.

    Args:
        wish: What to measure.
        progress: Told before each measurement: what, its number from 1, how many there are.

    Raises:
        ModelError: The model cannot be read.
        UnsupportedModelError: None of its parts can be split.
        BackendError: A backend that was named is absent, or none could compute a layer.
    """
    source = open_model(wish.model)
    shapes = layer_shapes(source.config)
    if shapes.attention is None and shapes.neurons is None:
        raise UnsupportedModelError(
            f"layers of {source.name} cannot be split over backends: {'; '.join(shapes.notes)}",
            hint="it trains all the same, each stage on its device's one backend",
        )
    found = find_backends(wish.threads, wish.backends)
    conditions = Conditions(
        rows=wish.rows,
        tokens=wish.tokens,
        need=_NEEDS[wish.method],
        causal=shapes.causal,
        dropout=shapes.dropout,
    )
    with BackendPool(found.backends) as pool:
        infos = pool.infos
        settings = ProfileSettings(again=wish.again, progress=progress)
        profile = profile_backends(pool, shapes.attention, shapes.neurons, conditions, settings)
    if not profile.groups and not profile.neurons:
        failures = [f"{one.name} {part}: {note}" for one in profile.backends for part, note in one.notes.items()]
        raise BackendError(
            f"no backend could compute a layer of {source.name} with micro-batches of {wish.rows} x {wish.tokens} "
            f"tokens: {'; '.join(failures)}",
            hint="fewer --rows or --tokens, or other --backends; torch on the processor takes what fits into memory",
        )
    return BackendsProfile(
        model=source.name,
        shapes=shapes,
        backends=infos,
        errors=found.errors,
        absent=found.absent,
        profile=profile,
        allocation=allocate(profile),
    )
