"""The ways to fine-tune that `coterie plan --compare` looks at, and what each would cost whom."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from coterie.ids import WorkerId
from coterie.jobs.side_spec import SideSpec
from coterie.planner.plan import Plan
from coterie.planner.request import PlanRequest
from coterie.planner.side_bytes import TokenCounts
from coterie.profiles.power import PowerModel

WayName = Literal["local LoRA", "pipeline LoRA", "side-tuning", "pipeline + side-tuning"]

WAYS: tuple[WayName, ...] = ("local LoRA", "pipeline LoRA", "side-tuning", "pipeline + side-tuning")


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """The training data as far as costs depend on it.

    Attributes:
        rows: Rows of one epoch.
        epoch: Their tokens.
        largest: Tokens of the largest optimizer step, at most.
        steps_per_epoch: Optimizer steps of one epoch.
        steps: Of the whole run.
        task_bytes: Of the model's own, what is trained beside a side network: new task layers (float32).
    """

    rows: int
    epoch: TokenCounts
    largest: TokenCounts
    steps_per_epoch: int
    steps: int
    task_bytes: int = 0

    @property
    def passes(self) -> float:
        """How often the run goes over the data."""
        return self.steps / self.steps_per_epoch


class WaysRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a comparison depends on.

    Attributes:
        adapters: LoRA over all devices, as the recipe wishes it.
        frozen: The same with nothing trained, forward only: what side-tuning's devices run.
        side: The network beside the backbone.
        data: What is learnt from.
        owner: Where the data are; it coordinates, and local training happens there.
        server: Holds cache and side network; it runs no layers of the backbone.
        power: Per device; others draw the default.
        cache_in_memory: The server keeps activations in memory, not on its disk.
        cache_quota_bytes: The most that its cache may take; None without a limit.
    """

    adapters: PlanRequest
    frozen: PlanRequest
    side: SideSpec
    data: RunData
    owner: WorkerId
    server: WorkerId
    power: Mapping[WorkerId, PowerModel] = {}
    cache_in_memory: bool = False
    cache_quota_bytes: int | None = None


class DeviceCost(msgspec.Struct, frozen=True, kw_only=True):
    """One device over the whole run.

    Attributes:
        does: Its part in words.
        peak_bytes: Predicted peak of its worker; 0 for one that only holds the data.
        limit_bytes: What its worker may use.
        compute_s: Seconds that it computes.
        network_s: Seconds that it sends or receives.
        sent_bytes, received_bytes: Over the network; nothing for what stays on the device.
        energy_j: Modelled from stated watts; not measured.
    """

    worker: WorkerId
    device_name: str
    does: str
    peak_bytes: int
    limit_bytes: int
    compute_s: float
    network_s: float
    sent_bytes: int
    received_bytes: int
    energy_j: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run, and its seconds."""

    name: str
    seconds: float


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to fine-tune.

    Attributes:
        reason: Why it does not fit, in numbers; empty if it does.
        spans: What the run consists of, in order; empty if it does not fit.
        devices: Only those that take part.
        exposes: Who gets to see what, a sentence each.
        cache_bytes: What the server keeps, on its disk or in memory.
        device_passes: How often the devices run the backbone over the data.
        plan: Who holds which layers, if they are planned for.
    """

    name: WayName
    reason: str = ""
    spans: tuple[Span, ...] = ()
    devices: tuple[DeviceCost, ...] = ()
    exposes: tuple[str, ...] = ()
    cache_bytes: int = 0
    device_passes: float = 0.0
    plan: Plan | None = None

    @property
    def fits(self) -> bool:
        """Can it be done on these devices?"""
        return not self.reason

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return sum(span.seconds for span in self.spans)

    @property
    def energy_j(self) -> float:
        """Joules of all devices; modelled."""
        return sum(device.energy_j for device in self.devices)

    @property
    def peak_bytes(self) -> int:
        """The fullest device's memory."""
        return max((device.peak_bytes for device in self.devices), default=0)

    @property
    def network_bytes(self) -> int:
        """All that crosses the network."""
        return sum(device.sent_bytes for device in self.devices)
