"""A peer's first frame: a worker's hello in words of this version, or a refusal that names both versions."""

import asyncio

from coterie import __version__
from coterie.cluster.messages import CONTROL, Hello, Refused, control, unpack
from coterie.cluster.wire_version import WIRE_VERSION, versions_of
from coterie.coordinator.plain_words import plain_words
from coterie.errors import CoterieError, ProtocolError, VersionMismatchError
from coterie.logs import get_logger
from coterie.transport.frame import Frame
from coterie.transport.stream_link import StreamLink

log = get_logger(__name__)


def read_hello(frame: Frame) -> Hello:
    """The hello in a frame.

    Versions are looked at first: words of another version may not decode.

    Raises:
        VersionMismatchError: The worker speaks another version.
        ProtocolError: The frame holds no hello.
    """
    is_control = frame.header.kind == CONTROL
    versions = versions_of(frame.header.body) if is_control else None
    if versions is not None and versions.wire_version != WIRE_VERSION:
        raise VersionMismatchError(
            f"{plain_words(versions.name)[:80]} speaks wire version {versions.wire_version} "
            f"(coterie {plain_words(versions.package_version)[:40]}), "
            f"this coordinator speaks {WIRE_VERSION} (coterie {__version__})",
            hint="install the same version of coterie on both machines",
        )
    hello = unpack(frame.header.body) if is_control else None
    if not isinstance(hello, Hello):
        raise ProtocolError(f"a peer began with a {frame.header.kind[:40]} frame where its hello was expected")
    return plain_words(hello)


async def refuse(link: StreamLink, error: CoterieError) -> None:
    """Tell a peer why it is not let in, and close."""
    try:
        async with asyncio.timeout(5):
            await link.send(control(Refused(slug=error.slug, message=error.message, hint=error.hint)))
    except (CoterieError, TimeoutError):
        log.info("a refused peer left before it heard why")
    await link.close()
