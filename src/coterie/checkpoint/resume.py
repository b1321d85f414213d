"""May this run go on from that checkpoint? Every difference that changes the numbers is named, all at once.

Must be equal: run, task, model and what is trained of it, optimizer, seed, batch rows, micro-batches, schedule, data
and their order, base weights, and whether links may lose digits. May change, since losses do not depend on them: cut,
devices, number of workers, allocator, recomputation, folder names, library versions (said in a note, since another
torch may round differently). The number of epochs enters the numbers through the decay of the learning rate: it may
change only where that is constant.
"""

from collections.abc import Mapping

import msgspec

from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.errors import CheckpointError
from coterie.jobs.optimizer_spec import OptimizerSpec

_LONGEST_VALUE = 80

_NOT_COMPARED = ("transformers_version", "_name_or_path")
"""Keys of a Hugging Face config that say where it comes from, not what the model computes."""

_IF_KNOWN = ("task", "data_digest", "base_digest")
"""Compared only if both sides have them."""

_RECIPE_WORDS = {
    "optimizer.total_samples": "rows of the whole run (epochs, max_steps)",
    "optimizer.warmup_samples": "rows of the warm-up (warmup_ratio, warmup_steps)",
    "optimizer.name": "optimizer",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.momentum": "momentum",
    "optimizer.max_grad_norm": "max_grad_norm",
    "optimizer.lr_schedule": "lr_schedule",
    "model.method": "method",
    "model.lora.variant": "lora_variant",
    "model.lora.rank": "lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "adapted modules (lora_targets)",
    "model.frozen": "frozen parameters (freeze, trainable)",
    "model.compute_dtype": "compute_dtype",
    "model.frozen_dtype": "frozen_dtype",
    "model.seed": "seed",
    "data_digest": "training data (hash)",
    "base_digest": "pretrained weights (hash)",
}
"""What the recipe calls the terms; others go by their own names."""

_Flat = dict[str, object]


def check_resume(manifest: Manifest, wanted: RunTerms, libraries: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Compare the terms of a checkpoint with those of the run that wants to go on from it.

    Args:
        manifest: The checkpoint's.
        wanted: What the user asks for now.
        libraries: Versions in use now.

    Returns:
        Notes about differences that are allowed but may show in the last digits.

    Raises:
        CheckpointError: Terms differ; the message lists every difference.
    """
    lines = differences(manifest.terms, wanted)
    if lines:
        raise CheckpointError(
            f"the checkpoint of step {manifest.global_step} belongs to a run with other settings:\n  "
            + "\n  ".join(lines),
            hint="use the settings of the checkpoint, or start a new run in another folder",
        )
    return tuple(
        f"{name} is {version} now, {manifest.libraries[name]} when the checkpoint was written"
        for name, version in sorted((libraries or {}).items())
        if name in manifest.libraries and manifest.libraries[name] != version
    )


def differences(saved: RunTerms, wanted: RunTerms) -> tuple[str, ...]:
    """One line per setting that differs: its name in the recipe, its value in the checkpoint, its value now."""
    before, now = _flatten(saved), _flatten(wanted)
    for name in _IF_KNOWN:
        if not before[name] or not now[name]:
            before.pop(name)
            now.pop(name)
    names = sorted(set(before) | set(now))
    lines = (
        f"{_RECIPE_WORDS.get(name, name)}: {_shown(before, name)} in the checkpoint, {_shown(now, name)} now"
        for name in names
        if _shown(before, name, longest=0) != _shown(now, name, longest=0)
    )
    return tuple(dict.fromkeys(lines))  # a recipe's word may stand for two terms


def _flatten(terms: RunTerms) -> _Flat:
    """Dotted names to plain values; the config's JSON opened, so that single keys are compared."""
    plain = msgspec.to_builtins(msgspec.structs.replace(terms, optimizer=_without_unused(terms.optimizer)))
    config = msgspec.json.decode(plain["model"].pop("config_json"), type=dict[str, object])
    plain["model"]["config"] = {key: value for key, value in config.items() if key not in _NOT_COMPARED}
    flat: _Flat = {}
    _flatten_into(flat, "", plain)
    return flat


def _flatten_into(flat: _Flat, prefix: str, value: object) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten_into(flat, f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        flat[prefix] = value


def _without_unused(optimizer: OptimizerSpec) -> OptimizerSpec:
    """Without the run's length where nothing depends on it: then epochs may be added."""
    if optimizer.lr_schedule == "constant":
        return msgspec.structs.replace(optimizer, total_samples=0)
    return optimizer


def _shown(flat: _Flat, name: str, longest: int = _LONGEST_VALUE) -> str:
    """A value as JSON, cut to `longest` characters (0: whole), or `absent`."""
    if name not in flat:
        return "absent"
    text = msgspec.json.encode(flat[name]).decode()
    return text if not longest or len(text) <= longest else text[: longest - 1] + "…"
