"""Whole training steps on emulated devices: one or three of them, each with torch alone or with the scheduler."""

import os
import statistics
from pathlib import Path

from coterie import api
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker
from coterie.metrics.events import read_events, valid_steps
from made_up import make_data, make_model

VARIANTS = ("Single", "Single-MBS", "Pipeline", "Pipeline-MBS")
"""The paper's names; MBS: several backends, shared by the scheduler."""

SPEED = 0.25
"""Three devices of two backends each then ask for no more than one and a half cores."""

TOKENS = 128
COUNTED, UNCOUNTED = 3, 1


class StepBench:
    """Trains and remembers seconds per step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.environ["COTERIE_CACHE"] = str(folder / "cache")  # measured in this run
        self._model = make_model(folder / "model", "minilm")
        self._runs = 0
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self.micro_batches: dict[tuple[str, int], int] = {}

    @property
    def batches(self) -> list[int]:
        """Rows of a step, rising."""
        return sorted({batch for _, batch in self._seconds})

    def seconds(self, variant: str, batch: int) -> float:
        """Median of a step."""
        return statistics.median(self._seconds[variant, batch])

    def scheduler(self, batch: int) -> float:
        """How many times as fast one device is with the scheduler."""
        return self.seconds("Single", batch) / self.seconds("Single-MBS", batch)

    def product(self, batch: int) -> float:
        """What pipeline and scheduler gain together, over the product of what each gains alone."""
        single = self.seconds("Single", batch)
        pipeline = single / self.seconds("Pipeline", batch)
        return single / self.seconds("Pipeline-MBS", batch) / (pipeline * self.scheduler(batch))

    def run(self, variant: str, batch: int) -> None:
        """A few steps of `batch` rows; the first one, which warms up, does not count."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        is_pipeline = variant.startswith("Pipeline")
        backends = "torch+opencl" if variant.endswith("MBS") else "torch"
        names = ("a", "b", "c") if is_pipeline else ("a",)
        recipe = load_recipe(
            None,
            {
                "model.name": str(self._model),
                "data.train": str(make_data(self._folder / "data.jsonl", batch * (COUNTED + UNCOUNTED), TOKENS)),
                "epochs": 1,
                "batch_rows": batch,
                # A pipeline's are the planner's choice: what a micro-batch of few rows gains depends on the scheduler.
                "micro_batches": None if is_pipeline else 1,
                "recompute": "off",
                "max_grad_norm": 0.0,
                "freeze": ("embeddings",),
                "allocator": "default",
                "local_workers": tuple(LocalWorker(name=name, speed=SPEED, backends=backends) for name in names),
                "output": str(folder),
                **({"cuts": (3, 5)} if is_pipeline else {}),
            },
        )
        plan = api.train(recipe, api.QuietObserver()).plan
        assert plan is not None
        self.micro_batches[variant, batch] = plan.micro_batches
        steps = [record.seconds for record in valid_steps(read_events(folder / api.EVENTS))]
        self._seconds.setdefault((variant, batch), []).extend(steps[UNCOUNTED:])
