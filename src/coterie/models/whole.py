"""The whole, uncut model: the single-device reference, and what is exported. No stubs, no cutting code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from coterie.errors import ModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.adapters import clean_name, inject
from coterie.models.anatomy import Anatomy, describe
from coterie.models.frozen_linear import place_frozen
from coterie.models.frozen_weights import PackedWeights, frozen_matrices
from coterie.models.keys import RandomKey, seed_for, seed_generators
from coterie.models.skeleton import BUILDING, config_of, empty_model, materialise_buffers, model_class, set_buffer
from coterie.models.weights import FolderWeights, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_whole_model(spec: ModelSpec, weights: WeightStore, *, use_cache: bool = False) -> "PreTrainedModel":
    """The spec's whole model on the CPU, with the trained parts marked, in training mode.

    A folder is read by transformers' own `from_pretrained` (a GGUF file is not: transformers would hold it twice and
    take the model for a quantized one); only layers that it lacks, and adapters, start as they do on stages. With LoRA
    the model holds PEFT's layers, with a `frozen_dtype` those of `coterie.models.frozen_linear`.

    Args:
        spec: The model.
        weights: A folder, or any other store that holds all of `Anatomy.unit_of`.
        use_cache: Keeps the config's own setting for generation, which an exported config needs and training does not.

    Raises:
        ModelError: Weights are missing, damaged, or of other shapes.
        UnsupportedModelError: The model is not supported.
    """
    with BUILDING:
        return _loaded(spec, weights, use_cache=use_cache)


def _loaded(spec: ModelSpec, weights: WeightStore, *, use_cache: bool) -> "PreTrainedModel":
    anatomy = describe(spec)
    model = (
        _from_folder(spec, weights, anatomy)
        if isinstance(weights, FolderWeights) and not weights.is_gguf
        else _from_store(spec, weights, anatomy)
    )
    if use_cache:
        model.config.use_cache = getattr(config_of(spec), "use_cache", None)
    if spec.lora is not None:
        inject(model, spec.lora, list(spec.lora.target_modules))
        adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
        values = weights.get([clean_name(name) for name in adapters])
        for name in adapters:
            _assign(model, name, values[clean_name(name)])
    place_frozen(model, frozen_matrices(spec).values(), PackedWeights(weights, spec), torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(clean_name(name) in anatomy.trainable_names)
    model.train()
    return model


def named_by_unit(model: nn.Module) -> dict[str, nn.Parameter]:
    """The whole model's parameters under the names of `Anatomy.unit_of`."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def seed_by_key(model: nn.Module, anatomy: Anatomy) -> Callable[[RandomKey], None]:
    """Makes a whole model draw the random numbers that its stages would draw.

    Args:
        model: The whole model.
        anatomy: Its anatomy.

    Returns:
        A function to call with the key of the next forward.
    """
    current = RandomKey(0, 0, 0)
    device = next(model.parameters()).device
    blocks = model.get_submodule(anatomy.blocks_name)
    assert isinstance(blocks, nn.ModuleList)

    def seed(unit: int) -> None:
        seed_generators(seed_for(current, unit), device)

    def set_key(key: RandomKey) -> None:
        nonlocal current
        current = key

    model.register_forward_pre_hook(lambda *_: seed(0))
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, unit=index + 1: seed(unit))
    blocks[-1].register_forward_hook(lambda *_: seed(anatomy.unit_count - 1))
    return set_key


def _from_folder(spec: ModelSpec, weights: FolderWeights, anatomy: Anatomy) -> "PreTrainedModel":
    config = config_of(spec)
    config.use_cache = False
    found = model_class(spec.auto_class, config)
    with quiet_transformers():
        try:
            model, report = found.from_pretrained(
                weights.folder, config=config, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{weights.folder} cannot be loaded: {error}", hint="download the model again") from error
    lacking = [name for name in anatomy.unit_of if name in report["missing_keys"]]
    for name, tensor in weights.get(lacking).items():
        _assign(model, name, tensor)
    model.tie_weights()
    return model


def _from_store(spec: ModelSpec, weights: WeightStore, anatomy: Anatomy) -> "PreTrainedModel":
    model = empty_model(spec)
    materialise_buffers(model, torch.device("cpu"))
    for name, tensor in weights.get(name for name, _ in model.named_parameters()).items():
        _assign(model, name, tensor)
        for slot in (slot for slot, first in anatomy.slots.items() if first == name):
            owner, _, leaf = slot.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(name))
    for name, tensor in weights.get(anatomy.buffers).items():
        set_buffer(model, name, tensor)
    return model


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    expected = model.get_parameter(name).shape
    if tensor.shape != expected:
        raise ModelError(
            f"{name} has shape {tuple(tensor.shape)}, and {tuple(expected)} in the model's config",
            hint="the weights belong to another model",
        )
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and its advice to train the new layers, which is being done."""
    from transformers.utils import logging  # noqa: PLC0415 - heavy

    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
