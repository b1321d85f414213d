"""A side network as a folder that needs nothing of coterie to be used: its README says how, in plain transformers.

| file | what is in it |
|---|---|
| `side_network.safetensors` | the side network, by the names of `coterie.sidetuning.side_network` |
| `task_layers.safetensors` | layers of the model that were trained beside it (a classifier); absent if there are none |
| `side_config.json` | backbone (name or path, hash of its weights), shape and settings: `coterie.jobs.side_folder` |
| `first_task_layers.safetensors` | of additive mode: the same layers before training |
| `config.json`, tokenizer | as transformers reads them; the config knows the task's labels |
| `backbone/` | the backbone, where it was to be copied |
| `README.md`, `coterie.json` | for people; which run, which task |
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from coterie.checkpoint.export import SavesItself, check_out_folder, files_in, findable_name, published
from coterie.checkpoint.export_record import RECORD, ExportRecord, write_record
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_folder import (
    BACKBONE,
    FIRST_TASK_LAYERS,
    SIDE_NETWORK,
    TASK_LAYERS,
    SideConfig,
    write_side_config,
)
from coterie.jobs.side_spec import SideSpec
from coterie.models import ModelSource, WeightStore, config_of, describe
from coterie.models.digest import weights_digest
from coterie.models.source import WEIGHT_FILES
from coterie.sidetuning.side_card import side_card
from coterie.sidetuning.side_network import PREFIX

_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")
"""Of a backbone's folder what is copied beside its weights: configs and tokenizer."""


class TrainedSide(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a run of side-tuning ends with.

    Attributes:
        side: Settings.
        network: The side network's parameters by name.
        task_layers: The model's parameters that were trained beside it, by name; none of a causal model.
        first_task_layers: The same before training, in additive mode.
    """

    side: SideSpec
    network: Mapping[str, Tensor]
    task_layers: Mapping[str, Tensor]
    first_task_layers: Mapping[str, Tensor] = {}

    @property
    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """What each file holds; without those that would be empty."""
        every = {
            SIDE_NETWORK: self.network,
            TASK_LAYERS: self.task_layers,
            FIRST_TASK_LAYERS: self.first_task_layers,
        }
        return {name: tensors for name, tensors in every.items() if tensors}


def trained_side(side: SideSpec, parameters: Mapping[str, Tensor], weights: WeightStore) -> TrainedSide:
    """What a run ends with, by the names of `SideModel.parameters`.

    Args:
        side: Settings.
        parameters: All that was trained.
        weights: The backbone with new layers as they started.
    """
    network = {name.removeprefix(PREFIX): tensor for name, tensor in parameters.items() if name.startswith(PREFIX)}
    task_layers = {name: tensor for name, tensor in parameters.items() if not name.startswith(PREFIX)}
    first = weights.get(task_layers) if side.mode == "additive" else {}
    return TrainedSide(side=side, network=network, task_layers=task_layers, first_task_layers=first)


class SideExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to export.

    Attributes:
        copy_backbone: Copy the backbone into the folder, so that it needs no other; else it is named.
        overwrite: See `coterie.checkpoint.export.ExportOptions`.
        base_name: Name under which others find the backbone; by default as the user gave it.
        metrics: For the README: quality by name.
    """

    copy_backbone: bool = False
    overwrite: bool = False
    base_name: str = ""
    metrics: dict[str, float] = {}


_DEFAULT = SideExportOptions()


def export_side(  # noqa: PLR0913 - what a folder is made of, the last named at the call
    source: ModelSource,
    spec: ModelSpec,
    trained: TrainedSide,
    tokenizer: SavesItself | None,
    out_folder: Path,
    *,
    record: ExportRecord,
    options: SideExportOptions = _DEFAULT,
) -> Path:
    """Write the folder, whole or not at all.

    Args:
        source: The backbone.
        spec: The model with its task's settings.
        trained: What the server trained.
        tokenizer: As it was used.
        out_folder: Made or replaced.
        record: Which run and task; its `files` are filled in.
        options: See `SideExportOptions`.

    Raises:
        StorageError: `out_folder` holds files that were not exported here, or the disk is full.
        UsageError: `out_folder` is or contains the backbone's folder.
    """
    out_folder = out_folder.absolute()
    strange = check_out_folder(out_folder, source, overwrite=options.overwrite)
    copied = _files_to_copy(source) if options.copy_backbone else ()
    config = _config(source, spec, trained, options)
    tensors = (tensor for part in trained.files.values() for tensor in part.values())
    needed_bytes = sum(tensor.nbytes for tensor in tensors) + sum(path.stat().st_size for path in copied)
    with published(out_folder, needed_bytes, keep_old=bool(strange)) as partial:
        for name, part in trained.files.items():
            _save(part, partial / name)
        write_side_config(partial, config)
        config_of(spec).save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        if copied:
            (partial / BACKBONE).mkdir()
        for path in copied:
            shutil.copyfile(path, partial / BACKBONE / path.name)
        card = side_card(
            config,
            stub_form=describe(spec).stub_form,
            task_layers=TASK_LAYERS in trained.files,
            record=record,
            metrics=options.metrics,
        )
        (partial / "README.md").write_text(card, encoding="utf-8")
        write_record(partial, msgspec.structs.replace(record, files=(*files_in(partial), RECORD)))
    return out_folder


def _config(source: ModelSource, spec: ModelSpec, trained: TrainedSide, options: SideExportOptions) -> SideConfig:
    anatomy = describe(spec)
    backbone = options.base_name or findable_name(source)
    if options.copy_backbone:
        backbone = BACKBONE
    elif source.gguf_file is not None and not options.base_name:
        backbone = str(source.folder.resolve())
    return SideConfig(
        backbone=backbone,
        gguf_file=source.gguf_file.name if source.gguf_file is not None else "",
        backbone_digest=weights_digest(source),
        auto_class=spec.auto_class,
        blocks=anatomy.blocks_name,
        layers=anatomy.unit_count - 2,
        width=next(len(tensor) for name, tensor in trained.network.items() if name.startswith("norms.")),
        side=trained.side,
    )


def _files_to_copy(source: ModelSource) -> tuple[Path, ...]:
    """The backbone's weights, config and tokenizer; of several kinds of weight files the one that is read."""
    if source.gguf_file is not None:
        return (source.gguf_file,)
    read = next(name for name in WEIGHT_FILES if (source.folder / name).is_file())
    weights = Path(read.removesuffix(".index.json")).suffix
    return tuple(
        path
        for path in sorted(source.folder.iterdir())
        if path.is_file() and path.suffix in {weights, *_BESIDE_WEIGHTS}
    )


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
