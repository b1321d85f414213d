"""What a run cost whom, epoch by epoch, and what follows for its time at any network speed."""

from collections.abc import Sequence

import msgspec

from sidetuning_settings import Variant


class EpochCost(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch, all batches of it together.

    Attributes:
        device_flops, device_cpu_s: What the device computes: operations counted, and one core's seconds.
        server_cpu_s: What the server computes.
        up_bytes, down_bytes: Tensors between device and server, as the wire has them.
    """

    device_flops: float = 0.0
    device_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Quality on the test rows after an epoch: figure in points, and the mean loss of a test item."""

    points: float
    loss: float


class VariantRun(msgspec.Struct, frozen=True, kw_only=True):
    """One variant with one seed.

    Attributes:
        losses: Mean loss of each step, of side-tuning.
        rouge: Of texts written at the end, in points, by name; of summaries and the first seed only.
        waits: The device waits for the server in each batch (split learning); otherwise device, link and server work
            at the same time.
        batches: Of an epoch.
    """

    variant: Variant
    seed: int
    rank: int
    curve: tuple[Point, ...]
    costs: tuple[EpochCost, ...]
    batches: int
    cache_bytes: int = 0
    download_bytes: int = 0
    waits: bool = False
    losses: tuple[float, ...] = ()
    rouge: dict[str, float] = {}

    def epoch_s(self, epoch: int, bits_per_s: float) -> float:
        """Seconds of an epoch, if device and server each are a core like this one."""
        cost = self.costs[epoch]
        link_s = 8 * (cost.up_bytes + cost.down_bytes) / bits_per_s
        parts = (cost.device_cpu_s, link_s, cost.server_cpu_s)
        return sum(parts) if self.waits else max(parts)

    def seconds(self, bits_per_s: float, epochs: int | None = None) -> float:
        """Seconds of the first epochs, of all by default, with the download at the end."""
        count = len(self.costs) if epochs is None else epochs
        return sum(self.epoch_s(epoch, bits_per_s) for epoch in range(count)) + 8 * self.download_bytes / bits_per_s

    def batch_s(self, bits_per_s: float) -> float:
        """Mean seconds of a batch over the run."""
        return sum(self.epoch_s(epoch, bits_per_s) for epoch in range(len(self.costs))) / (
            len(self.costs) * self.batches
        )

    def total(self, field: str) -> float:
        """Sum of a cost over epochs."""
        return sum(getattr(cost, field) for cost in self.costs)


def mean_curve(runs: Sequence[VariantRun]) -> list[float]:
    """Mean quality in points after each epoch, over seeds."""
    return [
        sum(point.points for point in points) / len(points) for points in zip(*(r.curve for r in runs), strict=True)
    ]


def final_spread(runs: Sequence[VariantRun]) -> float:
    """Largest difference between seeds at the end, in points."""
    last = [run.curve[-1].points for run in runs]
    return max(last) - min(last)


def epochs_to(curve: Sequence[float], target: float) -> int | None:
    """Epochs after which a curve first reaches a target; None if it never does."""
    return next((epoch + 1 for epoch, value in enumerate(curve) if value >= target), None)
