"""The words that coordinator and workers exchange: every control message of the wire, one closed union.

A message travels as the msgpack `body` of a frame of kind `control`; frames of the other kinds (`FrameKind`) carry
tensors. Decoding is strict: an unknown tag, a missing field or a wrong type is a `ProtocolError`, never an attribute
error deep inside a program.
"""

from typing import Final

import msgspec

from coterie.cluster.fault_messages import CopyTerms, FaultMessage, Vitals
from coterie.cluster.message import Message
from coterie.cluster.side_messages import SideMessage, SideStage
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.generation_spec import GenerationSpec
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.roles import WorkerRole
from coterie.planner.plan import Plan
from coterie.profiles.cluster_profile import DeviceProfile, DeviceType, LinkProfile
from coterie.profiles.model_profile import ModelProfile
from coterie.schedules.actions import ScheduleKind
from coterie.transport.frame import Frame, FrameHeader

CONTROL: Final = "control"
"""Kind of frames whose body is one of the messages below."""

WEIGHTS: Final = "weights"
"""Coordinator to worker: one unit's tensors, named `param/<name>` and `optim/<name>/<field>`; body: `UnitBody`."""

PARAMETER: Final = "param/"
OPTIMIZER: Final = "optim/"
"""Prefixes of tensor names in `WEIGHTS` and `STATE` frames."""

STATE: Final = "state"
"""Worker to coordinator: the same tensors back, for a checkpoint; body: `UnitBody`."""

BATCH: Final = "batch"
"""Coordinator to worker: one micro-batch's input tensors, and `labels` for the last stage; body: `BatchBody`.

In a generation: the prompts of a group of rows, or the newest token of each; body: `GenerationBody`."""

HIDDEN: Final = "hidden"
"""Worker to the next: hidden states [B, T, D]."""

GRADIENT: Final = "gradient"
"""Worker to the one before: the gradient of those hidden states."""

DONE: Final = "done"
"""In place of a gradient, where none goes down: a micro-batch is done here, the worker before may run one ahead."""

TIED: Final = "tied"
"""Between the first and the last stage: the gradient of the shared matrix [V, D]."""

PREDICTIONS: Final = "predictions"
"""Last worker to coordinator: what the task reads from the logits, or in a generation each row's next token."""


class Hello(Message, frozen=True, kw_only=True):
    """Worker's first words: who it is, with the token of the join link.

    Attributes:
        identity: The device's public key, 64 hex digits of Ed25519; empty: it keeps none, and cannot come back.
        proof: Signature by that key over what `transport.identity` says, in hex.
        ticket: What the coordinator gave this identity last; a copied identity shows an old one.
        keeps_shards: Frozen tensors are to be offered before they are sent (`ShardOffer`).
    """

    wire_version: int
    package_version: str
    token: str
    name: str
    device_type: DeviceType
    threads: int
    memory_bytes: int
    host_id: str
    hosts: tuple[str, ...]
    port: int
    fingerprint: str
    unix_path: str = ""
    role: WorkerRole = "device"
    identity: str = ""
    proof: str = ""
    ticket: str = ""
    keeps_shards: bool = False


class Welcome(Message, frozen=True, kw_only=True):
    """Coordinator's answer: the worker is in, under this id.

    Attributes:
        ticket: To be shown when it joins again, so that a copy of its identity is told from it.
        rejoin_s: How long a worker that lost the coordinator tries to come back.
    """

    worker: WorkerId
    run: RunId
    heartbeat_s: float
    silence_limit_s: float
    ticket: str = ""
    rejoin_s: float = 0.0


class Refused(Message, frozen=True, kw_only=True):
    """Coordinator's other answer: an error by its slug."""

    slug: str
    message: str
    hint: str = ""


class ProfileRequest(Message, frozen=True, kw_only=True):
    """Measure the device on this model at these row counts; `again`: even if its worker has kept earlier figures."""

    spec: ModelSpec
    model: ModelProfile
    rows: tuple[int, int]
    again: bool = False


class Profiled(Message, frozen=True, kw_only=True):
    """What the worker measured, `age_s` seconds ago by its own clock; 0: just now."""

    profile: DeviceProfile
    age_s: float = 0.0


class PeerAddress(Message, frozen=True, kw_only=True):
    """Where a worker listens for the stage before it."""

    worker: WorkerId
    host_id: str
    hosts: tuple[str, ...]
    port: int
    fingerprint: str
    unix_path: str = ""


class MeasureLinks(Message, frozen=True, kw_only=True):
    """Open a direct link to each of these workers and measure it. `peer_token` is what workers show each other."""

    run: RunId
    peers: tuple[PeerAddress, ...]
    peer_token: str


class LinksMeasured(Message, frozen=True, kw_only=True):
    """One profile per direction of each link that could be opened, and why others could not."""

    links: tuple[LinkProfile, ...]
    failures: tuple[str, ...] = ()


class Assign(Message, frozen=True, kw_only=True):
    """Build this stage of this plan. `WEIGHTS` frames of its units follow.

    Attributes:
        gradient_below: Some parameter of an earlier stage is trained, so this stage must send gradients down.
        tied_peer: The worker that holds the other end of a trained tied matrix; empty if none.
        resumed_step: Optimizer steps done before; the state of trained units comes with their weights.
        side: Set in a side-tuning run: the stage runs forward only, and sends activations.
        held_units: Units whose frozen tensors the worker holds from the plan before: `WEIGHTS` frames of these bring
            trained tensors only, and none comes for a unit without any.
        replicate_every: Optimizer steps between replicas of the trained state; 0: none are sent.
        copies: Which of those are kept by workers.
    """

    run: RunId
    plan: Plan
    stage: int
    spec: ModelSpec
    optimizer: OptimizerSpec
    task: str
    gradient_below: bool
    tied_peer: WorkerId
    resumed_step: int = 0
    side: SideStage | None = None
    held_units: tuple[int, ...] = ()
    replicate_every: int = 0
    copies: CopyTerms = CopyTerms()


class PeerHello(Message, frozen=True, kw_only=True):
    """First words on a direct link between two workers."""

    run: RunId
    source: WorkerId
    token: str


class StageReady(Message, frozen=True, kw_only=True):
    """The stage is built and its links are open."""

    stage: int
    link_to_next: str


class RunSegment(Message, frozen=True, kw_only=True):
    """Run `steps` optimizer steps from `first_step` on, in the order of `schedule`."""

    schedule: ScheduleKind
    first_step: int
    steps: int
    micro_batches: int


class Generate(Message, frozen=True, kw_only=True):
    """Write text: do what the `BATCH` frames from `first_step` on ask for, one a step, until one is the last."""

    spec: GenerationSpec
    first_step: int


class GenerationBody(Message, frozen=True, kw_only=True):
    """What a `BATCH` frame of a generation asks for.

    Attributes:
        group: Which group of rows is continued.
        position: Tokens that its rows have been continued by; at 0 the group begins, and the frame holds its prompts.
        rows: The number of each row of a group that begins.
        ended: Groups of which nothing need be kept any more.
        is_last: There is no group, and nothing comes after.
    """

    group: int
    position: int
    rows: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    is_last: bool = False


class BatchBody(Message, frozen=True, kw_only=True):
    """What a micro-batch's tensors do not say; `split` is told in side-tuning runs, which collect all of them."""

    rows: int
    step_loss_tokens: int
    micro_batch_loss_tokens: int
    samples_seen: int
    split: str = ""


class UnitBody(Message, frozen=True, kw_only=True):
    """Which unit a `WEIGHTS` or `STATE` frame carries."""

    unit: int


class MicroBatchDone(Message, frozen=True, kw_only=True):
    """Last stage: the summed loss of one micro-batch."""

    step: int
    micro_batch: int
    loss_sum: float
    loss_tokens: int


class StepDone(Message, frozen=True, kw_only=True):
    """Every stage, after each optimizer step: the fields of `coterie.pipeline.reports.StepReport`, and memory.

    Attributes:
        peak_bytes: Most memory the worker process has used since its stage was built.
        sent_next_bytes, sent_previous_bytes: Tensor bytes sent to the stage after and before, since then.
    """

    step: int
    forward_s: float
    backward_s: float
    update_s: float
    wait_s: float
    cpu_s: float
    grad_norm: float
    grad_norm_is_global: bool
    learning_rate: float
    updates: int
    weight_versions: int
    stashed_bytes: int
    peak_bytes: int
    sent_next_bytes: int
    sent_previous_bytes: int
    backend_busy_s: dict[str, float] = msgspec.field(default_factory=dict)
    backends_left_out: dict[str, str] = msgspec.field(default_factory=dict)


class NormPart(Message, frozen=True, kw_only=True):
    """This stage's sums of squared gradients, (unit, float64) each."""

    step: int
    squares: tuple[tuple[int, float], ...]


class NormTotal(Message, frozen=True, kw_only=True):
    """The sum over all stages, in unit order."""

    step: int
    total: float


class SaveState(Message, frozen=True, kw_only=True):
    """Send all trained units' state as `STATE` frames, then `StateSent`."""

    step: int


class StateSent(Message, frozen=True, kw_only=True):
    """All `STATE` frames of this step are out."""

    step: int


class Heartbeat(Message, frozen=True, kw_only=True):
    """Still here."""

    rss_bytes: int = 0
    vitals: Vitals | None = None


class Failed(Message, frozen=True, kw_only=True):
    """The sender ends with this error, named by its slug; where a loss is not finite (-1: it is not about that)."""

    slug: str
    message: str
    hint: str = ""
    step: int = -1
    micro_batch: int = -1


class Stop(Message, frozen=True, kw_only=True):
    """The run is over for this worker, or with `goes_on` it was released and the run goes on without it."""

    reason: str = ""
    goes_on: bool = False


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker leaves in order."""

    reason: str = ""


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | ProfileRequest
    | Profiled
    | PeerAddress
    | MeasureLinks
    | LinksMeasured
    | Assign
    | PeerHello
    | StageReady
    | RunSegment
    | Generate
    | GenerationBody
    | BatchBody
    | UnitBody
    | MicroBatchDone
    | StepDone
    | NormPart
    | NormTotal
    | SaveState
    | StateSent
    | Heartbeat
    | Failed
    | Stop
    | Goodbye
    | FaultMessage
    | SideMessage
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def pack(message: Message) -> bytes:
    """The message as the body of a frame."""
    return _ENCODER.encode(message)


def unpack(body: bytes) -> AnyMessage:
    """The message in a frame's body.

    Raises:
        ProtocolError: The bytes are no message of this version.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a peer sent a control message that does not decode: {error}") from error


def control(
    message: Message, *, source: WorkerId = COORDINATOR, target: WorkerId = COORDINATOR, plan_version: int = 0
) -> Frame:
    """A frame that carries `message`; with a plan's version where an older plan's must not be heard any more."""
    return Frame(FrameHeader(kind=CONTROL, source=source, target=target, plan_version=plan_version, body=pack(message)))
