"""Activations as bytes on the wire: frames through a socket, counted where they come out, beside the formula."""

import socket
import threading

import msgspec
import torch
from torch import Tensor

from coterie.cluster.messages import pack
from coterie.cluster.side_messages import TAPS, TAPS_TENSOR, TRAIN, TapsBody
from coterie.ids import RunId, WorkerId
from coterie.jobs.side_spec import UploadDtype
from coterie.planner.side_bytes import CODECS, taps_bytes
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.limits import Limits
from coterie.transport.wire import FrameReader, flat_view, frame_head

PADDED_TOKENS = 256
"""The paper's sequence length."""


class WireCount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of some activations: by the formula, and as they came out of a socket, preambles and headers included."""

    counted: int
    seen: int


def through_a_socket(taps: Tensor, upload: UploadDtype) -> WireCount:
    """Send activations (N, L, D) of one micro-batch as a device does."""
    layers = tuple(range(1, taps.shape[1] + 1))
    spec, buffer = encode(taps, TAPS_TENSOR, CODECS[upload])
    header = FrameHeader(
        kind=TAPS,
        source=WorkerId("device-0123456789abcdef"),
        target=WorkerId("server-0123456789abcdef"),
        run=RunId("run-20260101-000000-0123"),
        plan_version=1,
        step=1000,
        body=pack(TapsBody(split=TRAIN, layers=layers)),
        tensors=(spec,),
    )
    return WireCount(
        counted=taps_bytes(taps.shape[0], taps.shape[1], taps.shape[2], upload), seen=_sent(Frame(header, (buffer,)))
    )


def padded_batch(rows: int, tokens_of_a_row: int, blocks: int, width: int) -> WireCount:
    """A batch's activations with so many tokens of each row; their values do not matter."""
    return through_a_socket(torch.randn(rows * tokens_of_a_row, blocks, width), "float16")


def _sent(frame: Frame) -> int:
    limits = Limits()
    sender, receiver = socket.socketpair()
    with sender, receiver:
        thread = threading.Thread(target=_send, args=(sender, [frame_head(frame, limits), *frame.buffers]))
        thread.start()
        reader, seen, arrived = FrameReader(limits), 0, None
        while arrived is None:
            count = receiver.recv_into(reader.target())
            seen += count
            arrived = reader.advance(count)
        thread.join()
    return seen


def _send(sender: socket.socket, parts: list[bytes | bytearray | memoryview]) -> None:
    for part in parts:
        sender.sendall(flat_view(part))
