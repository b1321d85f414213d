"""The seam of a stage in a side-tuning run: that of any stage, and activations out to the server."""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from coterie.cluster.messages import BATCH, PREDICTIONS, Assign, BatchBody, control, pack, unpack
from coterie.cluster.side_messages import (
    COUNTS_TENSOR,
    LABELS_TENSOR,
    LOSS_INDEX_TENSOR,
    POSITIONS_TENSOR,
    ROWS_TENSOR,
    TAPS,
    TAPS_TENSOR,
    SideStage,
    StageForwarded,
    TapsBody,
)
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR, WorkerId
from coterie.sidetuning.selection import TokenSelection
from coterie.sidetuning.upload_codecs import UPLOAD_CODECS
from coterie.tensors.codecs import decode, encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.limits import Limits
from coterie.transport.wire import frame_head
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import NetworkPorts, Place
from coterie.worker.outbox import Outbox


class SideItem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch to run forward.

    Attributes:
        split: Whose rows it has.
        inputs: Of the model, [B, T] each.
        selection: The tokens whose activations are sent.
        labels: (B, T) or (B,), on the last stage in additive mode.
    """

    split: str
    inputs: dict[str, Tensor]
    selection: TokenSelection
    labels: Tensor | None


class SidePorts(NetworkPorts):
    """`NetworkPorts` of a stage whose activations go to a server. All calls come from its compute thread."""

    def __init__(
        self, place: Place, side: SideStage, mailbox: Mailbox, outbox_to: Callable[[WorkerId], Outbox]
    ) -> None:
        super().__init__(place, mailbox, outbox_to)
        self._side = side

    @property
    def is_last_stage(self) -> bool:
        """Whether no stage follows."""
        return self._place.stage == len(self._place.plan.stages) - 1

    def take_forward(self, step: int) -> SideItem:
        """Wait for a micro-batch.

        Raises:
            ProtocolError: It does not say which tokens are to be sent.
        """
        frame = self._mailbox.take((BATCH, step, 0))
        body = unpack(frame.header.body)
        specs = frame.header.tensors
        tensors = {spec.name: decode(spec, data) for spec, data in zip(specs, frame.buffers, strict=True)}
        try:
            rows, positions, counts = (tensors.pop(name) for name in (ROWS_TENSOR, POSITIONS_TENSOR, COUNTS_TENSOR))
        except KeyError as error:
            raise ProtocolError(
                f"micro-batch {step} came without {error}: which tokens are sent is not known"
            ) from None
        if not isinstance(body, BatchBody):
            raise ProtocolError(f"micro-batch {step} came without its description")
        loss_index = tensors.pop(LOSS_INDEX_TENSOR, None)
        return SideItem(
            split=body.split,
            labels=tensors.pop(LABELS_TENSOR, None),
            inputs=tensors,
            selection=TokenSelection(rows=rows, positions=positions, counts=counts, loss_index=loss_index),
        )

    def put_taps(
        self, step: int, split: str, taps: dict[int, Tensor], differences: Tensor | None = None
    ) -> tuple[int, int]:
        """Send the activations of a micro-batch's selected tokens, and return at once.

        Args:
            step: Number of the micro-batch.
            split: Whose rows it has.
            taps: (N, D) by layer.
            differences: In additive mode, by the last stage: (M,) or (M, C).

        Returns:
            Bytes of the tensors as their codecs lay them out, and of the whole frame.
        """
        layers = tuple(sorted(taps))
        parts = []
        if layers:
            stacked = torch.stack([taps[layer] for layer in layers], dim=1)
            parts.append(encode(stacked, TAPS_TENSOR, UPLOAD_CODECS[self._side.side.upload]))
        if differences is not None:
            parts.append(encode(differences, LABELS_TENSOR, "raw"))
        header = FrameHeader(
            kind=TAPS,
            source=self._place.worker,
            target=self._side.server,
            run=self._place.run,
            plan_version=self._place.plan.version,
            step=step,
            body=pack(TapsBody(split=split, layers=layers)),
            tensors=tuple(spec for spec, _ in parts),
        )
        frame = Frame(header, tuple(buffer for _, buffer in parts))
        self._outbox_to(self._side.server).post(frame)
        return frame.payload_bytes, frame.payload_bytes + len(frame_head(frame, Limits()))

    def put_base_logits(self, step: int, logits: Tensor) -> None:
        """In additive mode: the backbone's own logits where they are read, (M, V), to whoever adds the server's."""
        self._put_tensor(PREDICTIONS, COORDINATOR, (step, 0), logits, "fp32")

    def forwarded(self, message: StageForwarded) -> None:
        """Tell the coordinator that a micro-batch is through."""
        self._outbox_to(COORDINATOR).post(control(message, source=self._place.worker))

    @property
    def sent_next_bytes(self) -> int:
        """Bytes of hidden states sent to the next stage so far."""
        return self._sent_next_bytes


def make_ports(assign: Assign, place: Place, mailbox: Mailbox, outbox_to: Callable[[WorkerId], Outbox]) -> NetworkPorts:
    """The seam of a stage as it was assigned."""
    if assign.side is not None:
        return SidePorts(place, assign.side, mailbox, outbox_to)
    return NetworkPorts(place, mailbox, outbox_to)
