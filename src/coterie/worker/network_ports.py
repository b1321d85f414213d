"""The stage's seam over the network: frames in from the mailbox, frames out through one outbox per link."""

import math
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from coterie.cluster.message import Message
from coterie.cluster.messages import (
    BATCH,
    DONE,
    GRADIENT,
    HIDDEN,
    PREDICTIONS,
    TIED,
    BatchBody,
    GenerationBody,
    MicroBatchDone,
    NormPart,
    NormTotal,
    StepDone,
    control,
    unpack,
)
from coterie.errors import NonFiniteLossError, ProtocolError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.measure.process_memory import peak_rss_bytes
from coterie.pipeline.generation_ports import GenerationItem
from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.reports import MicroBatchReport, StepReport
from coterie.planner.plan import Codec, Plan
from coterie.tensors import codecs
from coterie.tensors.codecs import decode, encode
from coterie.transport.frame import Buffer, Frame, FrameHeader, TensorSpec
from coterie.worker.mailbox import Mailbox
from coterie.worker.outbox import Outbox

LABELS = "labels"
NORM_TOTAL = "norm-total"
"""Mailbox key of `NormTotal` messages, which have no frame kind of their own."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage stands: who it is, who its neighbours are, and what the plan says of its links."""

    run: RunId
    worker: WorkerId
    plan: Plan
    stage: int
    tied_peer: WorkerId

    @property
    def previous(self) -> WorkerId:
        """The worker of the stage before."""
        return self.plan.stages[self.stage - 1].worker

    @property
    def next(self) -> WorkerId:
        """The worker of the stage after."""
        return self.plan.stages[self.stage + 1].worker

    def codec_from(self, stage: int) -> Codec:
        """How tensors cross the link between `stage` and the one after it, in both directions."""
        return self.plan.stages[stage].send_codec


class NetworkPorts:
    """`StagePorts` of one stage. All calls come from its compute thread.

    Args:
        outbox_to: The outbox of the link that reaches a worker: direct where there is one, else the coordinator's.
    """

    def __init__(self, place: Place, mailbox: Mailbox, outbox_to: Callable[[WorkerId], Outbox]) -> None:
        self._place = place
        self._mailbox = mailbox
        self._outbox_to = outbox_to
        self._sent_next_bytes = 0
        self._sent_previous_bytes = 0

    def take_batch(self, step: int, micro_batch: int) -> MicroBatch:
        """See `StagePorts`."""
        frame = self._mailbox.take((BATCH, step, micro_batch))
        body = unpack(frame.header.body)
        if not isinstance(body, BatchBody):
            raise ProtocolError(f"the batch of step {step} came without its description")
        tensors = _tensors(frame)
        labels = tensors.pop(LABELS, None)
        return MicroBatch(
            step=step,
            micro_batch=micro_batch,
            rows=body.rows,
            inputs=tensors,
            labels=labels,
            step_loss_tokens=body.step_loss_tokens,
            micro_batch_loss_tokens=body.micro_batch_loss_tokens,
            samples_seen=body.samples_seen,
        )

    def take_item(self, step: int) -> GenerationItem:
        """See `GenerationPorts`."""
        frame = self._mailbox.take((BATCH, step, 0))
        body = unpack(frame.header.body)
        if not isinstance(body, GenerationBody):
            raise ProtocolError(f"step {step} of a generation came without its description")
        tensors = _tensors(frame)
        item = GenerationItem(**msgspec.structs.asdict(body), ids=tensors.get("input_ids"), mask=tensors.get("mask"))
        if not item.is_whole:
            raise ProtocolError(f"step {step} of a generation came with tensors that do not belong to it")
        return item

    def take_hidden(self, step: int, micro_batch: int) -> Tensor:
        """See `StagePorts`."""
        return self._finite(HIDDEN, step, micro_batch, self._place.previous)

    def put_hidden(self, step: int, micro_batch: int, hidden: Tensor) -> None:
        """See `StagePorts`."""
        codec = self._place.codec_from(self._place.stage)
        self._put_tensor(HIDDEN, self._place.next, (step, micro_batch), hidden, codec)

    def take_gradient(self, step: int, micro_batch: int) -> Tensor:
        """See `StagePorts`."""
        return self._finite(GRADIENT, step, micro_batch, self._place.next)

    def put_gradient(self, step: int, micro_batch: int, gradient: Tensor) -> None:
        """See `StagePorts`."""
        codec = self._place.codec_from(self._place.stage - 1)
        self._put_tensor(GRADIENT, self._place.previous, (step, micro_batch), gradient, codec)

    def take_done(self, step: int, micro_batch: int) -> None:
        """See `StagePorts`."""
        self._mailbox.take((DONE, step, micro_batch))

    def put_done(self, step: int, micro_batch: int) -> None:
        """See `StagePorts`."""
        self._post(DONE, self._place.previous, (step, micro_batch))

    def put_predictions(self, step: int, micro_batch: int, predictions: Tensor) -> None:
        """See `StagePorts`."""
        self._put_tensor(PREDICTIONS, COORDINATOR, (step, micro_batch), predictions, "fp32")

    def total_squared_norm(self, step: int, unit_squared_norms: Mapping[int, float]) -> float:
        """See `StagePorts`; the coordinator adds."""
        self._tell(NormPart(step=step, squares=tuple(sorted(unit_squared_norms.items()))))
        message = unpack(self._mailbox.take((NORM_TOTAL, step, 0)).header.body)
        if not isinstance(message, NormTotal):
            raise ProtocolError(f"the gradient norm of step {step} came as {type(message).__name__}")
        return message.total

    def exchange_tied(self, step: int, gradient: Tensor) -> Tensor:
        """See `StagePorts`."""
        self._put_tensor(TIED, self._place.tied_peer, (step, 0), gradient, "fp32")
        other = self._take_tensor(TIED, step, 0)
        return torch.add(gradient, other) if self._place.stage == 0 else torch.add(other, gradient)

    def micro_batch_done(self, report: MicroBatchReport) -> None:
        """See `StagePorts`."""
        self._tell(MicroBatchDone(**msgspec.structs.asdict(report)))

    def step_done(self, report: StepReport) -> None:
        """See `StagePorts`."""
        self._tell(
            StepDone(
                **msgspec.structs.asdict(report),
                peak_bytes=peak_rss_bytes(),
                sent_next_bytes=self._sent_next_bytes,
                sent_previous_bytes=self._sent_previous_bytes,
            )
        )

    def _tell(self, message: Message) -> None:
        version = self._place.plan.version
        self._outbox_to(COORDINATOR).post(control(message, source=self._place.worker, plan_version=version))

    def _finite(self, kind: str, step: int, micro_batch: int, sender: WorkerId) -> Tensor:
        """The tensor of a neighbour, whose fault it is if it is no number: the loss would be blamed for it later.

        A gradient may become infinite by itself; the step's norm then says so.

        Raises:
            NonFiniteLossError: It is not finite.
        """
        tensor = self._take_tensor(kind, step, micro_batch)
        # A sum finds whatever is not finite, in one pass without a mask; it can also overflow by itself.
        total = tensor.sum(dtype=torch.float32).item()
        if not math.isfinite(total) and _is_bad(kind, tensor):
            what = "activations" if kind == HIDDEN else "gradients"
            raise NonFiniteLossError(
                f"{what} from {sender} are not finite in step {step + 1}, micro-batch {micro_batch + 1}",
                hint="lower the learning rate or clip gradients (max_grad_norm); if it is always the same device, let "
                "`coterie doctor` check its backends and leave it out",
                step=step,
                micro_batch=micro_batch,
            )
        return tensor

    def _take_tensor(self, kind: str, step: int, micro_batch: int) -> Tensor:
        frame = self._mailbox.take((kind, step, micro_batch))
        if len(frame.buffers) != 1:
            raise ProtocolError(f"a {kind} frame of step {step} holds {len(frame.buffers)} tensors instead of one")
        return decode(frame.header.tensors[0], frame.buffers[0])

    def _put_tensor(self, kind: str, target: WorkerId, place: tuple[int, int], tensor: Tensor, codec: Codec) -> None:
        spec, buffer = encode(tensor, kind, _wire_codec(codec))
        if kind == HIDDEN:
            self._sent_next_bytes += spec.nbytes
        elif kind == GRADIENT:
            self._sent_previous_bytes += spec.nbytes
        self._post(kind, target, place, (spec,), (buffer,))

    def _post(
        self,
        kind: str,
        target: WorkerId,
        place: tuple[int, int],
        specs: tuple[TensorSpec, ...] = (),
        buffers: tuple[Buffer, ...] = (),
    ) -> None:
        header = FrameHeader(
            kind=kind,
            source=self._place.worker,
            target=target,
            run=self._place.run,
            plan_version=self._place.plan.version,
            step=place[0],
            micro_batch=place[1],
            tensors=specs,
        )
        self._outbox_to(target).post(Frame(header, buffers))


def _tensors(frame: Frame) -> dict[str, Tensor]:
    return {spec.name: decode(spec, data) for spec, data in zip(frame.header.tensors, frame.buffers, strict=True)}


def _is_bad(kind: str, tensor: Tensor) -> bool:
    bad = torch.isnan(tensor) if kind == GRADIENT else ~torch.isfinite(tensor)
    return bool(bad.any())


def _wire_codec(codec: Codec) -> codecs.Codec:
    """The plan's word for exact links is the type they carry; the wire's is `raw`."""
    return "raw" if codec == "fp32" else codec
