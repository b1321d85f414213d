"""Every error a user can meet: one tree, one slug and one exit code per kind, a hint that says what to do.

The command line prints `error [slug]: message` and `try: hint`, and exits with `exit_code`. A message says what
happened, where, and with which numbers. `assert` is for this project's own invariants and never checks input.
"""

from typing import ClassVar


class CoterieError(Exception):
    """The root of the tree: what happened (`message`) and what to do about it (`hint`)."""

    slug: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CoterieError):
    """The command line itself is wrong: an unknown flag, a missing argument, two that exclude each other."""

    slug = "usage"
    exit_code = 2


class RecipeError(CoterieError):
    """A recipe file or an option has mistakes; all of them are in the message."""

    slug = "recipe"
    exit_code = 3


class DataError(CoterieError):
    """A data file cannot be read or understood; the message names file and line."""

    slug = "data"
    exit_code = 4


class ModelError(CoterieError):
    """A model folder is absent, incomplete or damaged."""

    slug = "model"
    exit_code = 5


class UnsupportedModelError(ModelError):
    """A model, tokenizer or option that this version cannot train; the message says why and what is supported."""

    slug = "unsupported-model"
    exit_code = 6


class DoesNotFitError(CoterieError):
    """No plan fits the devices; the message says by how many MiB each one falls short."""

    slug = "does-not-fit"
    exit_code = 7


class WorkerLostError(CoterieError):
    """A worker's connection ended, fell silent or reported an error in mid-run."""

    slug = "worker-lost"
    exit_code = 8


class JoinRefusedError(CoterieError):
    """A worker was not let in: wrong or used token, wrong certificate fingerprint, run already full."""

    slug = "join-refused"
    exit_code = 9


class VersionMismatchError(CoterieError):
    """The two ends speak different versions of the wire format; the message names both."""

    slug = "version-mismatch"
    exit_code = 10


class ProtocolError(CoterieError):
    """A peer sent bytes that no correct peer sends: a bad length, dtype, shape, header or order."""

    slug = "protocol"
    exit_code = 11


class CheckpointError(CoterieError):
    """A checkpoint is absent, damaged, or belongs to another run."""

    slug = "checkpoint"
    exit_code = 12


class NonFiniteLossError(CoterieError):
    """The loss or the gradient norm became NaN or infinite; the message names step and rows."""

    slug = "non-finite-loss"
    exit_code = 13


class OutOfMemoryError(CoterieError):
    """A device ran out of memory in mid-run; the message names the device and its budget."""

    slug = "out-of-memory"
    exit_code = 14


class StorageError(CoterieError):
    """A file could not be written: the disk is full or the folder is not writable."""

    slug = "storage"
    exit_code = 15


class NetworkError(CoterieError):
    """A port is taken, an address cannot be reached, or a link broke."""

    slug = "network"
    exit_code = 16


class MissingPackageError(CoterieError):
    """An optional package is needed for what was asked."""

    slug = "missing-package"
    exit_code = 17


class ScheduleError(CoterieError):
    """A schedule is incomplete, would deadlock, or pairs a backward with the wrong weights."""

    slug = "schedule"
    exit_code = 18


class InterruptedRunError(CoterieError):
    """The user or the system stopped the run; a checkpoint was kept."""

    slug = "interrupted"
    exit_code = 130


def error_from_slug(slug: str, message: str, hint: str = "") -> CoterieError:
    """The error that a peer reported by its slug; an unknown slug gives the root class."""
    pending = [CoterieError]
    while pending:
        kind = pending.pop()
        if kind.slug == slug:
            return kind(message, hint=hint)
        pending.extend(kind.__subclasses__())
    return CoterieError(message, hint=hint)
