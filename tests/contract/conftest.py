"""Carriers of frames, for the suites that run over each of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from coterie.transport.certificates import client_context
from coterie.transport.connect import connect, connect_plain, connect_unix
from coterie.transport.join_link import JoinLink
from coterie.transport.limits import Limits
from coterie.transport.memory_link import MemoryLink, memory_pair
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.stream_link import StreamLink

AnyLink = MemoryLink | StreamLink
NOT_SENT = "a-token-that-no-test-sends"


class Listening:
    """A server of one carrier, its accepted links, and how to reach it."""

    def __init__(self, carrier: str, limits: Limits | None = None) -> None:
        self.carrier = carrier
        self.arrived: asyncio.Queue[ServedLink] = asyncio.Queue()
        self._limits = limits
        self.server = FrameServer(self._on_link)

    async def _on_link(self, link: ServedLink, _: PeerInfo) -> None:
        link.accept(self._limits)
        if self.carrier == "shared":
            link.share_memory()
        self.arrived.put_nowait(link)

    async def dial(self, limits: Limits | None = None) -> StreamLink:
        if self.carrier == "plain":
            return await connect_plain("127.0.0.1", self.server.plain_port, limits=limits)
        if self.carrier in {"unix", "shared"}:
            assert self.server.unix_path is not None
            return await connect_unix(self.server.unix_path, limits=limits)
        join = JoinLink(
            hosts=("127.0.0.1",), port=self.server.port, fingerprint=self.server.fingerprint, token=NOT_SENT
        )
        return await connect(join, limits=limits)

    async def dial_raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is free to send anything."""
        if self.carrier == "plain":
            return await asyncio.open_connection("127.0.0.1", self.server.plain_port)
        if self.carrier in {"unix", "shared"}:
            return await asyncio.open_unix_connection(str(self.server.unix_path))
        return await asyncio.open_connection("127.0.0.1", self.server.port, ssl=client_context())


@asynccontextmanager
async def _listening(carrier: str, limits: Limits | None = None) -> AsyncIterator[Listening]:
    place = Listening(carrier, limits)
    await place.server.start("127.0.0.1", plain_loopback=carrier == "plain")
    try:
        yield place
    finally:
        await place.server.close()


@asynccontextmanager
async def _pair(carrier: str, limits: Limits | None = None) -> AsyncIterator[tuple[AnyLink, AnyLink]]:
    """Two joined links: the end that dialled and the end that was dialled."""
    if carrier == "memory":
        ends = memory_pair(limits)
        yield ends
        for end in ends:
            await end.close()
        return
    async with _listening(carrier, limits) as place:
        dialled = await place.dial(limits)
        end = await place.arrived.get()
        while carrier == "shared" and not (dialled.shares_memory and end.shares_memory):
            await asyncio.sleep(0)
        yield dialled, end
        await dialled.close()


@pytest.fixture
def listening() -> Callable[..., AbstractAsyncContextManager[Listening]]:
    """`async with listening(carrier, limits) as place`: a server of one carrier."""
    return _listening


@pytest.fixture
def pair() -> Callable[..., AbstractAsyncContextManager[tuple[AnyLink, AnyLink]]]:
    """`async with pair(carrier, limits) as (one, other)`: two joined links."""
    return _pair
