"""Every error a user can meet: one tree, one slug and one exit code per kind, a hint that says what to do.

The command line prints `error [slug]: message` and `try: hint`, and exits with `exit_code`. A message says what
happened, where, and with which numbers. `assert` is for this project's own invariants and never checks input.
"""

from typing import ClassVar


class CoterieError(Exception):
    """The root of the tree: what happened (`message`) and what to do about it (`hint`).

    Only seen by itself when a peer reports an error that this version does not know: install the same version of
    coterie on both ends.
    """

    slug: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CoterieError):
    """The command line itself is wrong: an unknown flag, a missing argument, two that exclude each other.

    Read the suggestion in the message, or `coterie VERB --help`.
    """

    slug = "usage"
    exit_code = 2


class RecipeError(CoterieError):
    """A recipe file or an option has mistakes; all of them are in the message.

    Each mistake stands on a line of its own with its line in the file or its flag, and the nearest known key. The
    recipe reference lists every key with its range.
    """

    slug = "recipe"
    exit_code = 3


class DataError(CoterieError):
    """A data file cannot be read or understood; the message names file and line.

    Open the file at that line. Usual causes: a column is missing in one row, the wrong column was taken for the labels
    (`label_column`), the file is not UTF-8, or a line of a JSON Lines file was cut off.
    """

    slug = "data"
    exit_code = 4


class ModelError(CoterieError):
    """A model folder is absent, incomplete or damaged.

    Give a folder that holds `config.json`, a tokenizer and weights (safetensors or `.bin`), or a name on the hub while
    the coordinator has an internet connection. A download that was cut off is completed by trying again.
    """

    slug = "model"
    exit_code = 5


class UnsupportedModelError(ModelError):
    """A model, tokenizer or option that this version cannot train; the message says why and what is supported.

    Refused before anything is trained, because the result would be wrong: encoder-decoder models, layers that share
    their weights, tokenizers that do not say which word a token belongs to, code that comes with the model.
    """

    slug = "unsupported-model"
    exit_code = 6


class DoesNotFitError(CoterieError):
    """No plan fits the devices; the message says by how many MiB each one falls short.

    The message names settings that would fit. In general, in the order of what they cost: more micro-batches, the tight
    allocator, recomputation, LoRA instead of full fine-tuning, shorter rows, another device.
    """

    slug = "does-not-fit"
    exit_code = 7


class WorkerLostError(CoterieError):
    """A worker's connection ended, fell silent or reported an error in mid-run.

    Training goes on over the workers that are left; this error ends it where those cannot hold the model and no
    worker has joined within `cluster.rejoin_s`. Side-tuning waits as long for each that is lost, unless the run had
    started it itself; `predict` and `evaluate` end at once. Start the worker again and repeat the command with
    `--resume`, also with another number of workers; the loss curve continues as if nothing had happened. If it was
    killed without a word, the system ran out of memory: give it a smaller budget.
    """

    slug = "worker-lost"
    exit_code = 8


class JoinRefusedError(CoterieError):
    """A worker was not let in: wrong, used or expired token, wrong certificate fingerprint, copied identity, full run.

    Copy the whole link that the coordinator printed; each start of a run makes a new one, a resumed run keeps its own.
    A wrong fingerprint means that something between the two machines answers in the coordinator's place: do not go on.
    A copied identity is one that two devices use, as after cloning a disk: let one of them make a new one by starting
    its worker with `--identity FILE` and a file that does not exist yet.
    """

    slug = "join-refused"
    exit_code = 9


class VersionMismatchError(CoterieError):
    """The two ends speak different versions of the wire format; the message names both.

    Install the same version of coterie on all machines.
    """

    slug = "version-mismatch"
    exit_code = 10


class ProtocolError(CoterieError):
    """A peer sent bytes that no correct peer sends: a bad length, dtype, shape, header or order.

    The connection is closed. Usual causes: something else than coterie connected to the port, a different version, or a
    proxy between the machines that changes what it passes on.
    """

    slug = "protocol"
    exit_code = 11


class CheckpointError(CoterieError):
    """A checkpoint is absent, damaged, or belongs to another run.

    A checkpoint is only taken as whole when every hash is right; otherwise the one before it is used. To begin anew,
    choose another output folder or leave `--resume` out.
    """

    slug = "checkpoint"
    exit_code = 12


class NonFiniteLossError(CoterieError):
    """The loss or the gradient norm became NaN or infinite; the message names step and rows.

    The run stops; the last checkpoint, if there is one, is kept. Usual causes: a learning rate that is too high, no
    warm-up, or broken rows; the message says which rows were in the batch.
    """

    slug = "non-finite-loss"
    exit_code = 13

    def __init__(self, message: str, *, hint: str = "", step: int = -1, micro_batch: int = -1) -> None:
        """`step` and `micro_batch` say where, if they are known: whoever has the data names the rows."""
        super().__init__(message, hint=hint)
        self.step = step
        self.micro_batch = micro_batch


class OutOfMemoryError(CoterieError):
    """A device ran out of memory in mid-run; the message names the device and its budget.

    The plan predicted less than was used, or another program took memory meanwhile. Give the worker a smaller budget
    (`--memory`), so that the planner puts less on it, and continue with `--resume`.
    """

    slug = "out-of-memory"
    exit_code = 14


class StorageError(CoterieError):
    """A file could not be written: the disk is full or the folder is not writable.

    Free some space, or choose another folder with `--output`. What was complete before stays valid.
    """

    slug = "storage"
    exit_code = 15


class NetworkError(CoterieError):
    """A port is taken, an address cannot be reached, or a link broke.

    Check that the address is reachable from the other machine, that no firewall closes the port, and that no other
    program uses it (`--port 0` takes a free one).
    """

    slug = "network"
    exit_code = 16


class MissingPackageError(CoterieError):
    """An optional package is needed for what was asked.

    The hint is the command that installs it; or leave the option out that asked for it.
    """

    slug = "missing-package"
    exit_code = 17


class ScheduleError(CoterieError):
    """A schedule is incomplete, would deadlock, or pairs a backward with the wrong weights.

    Schedules that this version makes are checked before they run, so this is a mistake in coterie: please report it
    with the command and the recipe.
    """

    slug = "schedule"
    exit_code = 18


class BackendError(CoterieError):
    """A compute backend that was asked for by name is absent, or one has failed or computed something wrong.

    `coterie doctor` lists all backends, and why one is absent. During a run a backend that fails is left out, and the
    run goes on without it.
    """

    slug = "backend"
    exit_code = 19


class ActivationCacheError(CoterieError):
    """The server's cache of activations is full, damaged, in use, or was made for something else.

    The message says which, with the numbers or with what differs. A cache belongs to one frozen model, one truncation,
    one choice of layers and tokens: for another, choose another folder. What is in a cache stays as it is, whatever is
    refused.
    """

    slug = "activation-cache"
    exit_code = 20


class NoSuchRunError(CoterieError):
    """There is no run in the folder that `status`, `pause`, `continue` or `stop` was given.

    Give the run's folder (`output` in its recipe; `runs/latest` by default), on the coordinator's machine. On another
    machine give the control link that `coterie status --show-link` prints there.
    """

    slug = "no-such-run"
    exit_code = 30


class NotRunningError(CoterieError):
    """What was asked needs a run that is going on, and this one has finished, was stopped, or its process is gone.

    The message says which, and after which step. `coterie train RUN/recipe.toml --resume` goes on from its checkpoint.
    """

    slug = "not-running"
    exit_code = 31


class ControlRefusedError(CoterieError):
    """A run did not do what `status`, `pause`, `continue` or `stop` asked: the control token is not its, or it cannot.

    Each start of a coordinator makes a new control token; take the link that `coterie status --show-link` prints now.
    A join link lets nobody control a run. What cannot be paused says so, and can be stopped.
    """

    slug = "control-refused"
    exit_code = 32


class InterruptedRunError(CoterieError):
    """The user or the system stopped the run; a checkpoint was kept.

    Continue with the same command and `--resume`. A second Ctrl-C stops at once, without a new checkpoint.
    """

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
