"""What a plan needs to know of model, data and this machine, kept between commands: a second plan needs no torch."""

import hashlib
import platform
from pathlib import Path

import msgspec

from coterie.config.recipe import Recipe
from coterie.measure.cached import keep
from coterie.planner.way import RunData
from coterie.profiles.cache import ProfileCache, profile_key
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.profiles.model_profile import ModelProfile

_MODEL_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*.bin")
_CONTENT_LIMIT_BYTES = 64 << 20
"""Larger files (weights) are known by size and time of change; what a model costs does not depend on their values."""

_TRAIN_KEYS = (
    "mode",
    "method",
    "lora_variant",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "freeze",
    "trainable",
    "epochs",
    "max_steps",
    "batch_rows",
    "micro_batches",
    "seed",
    "group_by_length",
)
"""What of the training settings the facts depend on; schedule and optimizer are the planner's own business."""


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one recipe.

    Attributes:
        model: The model at the run's shapes.
        device: This machine with one thread, as a worker measured it.
        data: How many rows and tokens there are, and the run's optimizer steps.
    """

    model: ModelProfile
    device: DeviceProfile
    data: RunData

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.data.steps


def known_facts(recipe: Recipe) -> PlanFacts | None:
    """The facts from an earlier command, if model, data, settings and libraries are still the same."""
    key = _key(recipe)
    return None if key is None else ProfileCache().read(key, PlanFacts)


def keep_facts(recipe: Recipe, facts: PlanFacts) -> None:
    """Keep facts for the next command, where it can be known whether they still hold."""
    key = _key(recipe)
    if key is not None:
        keep(ProfileCache(), key, facts)


def _key(recipe: Recipe) -> str | None:
    """None for hub models and data sets that are not files here: whether they have changed is not known."""
    data = recipe.data
    sources = [Path(source) for source in (data.train, data.dev, data.test) if source is not None]
    model = Path(recipe.model.name).expanduser()
    if not model.is_dir() or not all(source.exists() for source in sources):
        return None
    files = sorted(path for pattern in _MODEL_FILES for path in model.glob(pattern))
    for source in sources:
        files += sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    return profile_key(
        "plan facts, data, largest step",
        model=recipe.model,
        data=data,
        train={name: getattr(recipe.train, name) for name in _TRAIN_KEYS},
        files=[_print_of(path) for path in files],
        machine=(platform.machine(), platform.processor(), platform.node()),
    )


def _print_of(path: Path) -> tuple[str, int, str]:
    found = path.stat()
    if found.st_size > _CONTENT_LIMIT_BYTES:
        return path.name, found.st_size, str(found.st_mtime_ns)
    with path.open("rb") as file:
        return path.name, found.st_size, hashlib.file_digest(file, "sha256").hexdigest()
