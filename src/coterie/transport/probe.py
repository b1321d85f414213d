"""Bandwidth and latency of a link, measured over the link itself while nothing else uses it."""

import statistics

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.errors import ProtocolError
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.link import Link
from coterie.units import MIB

ECHOES = 9
FIRST_BULK_BYTES = 256 * 1024
MAX_BULK_BYTES = 32 * MIB
LONG_ENOUGH_S = 0.25
"""A bulk that takes this long says enough: TCP has found its rate, and timers are exact to far below that."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found, from the side that ran it.

    Attributes:
        latency_s: One way, half of the median echo.
        send_bytes_per_s: From here to the peer.
        receive_bytes_per_s: From the peer to here.
    """

    latency_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float


async def probe(link: Link, *, clock: Clock | None = None, max_bulk_bytes: int = MAX_BULK_BYTES) -> ProbeResult:
    """Measure a link whose other end runs `answer_probe`. Takes about a second, less on fast links.

    Bulks double until one takes long enough; only the last one counts, its time less one echo.

    Raises:
        NetworkError: The link broke.
        ProtocolError: The peer answered with something else.
    """
    clock = clock or SystemClock()
    echoes = []
    for _ in range(ECHOES):
        begin = clock.now()
        await link.send(_probe_frame("echo", 0))
        await _expect(link, "done")
        echoes.append(clock.now() - begin)
    echo_s = statistics.median(echoes)
    send = await _bulk_rate(link, "push", echo_s, clock, max_bulk_bytes)
    receive = await _bulk_rate(link, "pull", echo_s, clock, max_bulk_bytes)
    await link.send(_probe_frame("end", 0))
    return ProbeResult(latency_s=echo_s / 2, send_bytes_per_s=send, receive_bytes_per_s=receive)


async def answer_probe(link: Link, first: Frame | None = None) -> None:
    """The other side of `probe`: returns when it is over.

    Args:
        link: The link to answer on.
        first: The frame that announced the probe, if somebody has received it already.

    Raises:
        NetworkError: The link broke.
        ProtocolError: The peer asked for something else, or for too much.
    """
    frame = first or await link.receive()
    while True:
        match frame.header.kind:
            case "probe-echo" | "probe-push":
                await link.send(_probe_frame("done", 0))
            case "probe-pull":
                wanted = frame.header.step
                if not 0 <= wanted <= MAX_BULK_BYTES:
                    raise ProtocolError(f"a probe asked for {wanted} bytes; at most {MAX_BULK_BYTES}")
                await link.send(_probe_frame("done", wanted))
            case "probe-end":
                return
            case other:
                raise ProtocolError(f"a frame of kind {other!r} in the middle of a probe")
        frame = await link.receive()


def is_probe(frame: Frame) -> bool:
    """Whether a frame opens or continues a probe."""
    return frame.header.kind.startswith("probe-")


async def _bulk_rate(link: Link, kind: str, echo_s: float, clock: Clock, max_bytes: int) -> float:
    size = min(FIRST_BULK_BYTES, max_bytes)
    while True:
        request = _probe_frame(kind, size if kind == "push" else 0, step=size)
        begin = clock.now()
        await link.send(request)
        await _expect(link, "done")
        seconds = clock.now() - begin
        if seconds >= LONG_ENOUGH_S or size >= max_bytes:
            return size / max(seconds - echo_s, seconds / 10, 1e-9)
        size = min(size * 2, max_bytes)


async def _expect(link: Link, kind: str) -> None:
    frame = await link.receive()
    if frame.header.kind != f"probe-{kind}":
        raise ProtocolError(f"a frame of kind {frame.header.kind!r} in the middle of a probe")


def _probe_frame(kind: str, size: int, *, step: int = 0) -> Frame:
    specs = (TensorSpec(name="bulk", dtype="uint8", shape=(size,), nbytes=size),) if size else ()
    return Frame(FrameHeader(kind=f"probe-{kind}", step=step, tensors=specs), [bytes(size)] if size else [])
