"""Adds up what one optimizer step costs a stage, for its report."""

from coterie.pipeline.reports import StepReport
from coterie.pipeline.weight_stash import WeightStash
from coterie.schedules.actions import ActionKind


class StepTally:
    """Seconds, updates and weight versions of one step; what its update needs to know of its micro-batches.

    Attributes:
        update_tokens: Loss tokens that the next update divides by; 0 means there is nothing to apply.
        update_samples: Rows of the run before those of the next update.
    """

    __slots__ = (
        "backend_busy_s",
        "backends_left_out",
        "busy_s",
        "cpu_s",
        "grad_norm",
        "grad_norm_is_global",
        "learning_rate",
        "stashed_bytes",
        "update_samples",
        "update_tokens",
        "updates",
        "wait_s",
        "weight_versions",
    )

    def __init__(self) -> None:
        self.busy_s: dict[ActionKind, float] = {"F": 0.0, "B": 0.0, "U": 0.0}
        self.backend_busy_s: dict[str, float] = {}
        self.backends_left_out: dict[str, str] = {}
        self.wait_s = 0.0
        self.cpu_s = 0.0
        self.update_tokens = 0
        self.update_samples = 0
        self.updates = 0
        self.grad_norm = 0.0
        self.grad_norm_is_global = False
        self.learning_rate = 0.0
        self.weight_versions = 1
        self.stashed_bytes = 0

    def note_versions(self, stash: WeightStash) -> None:
        """Remember the most versions seen."""
        if stash.live_versions > self.weight_versions:
            self.weight_versions = stash.live_versions
            self.stashed_bytes = stash.stashed_bytes

    def report(self, step: int) -> StepReport:
        """The finished step."""
        return StepReport(
            step=step,
            forward_s=self.busy_s["F"],
            backward_s=self.busy_s["B"],
            update_s=self.busy_s["U"],
            wait_s=self.wait_s,
            cpu_s=self.cpu_s,
            grad_norm=self.grad_norm,
            grad_norm_is_global=self.grad_norm_is_global,
            learning_rate=self.learning_rate,
            updates=self.updates,
            weight_versions=self.weight_versions,
            stashed_bytes=self.stashed_bytes,
            backend_busy_s=self.backend_busy_s,
            backends_left_out=self.backends_left_out,
        )
