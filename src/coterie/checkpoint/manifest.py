"""The manifest of a checkpoint: which run, how far, and which file holds which parameters, sealed by a hash."""

import hashlib
import re

import msgspec

from coterie.errors import CheckpointError
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.schedules.actions import ScheduleKind

FORMAT_VERSION = 1
"""Raised when an older program could misread what a newer one writes."""

_SHARD_FILE = re.compile(r"unit-\d{3,}\.safetensors")


class NewerFormatError(CheckpointError):
    """A newer version of this program wrote the checkpoint: not damage, so never skipped over."""


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One unit's file: its name, its hash, its size, and the parameters in it in the order they were given."""

    unit: int
    file: str
    sha256: str
    nbytes: int
    parameters: tuple[str, ...]


class RunTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the numbers of a run mean: all of it must be the same when the run is resumed (`resume.check_resume`).

    Attributes:
        seed: Base of data order and dropout. There is no other generator state to save: randomness belongs to
            (seed, step, micro-batch, unit), so `seed` and `global_step` restore it exactly.
        batch_rows, micro_batches: Rows of a mini-batch and into how many it is split.
        task: What is learnt; empty in checkpoints of versions that knew one task only.
        prompt: The template around a text whose answer is learnt; empty for the task's own.
        group_by_length: Whether rows of similar length share a batch: part of the data's order.
        lossy_links: Whether slow links may carry less than float32. Which ones do is planned anew.
        data_digest: Hash of the training data; empty if it was not taken.
        base_digest: Hash of the pretrained weights; empty if it was not taken.
    """

    run_id: RunId
    model: ModelSpec
    optimizer: OptimizerSpec
    seed: int
    batch_rows: int
    micro_batches: int
    schedule: ScheduleKind
    task: str = ""
    prompt: str = ""
    group_by_length: bool = True
    lossy_links: bool = False
    data_digest: str = ""
    base_digest: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's contents.

    Attributes:
        global_step: Optimizer steps done; the next one has this number.
        epoch: Epoch of the next step, from 0.
        data_position: Mini-batches of that epoch already used.
        samples_seen: Rows trained on so far, over all epochs.
        base_model: Folder or hub name of the pretrained model, as the user gave it.
        text_field: The field in which bare texts become rows like those that were learnt; empty for the usual one.
        max_tokens: What the recipe said of the longest row; None for the task's own limit.
        pairs: Rows were pairs of texts, or single ones; None in tasks that do not have both, and where not recorded.
        loss_tail: Mean losses of the last steps, the newest last; for people and plots.
        libraries: Versions of what computed the numbers, such as `{"torch": "2.13.0"}`.
        shards: Filled in by the store.
    """

    terms: RunTerms
    global_step: int
    epoch: int
    data_position: int
    samples_seen: int
    base_model: str = ""
    text_field: str = ""
    max_tokens: int | None = None
    pairs: bool | None = None
    loss_tail: tuple[float, ...] = ()
    libraries: dict[str, str] = {}
    shards: tuple[ShardEntry, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def unit_of(self) -> dict[str, int]:
        """Parameter name to the unit whose shard holds it."""
        return {name: shard.unit for shard in self.shards for name in shard.parameters}


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """The file: a hash of the exact bytes of the manifest beside them."""

    sha256: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    """The one field that every version of the format has."""

    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`.

    Raises:
        CheckpointError: A value does not survive JSON (NaN or infinity in `loss_tail`).
    """
    body = msgspec.json.format(msgspec.json.encode(manifest, enc_hook=_plain_text), indent=2)
    sealed = _Sealed(sha256=hashlib.sha256(body).hexdigest(), manifest=msgspec.Raw(body))
    data = msgspec.json.encode(sealed)
    if decode_manifest(data) != manifest:
        raise CheckpointError("the manifest does not read back as it was written", hint="report this as a bug")
    return data


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of `manifest.json`.

    Raises:
        NewerFormatError: A newer version of this program wrote it; the message names both versions.
        CheckpointError: The bytes are damaged.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise CheckpointError("the manifest's hash does not match: it was changed or damaged")
        version = msgspec.json.decode(sealed.manifest, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"the checkpoint has format version {version}; this program reads up to version {FORMAT_VERSION}",
                hint="resume with the version of coterie that wrote it, or a newer one",
            )
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}") from error
    for shard in manifest.shards:
        if not _SHARD_FILE.fullmatch(shard.file):  # a name with slashes would read outside the folder
            raise CheckpointError(f"the manifest names a shard file {shard.file!r}")
    return manifest


def _plain_text(value: object) -> str:
    """Kinds of text that msgspec does not take for text, such as `torch.__version__`."""
    if isinstance(value, str):
        return str(value)
    # What msgspec expects of a hook that has no answer for a type.
    raise NotImplementedError(f"a manifest cannot hold a {type(value).__name__}")
