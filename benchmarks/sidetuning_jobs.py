"""Jobs of one data set: the same rows, order and seed for whatever is trained on them."""

import tempfile
from pathlib import Path

import msgspec

from coterie.cli.demo import demo_model
from coterie.config.loading import load_recipe
from coterie.coordinator.job import Job, prepare_job
from coterie.ids import RunId
from coterie.jobs.model_spec import TrainableMethod
from coterie.models import FolderWeights, config_of, describe
from coterie.sidetuning.backbone import make_backbone_spec
from sidetuning_settings import SideSetting
from task_runs import DECODER_PACKAGE, decoder_file
from task_slices import Slices, make_slices, missing


class Jobs:
    """Opens a setting's jobs in a scratch folder.

    Args:
        setting: Data set, model and hyperparameters.
        folder: For what is written.
        data: A folder per data set; None for what ships with coterie.

    Attributes:
        folder: Of this setting's files.
    """

    def __init__(self, setting: SideSetting, folder: Path, data: Path | None) -> None:
        self.setting = setting
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.slices: Slices = make_slices(setting.slices, data, self.folder, setting.sizes)

    def trained(self, method: TrainableMethod, seed: int) -> Job:
        """A job that trains the model itself."""
        return self._prepare(method, seed, self.setting.local_epochs, self.setting.local_learning_rate)

    def frozen(self, seed: int) -> Job:
        """A job whose blocks are all frozen; task layers are trained, if there are any."""
        job = self._prepare("lora", seed, self.setting.epochs, self.setting.learning_rate)
        config = config_of(job.spec)
        known = {name: getattr(config, name) for name in ("id2label", "label2id", "problem_type", "pad_token_id")}
        spec = make_backbone_spec(job.source, auto_class=job.spec.auto_class, seed=seed, config_overrides=known)
        return msgspec.structs.replace(job, spec=spec, anatomy=describe(spec), weights=FolderWeights(job.source, spec))

    def overrides(self, seed: int, epochs: int, learning_rate: float) -> dict[str, object]:
        """A recipe's keys: the same for all that is trained on this data set."""
        setting = self.setting
        return {
            "data.train": str(self.slices.train),
            "data.test": str(self.slices.test),
            "data.task": setting.task,
            "model.name": str(decoder_file() if setting.decoder else demo_model()),
            "epochs": epochs,
            "batch_rows": setting.batch_rows,
            "learning_rate": learning_rate,
            "warmup_ratio": 0.05,
            "seed": seed,
        }

    def _prepare(self, method: TrainableMethod, seed: int, epochs: int, learning_rate: float) -> Job:
        recipe = load_recipe(None, {**self.overrides(seed, epochs, learning_rate), "method": method})
        return prepare_job(recipe, RunId("sidetuning"), lambda _text: None)


def left_out(setting: SideSetting, data: Path | None) -> str | None:
    """Why a data set cannot be used, or None."""
    if setting.decoder and decoder_file() is None:
        return f"its model is not installed (make install brings {DECODER_PACKAGE})"
    return missing(setting.slices, data)
