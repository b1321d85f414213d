"""From a checkpoint to a GGUF file, which llama.cpp, Ollama and what is built on them can run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from coterie.checkpoint.assembling import assemble_full, cast_tensor
from coterie.checkpoint.durable import check_free_space, storage_errors, sync_file, sync_folder
from coterie.checkpoint.gguf_families import architecture_of, as_stored, extra_tensors, head_width, write_settings
from coterie.checkpoint.gguf_vocabulary import write_vocabulary
from coterie.checkpoint.names import PARTIAL
from coterie.checkpoint.reading import Checkpoint
from coterie.errors import StorageError, UnsupportedModelError, UsageError
from coterie.models.gguf_config import config_from_gguf
from coterie.models.gguf_file import read_gguf
from coterie.models.gguf_tokenizer import tokenizer_from_gguf
from coterie.models.skeleton import config_of
from coterie.models.source import ModelSource

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GgufDtype = Literal["float32", "float16", "bfloat16", "q8_0"]

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}

_MUST_SURVIVE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)
"""Settings that a reader of the file must find as they were."""

_PROBES = (
    "The 12 quick foxes didn't jump over 3,456.78 dogs; did they?",
    "  two  spaces, a\ttab\nand\n\nnew lines ",
    "naïve café — Übergröße, Привет мир, 你好，世界, مرحبا, 🙂👍",
    "def f(x):\n    return x[1:2] + {'a': 0x1F}\n",
)
"""Texts that must get the same tokens from the file's tokenizer."""


class GgufOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to export.

    Attributes:
        dtype: Type of the matrices; vectors stay float32. `q8_0`: 8 bits, blocks of 32 values with a common scale.
        overwrite: Take the place of a file that is there.
        name: What the model is called in the file.
    """

    dtype: GgufDtype = "float16"
    overwrite: bool = False
    name: str = ""


_DEFAULT = GgufOptions()


def export_gguf(
    source: ModelSource,
    checkpoint: Checkpoint,
    tokenizer: "PreTrainedTokenizerBase",
    out_file: Path,
    options: GgufOptions = _DEFAULT,
) -> Path:
    """Write the trained causal model as one GGUF file, adapters merged. Whole or not at all, and read back once.

    Args:
        source: The pretrained model: what was not trained comes from there.
        checkpoint: What was trained.
        tokenizer: The tokenizer as it was used.
        out_file: Made, or replaced if `options` allow it.
        options: See `GgufOptions`.

    Raises:
        UnsupportedModelError: The family or its tokenizer cannot be written; nothing is left on the disk.
        StorageError: There is such a file, or the disk is full.
        UsageError: The model does not generate text, or float16 cannot hold its weights.
    """
    from gguf import GGUFWriter  # noqa: PLC0415 - only for GGUF files; above for its type

    out_file = out_file.absolute()
    config = _check(source, checkpoint, out_file, options)
    architecture = architecture_of(config)
    model = assemble_full(checkpoint, source, "float32")
    partial = out_file.with_name(out_file.name + PARTIAL)
    needed_bytes = sum(parameter.numel() for parameter in model.parameters()) * _bytes_of(options.dtype)
    with storage_errors(out_file.parent, needed_bytes):
        out_file.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(out_file.parent, needed_bytes)
        writer = GGUFWriter(partial, architecture)
        try:
            _write_facts(writer, options, out_file)
            write_settings(writer, config)
            write_vocabulary(writer, tokenizer, config.vocab_size)
            _write_tensors(writer, architecture, model, options.dtype)
            writer.close()
            _read_back(partial, config, tokenizer)
            with partial.open("rb+") as file:
                sync_file(file.fileno())
            partial.replace(out_file)
            sync_folder(out_file.parent)
        finally:
            writer.close()
            partial.unlink(missing_ok=True)
    return out_file


def _check(source: ModelSource, checkpoint: Checkpoint, out_file: Path, options: GgufOptions) -> "PretrainedConfig":
    spec = checkpoint.manifest.terms.model
    if spec.auto_class != "AutoModelForCausalLM":
        raise UsageError(
            f"the run trained an {spec.auto_class}, and GGUF files are for models that generate text",
            hint="export a folder (without --gguf)",
        )
    if out_file.is_dir():
        raise StorageError(f"{out_file} is a folder", hint="give the name of a file, such as model.gguf")
    if out_file.exists() and (not options.overwrite or out_file == source.path.resolve()):
        raise StorageError(f"{out_file} is there already", hint="choose another name, or allow overwriting")
    return config_of(spec)


def _write_facts(writer: "GGUFWriter", options: GgufOptions, out_file: Path) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType  # noqa: PLC0415 - only for GGUF files

    writer.add_type("model")
    writer.add_name(options.name or out_file.stem)
    writer.add_file_type(LlamaFileType[_FILE_TYPES[options.dtype]])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _write_tensors(writer: "GGUFWriter", architecture: str, model: "PreTrainedModel", dtype: GgufDtype) -> None:
    """First the list of all tensors, then one after the other: only one of them is held twice."""
    entries = [
        *_named(model, architecture),
        *((name, "", tensor) for name, tensor in extra_tensors(model.config).items()),
    ]
    for name, _, tensor in entries:
        kind = _kind(tensor, dtype)
        shape, element, nbytes = _stored(tensor, kind)
        writer.add_tensor_info(name, shape, element, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parameter, tensor in entries:
        ordered = as_stored(architecture, parameter, tensor, model.config) if parameter else tensor
        writer.write_tensor_data(_packed(name, ordered, _kind(tensor, dtype)))


def _named(model: "PreTrainedModel", architecture: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """llama.cpp's name, the model's own, and the tensor; a tied matrix once."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415 - only for GGUF files

    of_name = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(of_name[architecture], model.config.num_hidden_layers)
    for parameter, tensor in model.named_parameters():
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedModelError(
                f"{parameter} has no name in llama.cpp's {architecture} models", hint="export a folder"
            )
        yield name, parameter, tensor.detach()


def _kind(tensor: torch.Tensor, dtype: GgufDtype) -> "GGMLQuantizationType":
    """How a tensor is stored: vectors in float32, and what does not divide into blocks of 8-bit values in float16."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - only for GGUF files

    if tensor.ndim < 2:
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[_KINDS[dtype]]
    block, _ = GGML_QUANT_SIZES[kind]
    return kind if tensor.shape[-1] % block == 0 else GGMLQuantizationType.F16


def _stored(tensor: torch.Tensor, kind: "GGMLQuantizationType") -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, element type and bytes of a tensor as `gguf` wants to be told of it."""
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape  # noqa: PLC0415 - only for GGUF files

    shape = tuple(tensor.shape)
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    element: np.dtype[Any] = np.dtype(plain.get(kind, np.uint8))
    stored = shape if kind in plain else tuple(quant_shape_to_byte_shape(shape, kind))
    return stored, element, int(np.prod(stored)) * element.itemsize


def _packed(name: str, tensor: torch.Tensor, kind: "GGMLQuantizationType") -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - only for GGUF files
    from gguf.quants import quantize  # noqa: PLC0415 - as above

    if kind is GGMLQuantizationType.F16:
        tensor = cast_tensor(name, tensor, "float16")
    packed: np.ndarray[Any, Any] = quantize(np.ascontiguousarray(tensor.numpy()), kind)
    return packed


def _read_back(path: Path, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    """What a reader would not find as it was must not be written.

    Raises:
        UnsupportedModelError: A setting or the way of splitting text has no place in the file.
    """
    found = config_from_gguf(read_gguf(path), path.name)
    lost = [key for key in _MUST_SURVIVE if (getattr(found, key, 0) or 0) != (getattr(config, key, 0) or 0)]
    if "head_dim" in lost and head_width(found) == head_width(config):
        lost.remove("head_dim")
    if lost:
        raise UnsupportedModelError(
            f"the model's {', '.join(lost)} cannot be written to GGUF", hint="export a Hugging Face folder"
        )
    again, _ = tokenizer_from_gguf(path)
    for text in _PROBES:
        if list(again(text)["input_ids"]) != list(tokenizer(text)["input_ids"]):
            raise UnsupportedModelError(
                f"the tokenizer would split {text[:20]!r} in another way when read from GGUF",
                hint="export a Hugging Face folder and convert it with llama.cpp's convert_hf_to_gguf.py",
            )


def _bytes_of(dtype: GgufDtype) -> int:
    return 4 if dtype == "float32" else 2
