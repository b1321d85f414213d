"""What a model folder says of itself without torch: encoder or decoder, how large, what it was trained for."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from coterie.errors import ModelError, UnsupportedModelError
from coterie.jobs.model_folder import local_model

ENCODERS = (
    "bert",
    "camembert",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "layoutlm",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "squeezebert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types of transformers that read a text from both sides. Every other one but an encoder-decoder generates."""

_SHARED_LAYERS = ("albert",)
_WIDTHS = ("hidden_size", "n_embd", "dim", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions")
_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 1 << 28

Direction = Literal["encoder", "decoder"]


class ModelLook(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its folder describes it.

    Attributes:
        direction: An encoder labels texts; a decoder also generates them.
        model_type: As transformers calls the family.
        width: Hidden size; None where the config does not say.
        context: Tokens that fit; None where the config does not say.
        parameters: Counted in the weight files' headers; None where they cannot be counted so.
        task: What it was trained for already, if its class says so.
        chat_template: Its tokenizer can lay out a conversation (taken for granted of GGUF files, which are not opened).
    """

    direction: Direction
    model_type: str
    width: int | None = None
    context: int | None = None
    parameters: int | None = None
    task: str | None = None
    chat_template: bool = False

    def describe(self) -> str:
        """One line for people."""
        size = "" if self.parameters is None else f", {self.parameters / 1e6:.1f} M parameters"
        width = "" if self.width is None else f", width {self.width}"
        return f"{self.model_type} ({self.direction}{width}{size})"


def look_at_model(name: str) -> ModelLook | None:
    """What is known of a model folder or GGUF file; None for a name on the hub, which nothing is downloaded for.

    Raises:
        ModelError: The path leads nowhere, or to a folder without a readable config.
        UnsupportedModelError: No task can be trained on such a model.
    """
    folder = local_model(name)
    if folder is None:
        return None
    if folder.is_file():
        return ModelLook(direction="decoder", model_type="GGUF file", chat_template=True)
    config = read_json_object(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(
            f"{name} has no config.json that names a model type", hint="give the folder that `save_pretrained` wrote"
        )
    _refuse(name, model_type, config)
    return ModelLook(
        direction="encoder" if model_type in ENCODERS else "decoder",
        model_type=model_type,
        width=_first_int(config, _WIDTHS),
        context=_first_int(config, _POSITIONS),
        parameters=count_parameters(folder),
        task=task_of_config(config),
        chat_template=_has_chat_template(folder),
    )


def task_of_config(config: Mapping[str, object]) -> str | None:
    """The task that a config's class was made for; None for a class without a task's output layer."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    name = str(architectures[0])
    if name.endswith("ForTokenClassification"):
        return "token-classification"
    if name.endswith("ForSequenceClassification"):
        labels = config.get("id2label")
        single = isinstance(labels, Mapping) and len(labels) == 1
        return "regression" if config.get("problem_type") == "regression" or single else "sequence-classification"
    return "causal-lm" if name.endswith(("ForCausalLM", "LMHeadModel")) else None


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty if there is no such file, or nothing of the kind in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def count_parameters(folder: Path) -> int | None:
    """Elements of all tensors in the safetensors files of `folder`, by their headers; None if there are no such files.

    Weights in fewer bits hold several values in one element and count too low; such models are refused elsewhere.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        header = _header(path)
        if header is None:
            return None
        for name, entry in header.items():
            shape = entry.get("shape") if isinstance(entry, dict) else None
            if name != "__metadata__" and isinstance(shape, list):
                size = 1
                for length in shape:
                    size *= int(length)
                total += size
    return total or None


def _header(path: Path) -> dict[str, object] | None:
    """The JSON at the beginning of a safetensors file, after its length in 8 bytes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _LONGEST_HEADER_BYTES:
                return None
            content = json.loads(file.read(length))
    except (OSError, ValueError, struct.error):
        return None
    return content if isinstance(content, dict) else None


def _refuse(name: str, model_type: str, config: Mapping[str, object]) -> None:
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{name} ({model_type}) is an encoder-decoder model, which cannot be cut",
            hint="give an encoder (BERT, RoBERTa …) to label texts, or a decoder (GPT-2, Llama …) to write them",
        )
    if model_type in _SHARED_LAYERS:
        raise UnsupportedModelError(
            f"{name} ({model_type}) uses the same layer again and again, which cannot be cut", hint="give another model"
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(read_json_object(folder / "tokenizer_config.json").get("chat_template"))


def _first_int(config: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)
