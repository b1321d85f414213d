"""What a run writes down of devices that come, go and change, and of what it did about it."""

from typing import Literal

from coterie.metrics.record import Record
from coterie.units import counted, format_bytes, format_seconds

MembershipChange = Literal["joined", "returned", "left", "lost"]


class MembershipRecord(Record, frozen=True, kw_only=True):
    """A device came or went after the run had begun.

    Attributes:
        change: `returned` is a device that was in before; `left` one that said goodbye.
        step: Optimizer steps done.
    """

    worker: str
    device_name: str
    change: MembershipChange
    step: int
    reason: str = ""

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.device_name} {self.change} at step {self.step}" + (f" ({self.reason})" if self.reason else "")


class RecoveryRecord(Record, frozen=True, kw_only=True):
    """Training went on after a device was lost; it is written once the first step after that has ended.

    Attributes:
        step: Optimizer steps done when it was lost.
        first_step: The step from which training went on, that of the last committed replica: later ones are recorded
            once more, and the last record of a step counts.
        replayed_steps: Finished steps that were done once more.
        noticed_s: Seconds from the last sign of life to the notice.
        recovered_s: Seconds from the notice to the end of the next step, replayed ones included; without those in which
            the run was paused.
        plan_version: Of the plan that training went on with.
        is_gone: The device itself was lost, and not its stage alone.
        has_left: It said that it leaves, or was about to be released, and did not fall silent out of the blue.
        sent_bytes: Weights and trained state that were sent to the stages of that plan.
        kept_bytes: What these had already: layers that stayed where they were, and copies of trained state.
    """

    worker: str
    device_name: str
    reason: str
    step: int
    first_step: int
    replayed_steps: int
    noticed_s: float
    recovered_s: float
    plan_version: int
    is_gone: bool = True
    has_left: bool = False
    sent_bytes: int = 0
    kept_bytes: int = 0

    @property
    def line(self) -> str:
        """For people."""
        what = "left" if self.has_left else "lost" if self.is_gone else "lost its layers"
        again = "no step" if not self.replayed_steps else counted(self.replayed_steps, "step")
        sent = f"; {format_bytes(self.sent_bytes)} were sent" if self.sent_bytes else ""
        kept = f", {format_bytes(self.kept_bytes)} were in place" if self.kept_bytes else ""
        return (
            f"{self.device_name} {what} at step {self.step} ({self.reason}), training went on after "
            f"{format_seconds(self.recovered_s)}, {again} replayed{sent}{kept}"
        )


class RebalanceRecord(Record, frozen=True, kw_only=True):
    """Another plan was weighed, and taken if `worth`.

    Attributes:
        cause: What gave the occasion, such as `drift`, `joined`, `leaving`, `memory` or `battery`.
        reason: The figures in one line.
        gain_s: Predicted seconds won over the remaining steps.
        cost_s: Predicted seconds that moving layers takes.
        moved_units: Layers that another device would hold.
        moved_bytes: What they weigh.
        plan_version: Of the plan that is in effect afterwards.
    """

    cause: str
    reason: str
    step: int
    worth: bool
    gain_s: float
    cost_s: float
    moved_units: int
    moved_bytes: int
    plan_version: int

    @property
    def line(self) -> str:
        """For people."""
        what = "layers are moved" if self.worth else "layers stay"
        moved = f"; {counted(self.moved_units, 'layer')}, {format_bytes(self.moved_bytes)}" if self.moved_units else ""
        return f"{what} ({self.cause}): {self.reason}{moved}"


class EnergyRecord(Record, frozen=True, kw_only=True):
    """What a device has drawn since it joined.

    Attributes:
        joules: Since it joined.
        watts: Power drawn at the last reading, or the mean where only energy is counted.
        source: `battery`, `rapl`, `simulated`, or `model`: what its owner stated, or a usual figure. Joined by `+`
            where the joules are from several.
        battery: Charge, 0 to 1; None without one.
    """

    worker: str
    device_name: str
    joules: float
    source: str
    watts: float | None = None
    battery: float | None = None
