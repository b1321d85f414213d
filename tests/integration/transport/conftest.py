"""What every test of a server's port needs: a limit in time, a link to join by, and a server's answer."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer, PeerInfo, ServedLink

TIME_S = 60.0


@pytest.fixture(scope="session")
def bounded() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a test's coroutine, and fails it if it does not end."""

    def run(test: Callable[[], Awaitable[None]]) -> None:
        async def within() -> None:
            async with asyncio.timeout(TIME_S):
                await test()

        asyncio.run(within())

    return run


@pytest.fixture(scope="session")
def not_sent() -> str:
    """A token of no run."""
    return "a-token-that-no-test-sends"


@pytest.fixture(scope="session")
def join_of(not_sent: str) -> Callable[..., JoinLink]:
    """The link to a server, by other addresses or with another fingerprint if so wanted."""

    def join(server: FrameServer, *hosts: str, fingerprint: str = "") -> JoinLink:
        return JoinLink(
            hosts=hosts or ("127.0.0.1",),
            port=server.port,
            fingerprint=fingerprint or server.fingerprint,
            token=not_sent,
        )

    return join


@pytest.fixture(scope="session")
def echo() -> Callable[[ServedLink, PeerInfo], Awaitable[None]]:
    """A server's handler that accepts everybody and sends every frame back."""

    async def answer(link: ServedLink, _: PeerInfo) -> None:
        link.accept()
        while True:
            await link.send(await link.receive())

    return answer
