"""The words of a side-tuning run: what devices, server and coordinator say beside those of any run."""

from typing import Final, Literal

import msgspec

from coterie.cluster.message import Message
from coterie.ids import RunId, WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec

TAPS: Final = "taps"
"""Device to server: a stage's activations [N, L', D] at the selected positions of a micro-batch; body: `TapsBody`.

In additive mode the last stage's frame holds prediction differences, too."""

LABELS: Final = "side-labels"
"""Coordinator to server: which rows a micro-batch has, how many positions of each are sent, and, in direct mode, their
labels; body: `TapsBody`."""

ORDER: Final = "order"
"""Coordinator to server: the rows of every step of an epoch; body: `OrderBody`."""

TAPS_TENSOR: Final = "taps"
LABELS_TENSOR: Final = "labels"
LOSS_INDEX_TENSOR: Final = "loss_index"
SAMPLES_TENSOR: Final = "samples"
COUNTS_TENSOR: Final = "counts"
ROWS_TENSOR: Final = "selected_rows"
POSITIONS_TENSOR: Final = "selected_positions"
PREDICTIONS_TENSOR: Final = "predictions"
"""Names of tensors in these frames, and of the selection in a device's `BATCH` frame."""

TRAIN: Final = "train"
"""The split that is learnt from."""


class SideStage(msgspec.Struct, frozen=True, kw_only=True):
    """What a device's stage must know of a side-tuning run; part of `Assign`.

    Attributes:
        server: Where activations go.
    """

    side: SideSpec
    server: WorkerId


PLAN_VERSION: Final = 1
"""A side-tuning run is planned once; resumed, it is a new plan for other workers."""


BLOCK_ROWS: Final = 128
"""Rows of a split that one digest stands for."""


class AssignServer(Message, frozen=True, kw_only=True):
    """Keep this run's activations and train its side network. A `WEIGHTS` frame of the output layer follows.

    Attributes:
        width: D.
        layers: The layers that are tapped.
        rows: How many rows each split has.
        digests: Of every `BLOCK_ROWS` rows of a split in turn. Data to which rows were added are thus known again.
        tokens: How many tokens the cache is to hold of all splits together, at most.
        cache_key: What the activations depend on, by name: they are used again only where all of it is the same.
        cache: Where activations are kept.
        quota_bytes: The most that they may take; 0: no limit.
        save_every: Optimizer steps between checkpoints; also at the end of each epoch, which has `steps_per_epoch`.
    """

    run: RunId
    spec: ModelSpec
    side: SideSpec
    optimizer: OptimizerSpec
    task: str
    width: int
    layers: tuple[int, ...]
    rows: dict[str, int]
    digests: dict[str, tuple[str, ...]]
    tokens: int
    cache_key: dict[str, str]
    cache: Literal["memory", "disk"]
    quota_bytes: int = 0
    save_every: int = 0
    steps_per_epoch: int


class ServerReady(Message, frozen=True, kw_only=True):
    """The side network stands. The frame's tensors are the ids of the rows that the cache holds, one per split.

    Attributes:
        step: Optimizer steps done, if an earlier run of the same name was found.
        idle_bytes: Memory of its process before it held anything of the run.
        in_memory: The cache is in its memory: it was asked for, or the server has no folder.
    """

    step: int
    cache_bytes: int
    idle_bytes: int = 0
    in_memory: bool = False


class OrderBody(Message, frozen=True, kw_only=True):
    """Which epoch an `ORDER` frame describes, and its first step.

    Its tensors: `rows`, the row ids of the epoch in order, `stops`, where each step ends in them, and `seen`, how many
    rows of the run come before each step.
    """

    epoch: int
    first_step: int


class TapsBody(Message, frozen=True, kw_only=True):
    """Which part of which micro-batch a `TAPS` or `LABELS` frame carries.

    Attributes:
        split: `train`, `dev` or `test`.
        layers: The layers whose outputs these are, in order; none of labels.
        train_step: Of labels: the optimizer step that the rows belong to, where activations are not kept; else -1.
        parts: Of labels: how many frames of activations make the micro-batch, one from each stage that taps something.
    """

    split: str
    layers: tuple[int, ...] = ()
    train_step: int = -1
    parts: int = 0


class StageForwarded(Message, frozen=True, kw_only=True):
    """Device: a micro-batch is through this stage, its activations are on their way.

    Attributes:
        taps_bytes: Bytes of activations and differences, as the codecs lay them out.
        wire_bytes: The same with the frame's header.
        sent_next_bytes: Bytes of hidden states sent to the next stage since the run began.
    """

    step: int
    forward_s: float
    cpu_s: float
    wait_s: float
    peak_bytes: int
    taps_bytes: int
    wire_bytes: int
    sent_next_bytes: int


class BatchStored(Message, frozen=True, kw_only=True):
    """Server: all parts of a micro-batch have come, and it is in the cache."""

    step: int
    cache_bytes: int


class EvaluateSide(Message, frozen=True, kw_only=True):
    """Predict all rows of a split from the cache: `PREDICTIONS` frames follow, then `SideEvaluated`."""

    split: str


class SideEvaluated(Message, frozen=True, kw_only=True):
    """All predictions are out.

    Attributes:
        loss_sum: Over all labels of the split; in additive mode 0, since the server has none.
    """

    split: str
    loss_sum: float


class GoAlone(Message, frozen=True, kw_only=True):
    """The coordinator leaves: finish the steps that are queued, keep the result, end; after `limit_s` in any case."""

    limit_s: float


class OnItsOwn(Message, frozen=True, kw_only=True):
    """The server's answer: it goes on without a coordinator."""

    cache_folder: str


SideMessage = (
    AssignServer
    | ServerReady
    | OrderBody
    | TapsBody
    | StageForwarded
    | BatchStored
    | EvaluateSide
    | SideEvaluated
    | GoAlone
    | OnItsOwn
)
