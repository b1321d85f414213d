"""Eco once as the program does it: a device and a server as processes, over TLS, to hold the harness against."""

from pathlib import Path

import msgspec

from coterie import api
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker
from sidetuning_jobs import Jobs

WORKERS = (LocalWorker(name="device"), LocalWorker(name="server", role="server"))


class ProgramRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `coterie train` with `mode = "side"` showed.

    Attributes:
        points: Quality on the test rows at the end.
        losses: Of every step.
        device_passes: How often the device ran over the rows.
        counted, seen: Bytes of activations by the formula, and of their frames.
    """

    points: float
    losses: tuple[float, ...]
    device_passes: float
    counted: int
    seen: int


def run_program(jobs: Jobs, seed: int) -> ProgramRun:
    """Train one data set with the harness's settings and order."""
    folder = Path(jobs.folder) / "program"
    overrides: dict[str, object] = {
        **jobs.overrides(seed, jobs.setting.epochs, jobs.setting.learning_rate),
        "mode": "side",
        "micro_batches": 1,
        "local_workers": WORKERS,
        "output": str(folder),
        "evaluate_every_epoch": False,
    }
    result = api.train(load_recipe(None, overrides), api.QuietObserver())
    side = result.summary.side
    assert side is not None
    (test,) = (record for record in result.quality if record.split == "test")
    return ProgramRun(
        points=100 * test.metrics[jobs.setting.figure],
        losses=result.losses,
        device_passes=side.device_passes,
        counted=side.taps_bytes,
        seen=side.wire_bytes,
    )
