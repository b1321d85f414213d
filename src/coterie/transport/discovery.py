"""Runs found in the local network by mDNS: an extra, for people who would rather type a token than copy a link.

What is announced is public: the run, the port and the beginning of the certificate's fingerprint. It proves nothing:
`coterie.transport.pairing` finds out whether who answers there knows the token that its owner has told.
"""

import asyncio
import contextlib
import importlib.util
import re
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from coterie.errors import MissingPackageError, NetworkError
from coterie.logs import get_logger

if TYPE_CHECKING:
    from zeroconf import ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

log = get_logger(__name__)

SERVICE = "_coterie._tcp.local."
PREFIX_DIGITS = 16
"""Of the fingerprint that is announced: to tell runs apart."""

_RUN = re.compile(r"[A-Za-z0-9_.\-]{1,80}")
_PREFIX = re.compile(rf"[0-9a-f]{{{PREFIX_DIGITS}}}")
_RESOLVE_MS = 2000


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator that somebody in the network announces; nothing of it is proven.

    Attributes:
        run: The run's id.
        hosts: Addresses to try.
        port: Where it listens.
        fingerprint_prefix: How its certificate's fingerprint begins.
    """

    run: str
    hosts: tuple[str, ...]
    port: int
    fingerprint_prefix: str


def require_discovery() -> None:
    """Check that the package is there.

    Raises:
        MissingPackageError: It is not.
    """
    if importlib.util.find_spec("zeroconf") is None:
        raise MissingPackageError(
            "runs are found in the network by the package zeroconf, which is not installed",
            hint="pip install 'coterie[discovery]', or copy the join link",
        )


@contextlib.asynccontextmanager
async def announced(
    run: str, port: int, fingerprint: str, hosts: Sequence[str], *, interfaces: Sequence[str] = ()
) -> AsyncIterator[None]:
    """Announce a run while the block runs.

    Args:
        run: Its id.
        port: Where its coordinator listens.
        fingerprint: Of its certificate; only the beginning is told.
        hosts: Its addresses.
        interfaces: Addresses of the interfaces to announce it on; none: all.

    Raises:
        MissingPackageError: The package zeroconf is absent.
        NetworkError: This machine has no network to announce it in.
    """
    async with _network(interfaces) as network:
        from zeroconf import ServiceInfo  # noqa: PLC0415 - an extra

        prefix = fingerprint[:PREFIX_DIGITS]
        info = ServiceInfo(
            SERVICE,
            f"{run}.{SERVICE}",
            port=port,
            properties={"run": run, "fp": prefix},
            parsed_addresses=list(hosts),
            server=f"coterie-{prefix}.local.",
        )
        await (await network.async_register_service(info, allow_name_change=True))
        try:
            yield
        finally:
            await (await network.async_unregister_service(info))


async def find_runs(seconds: float, *, interfaces: Sequence[str] = ()) -> tuple[FoundRun, ...]:
    """The runs that are announced in the network, by run id; listens for so long.

    Raises:
        MissingPackageError: The package zeroconf is absent.
        NetworkError: This machine has no network to listen in.
    """
    async with _network(interfaces) as network:
        from zeroconf import IPVersion, ServiceStateChange  # noqa: PLC0415 - an extra
        from zeroconf.asyncio import AsyncServiceBrowser  # noqa: PLC0415

        names: set[str] = set()

        def changed(*, name: str, state_change: "ServiceStateChange", **_others: object) -> None:
            if state_change is ServiceStateChange.Removed:
                names.discard(name)
            else:
                names.add(name)

        browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[changed])
        await asyncio.sleep(seconds)
        infos = await asyncio.gather(*(network.async_get_service_info(SERVICE, name, _RESOLVE_MS) for name in names))
        await browser.async_cancel()
        found = [_found(info, info.parsed_scoped_addresses(IPVersion.All)) for info in infos if info is not None]
    return tuple(sorted((run for run in found if run is not None), key=lambda run: run.run))


def _found(info: "ServiceInfo", addresses: Sequence[str]) -> FoundRun | None:
    """A run as it was announced; None if that makes no sense: anybody may announce anything."""
    run, prefix = (_text(info.properties.get(key)) for key in (b"run", b"fp"))
    if _RUN.fullmatch(run) is None or _PREFIX.fullmatch(prefix) is None or not info.port or not addresses:
        log.info("something announces itself as a run of coterie, and is none")
        return None
    return FoundRun(run=run, hosts=tuple(dict.fromkeys(addresses)), port=info.port, fingerprint_prefix=prefix)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("ascii", "replace")


@contextlib.asynccontextmanager
async def _network(interfaces: Sequence[str]) -> "AsyncIterator[AsyncZeroconf]":
    require_discovery()
    from zeroconf import InterfaceChoice  # noqa: PLC0415 - an extra
    from zeroconf.asyncio import AsyncZeroconf  # noqa: PLC0415

    try:
        network = AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except (OSError, RuntimeError) as error:
        raise NetworkError(
            f"this machine's network has no multicast: {error}", hint="copy the join link instead"
        ) from error
    try:
        yield network
    finally:
        await network.async_close()
