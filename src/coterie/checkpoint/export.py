"""From a checkpoint to a folder that plain transformers, or plain PEFT, loads with equal logits."""

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from coterie import __version__
from coterie.checkpoint.assembling import ExportDtype, assemble_adapter, assemble_full
from coterie.checkpoint.durable import publish_folder, remove_folder, settle, storage_errors, sync_tree
from coterie.checkpoint.export_record import RECORD, ExportRecord, read_record, write_record
from coterie.checkpoint.model_card import CardFacts, model_card
from coterie.checkpoint.names import PARTIAL
from coterie.checkpoint.reading import Checkpoint
from coterie.errors import ModelError, StorageError, UsageError
from coterie.models.skeleton import config_of
from coterie.models.source import ModelSource
from coterie.models.whole import quiet_transformers

_GENERATION = "generation_config.json"
"""How a causal model writes text, if its folder says so."""


class SavesItself(Protocol):
    """A tokenizer, as far as it matters here."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write all files into a folder."""
        ...


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to export.

    Attributes:
        merge: Under LoRA: a plain model with the adapters merged in, instead of an adapter folder.
        dtype: Type of the saved weights.
        overwrite: Take the place of a folder whatever is in it (it is renamed to `….old`); without it only of one that
            was exported here and not added to (which is deleted).
        base_name: Name under which others find the base model; by default as the user gave it.
        max_shard_bytes: Largest weight file; by default what transformers takes.
        facts: For the model card.
    """

    merge: bool = False
    dtype: ExportDtype = "float32"
    overwrite: bool = False
    base_name: str = ""
    max_shard_bytes: int | None = None
    facts: CardFacts = CardFacts()


_DEFAULT = ExportOptions()


def export_model(
    source: ModelSource,
    checkpoint: Checkpoint,
    tokenizer: SavesItself | Path | None,
    out_folder: Path,
    options: ExportOptions = _DEFAULT,
) -> Path:
    """Write the trained model as a Hugging Face folder, or under LoRA as a PEFT adapter folder. Whole or not at all.

    Args:
        source: The pretrained model: what was not trained comes from there.
        checkpoint: What was trained. It also says which model it is.
        tokenizer: The tokenizer as it was used (a pad token may have been chosen), a folder that holds one, or None.
        out_folder: Made or replaced.
        options: See `ExportOptions`.

    Raises:
        StorageError: `out_folder` holds files that were not exported here, or the disk is full.
        UsageError: `out_folder` is or contains the model folder or the checkpoint, or float16 cannot hold the weights.
        ModelError: The model folder is not the one that was trained, or the tokenizer folder holds none.
    """
    out_folder = out_folder.absolute()
    _refuse_sources(out_folder, checkpoint.folder)
    strange = check_out_folder(out_folder, source, overwrite=options.overwrite)
    base_name = options.base_name or findable_name(source)
    tokenizer = _opened(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    adapter = checkpoint.manifest.terms.model.lora is not None and not options.merge
    save = _adapter_saver(checkpoint, source, base_name, options) if adapter else _saver(checkpoint, source, options)
    with published(out_folder, checkpoint.manifest.nbytes, keep_old=bool(strange)) as partial, quiet_transformers():
        save(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        card = model_card(checkpoint.manifest, options.facts, base_name=base_name, adapter=adapter)
        (partial / "README.md").write_text(card, encoding="utf-8")
        _write_record(partial, checkpoint)
    return out_folder


def check_out_folder(out_folder: Path, source: ModelSource, *, overwrite: bool = False) -> tuple[str, ...]:
    """May a model be exported to this folder? Asked before a run too, so that it is not refused its model at the end.

    Returns:
        Files in it that no export put there; none unless `overwrite`.

    Raises:
        StorageError: There are such files.
        UsageError: It is or contains the folder of the pretrained model.
    """
    _refuse_sources(out_folder, source.path)
    strange = _strangers_files(out_folder)
    if strange and not overwrite:
        raise StorageError(
            f"{out_folder} holds {len(strange)} files that were not exported here, such as {strange[0]}",
            hint="choose another folder, or allow overwriting",
        )
    return tuple(strange)


def _saver(checkpoint: Checkpoint, source: ModelSource, options: ExportOptions) -> Callable[[Path], None]:
    """What writes the whole model, put together already: its errors are no errors of the disk."""
    model = assemble_full(checkpoint, source, options.dtype)
    limit = {} if options.max_shard_bytes is None else {"max_shard_size": options.max_shard_bytes}

    def save(partial: Path) -> None:
        model.save_pretrained(partial, **limit)
        settings = source.folder / _GENERATION
        if source.gguf_file is None and settings.is_file():
            # Made of the model's config alone it would lack, for one, the second token that ends a chat model's turn.
            shutil.copyfile(settings, partial / _GENERATION)

    return save


def _adapter_saver(
    checkpoint: Checkpoint, source: ModelSource, base_name: str, options: ExportOptions
) -> Callable[[Path], None]:
    """What writes the adapter folder; the config goes with it, for the labels that the base model does not know."""
    model = assemble_adapter(checkpoint, source, base_name, options.dtype)

    def save(partial: Path) -> None:
        # An embedding in `modules_to_save` is saved anyway; PEFT would ask the hub to guess whether it was resized.
        model.save_pretrained(str(partial), save_embedding_layers=False)
        config_of(checkpoint.manifest.terms.model).save_pretrained(partial)

    return save


def _opened(folder: Path) -> SavesItself:
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    try:
        opened: SavesItself = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no tokenizer: {error}", hint="give the folder of the base model") from error
    return opened


def _write_record(partial: Path, checkpoint: Checkpoint) -> None:
    terms = checkpoint.manifest.terms
    record = ExportRecord(
        coterie=__version__,
        run_id=terms.run_id,
        step=checkpoint.step,
        files=(*files_in(partial), RECORD),
        task=terms.task,
        prompt=terms.prompt,
        text_field=checkpoint.manifest.text_field,
        max_tokens=checkpoint.manifest.max_tokens,
        pairs=checkpoint.manifest.pairs,
    )
    write_record(partial, record)


@contextmanager
def published(out_folder: Path, needed_bytes: int, *, keep_old: bool) -> Iterator[Path]:
    """A folder beside `out_folder` that takes its place when the block ends well and vanishes otherwise.

    With `keep_old` what was there before is not deleted but renamed: it holds files that nobody can make again.
    """
    partial = out_folder.with_name(out_folder.name + PARTIAL)
    try:
        with storage_errors(out_folder.parent, needed_bytes):
            out_folder.parent.mkdir(parents=True, exist_ok=True)
            settle(out_folder.parent, re.compile(re.escape(out_folder.name)))
            partial.mkdir()
            yield partial
            sync_tree(partial)
            if keep_old:
                out_folder.rename(_free_name(out_folder))
            publish_folder(partial, out_folder)
    except BaseException:
        remove_folder(partial)
        raise


def _free_name(folder: Path) -> Path:
    """A name beside `folder` that nothing has."""
    names = (folder.with_name(f"{folder.name}.old{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def findable_name(source: ModelSource) -> str:
    """The hub name, or for a folder or file its full path: a relative one would mean something else from elsewhere."""
    return str(source.path.resolve()) if Path(source.name).expanduser().exists() else source.name


def _refuse_sources(out_folder: Path, *sources: Path) -> None:
    for folder in sources:
        if out_folder.resolve() in {folder.resolve(), *folder.resolve().parents}:
            raise UsageError(
                f"{out_folder} is or contains {folder}, which the export reads",
                hint="choose another folder to write to",
            )


def _strangers_files(out_folder: Path) -> list[str]:
    """Files in `out_folder` that no export put there."""
    if out_folder.exists() and not out_folder.is_dir():
        raise StorageError(f"{out_folder} is a file", hint="choose a folder")
    record = read_record(out_folder)
    return sorted(set(files_in(out_folder)) - set(record.files if record else ()))


def files_in(folder: Path) -> tuple[str, ...]:
    """Names of all files below `folder`, by slashes."""
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
