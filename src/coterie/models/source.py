"""A model on disk: a folder or GGUF file the user names, or a hub name downloaded once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import ModelError, UnsupportedModelError
from coterie.jobs.model_folder import local_model
from coterie.models.gguf_config import config_from_gguf
from coterie.models.gguf_file import read_gguf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = (
    "encoders such as BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT and decoders such as GPT-2, OPT, Llama, Qwen, "
    "Mistral, Gemma, Phi, GPT-NeoX, BLOOM, Falcon, OLMo-2, SmolLM3, Mixtral, Granite, GPT-OSS, Mamba"
)
"""Families that the tests cut, for the text of refusals; others of the same build work too."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights may be, in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model folder or GGUF file: its config is read, its weights are not.

    Attributes:
        name: What the user called it.
        folder: The folder on this machine.
        config: Its Hugging Face config.
        gguf_file: The file in the folder that holds everything, if the model is a GGUF file.
    """

    name: str
    folder: Path
    config: "PretrainedConfig"
    gguf_file: Path | None = None

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder: where the weights and the tokenizer are."""
        return self.gguf_file or self.folder


def open_model(name_or_folder: str | Path) -> ModelSource:
    """Opens a folder or a GGUF file, or downloads a hub model once into the usual cache.

    Code that comes with a model is never run.

    Raises:
        ModelError: The folder, file or hub name does not exist, cannot be reached, or is incomplete.
        UnsupportedModelError: The model needs code of its own, is quantized (but for GGUF) or is an encoder-decoder.
    """
    name = str(name_or_folder)
    path = local_model(name) or _download(name)
    if path.is_file():
        config = _refuse_encoder_decoder(config_from_gguf(read_gguf(path), name), name)
        return ModelSource(name=name, folder=path.parent, config=config, gguf_file=path)
    return ModelSource(name=name, folder=path, config=read_config(path, name))


def read_config(folder: Path, name: str) -> "PretrainedConfig":
    """The Hugging Face config of a model folder; see `open_model` for what it raises."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{name} has no config.json", hint="give the folder that `save_pretrained` wrote") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="download or save the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object", hint="download or save the model again")
    model_type = raw.get("model_type")
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 - heavy, as below
    from transformers import AutoConfig  # noqa: PLC0415 - heavy; a worker that only joins must not load it
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UnsupportedModelError(
                f"{name} needs code of its own (auto_map in config.json), which is never run",
                hint=f"use a model that transformers has built in: {SUPPORTED}",
            )
        raise UnsupportedModelError(
            f"{name} has the unknown model type {model_type!r}", hint=f"supported are {SUPPORTED}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"{name} holds quantized weights, which cannot be trained here", hint="use the unquantized model"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{path} holds settings that do not fit together: {last_line(error)}", hint="download the model again"
        ) from error
    return _refuse_encoder_decoder(config, name)


def weight_file(folder: Path, name: str) -> Path:
    """The single weight file or the index of a sharded one.

    Raises:
        ModelError: The folder holds no weights.
    """
    for candidate in WEIGHT_FILES:
        if (folder / candidate).is_file():
            return folder / candidate
    raise ModelError(
        f"{name} holds no weights: none of {', '.join(WEIGHT_FILES)} is in {folder}",
        hint="download or save the model again, with its weights",
    )


def last_line(error: Exception) -> str:
    """The last line of an error's text: what libraries that validate settings put the reason in."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _refuse_encoder_decoder(config: "PretrainedConfig", name: str) -> "PretrainedConfig":
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is an encoder-decoder model, which cannot be cut yet",
            hint=f"supported are {SUPPORTED}",
        )
    return config


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only when a hub name is given
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    texts = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*texts, "pytorch_model*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{name} is neither a folder here nor a model that can be downloaded: {reason}",
            hint="check the spelling and the network, or give a folder that holds config.json and weights",
        ) from error
    return folder
