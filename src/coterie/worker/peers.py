"""Direct links between workers: dialled, shown a token, measured; a pair without one goes through the coordinator."""

import asyncio
import hmac
from collections.abc import Callable
from pathlib import Path

from coterie.cluster.messages import CONTROL, PeerAddress, PeerHello, control, unpack
from coterie.errors import CoterieError, JoinRefusedError, NetworkError
from coterie.ids import RunId, WorkerId
from coterie.logs import get_logger
from coterie.profiles.cluster_profile import LinkProfile
from coterie.transport.addresses import is_loopback
from coterie.transport.connect import connect, connect_unix
from coterie.transport.frame import Frame
from coterie.transport.join_link import JoinLink
from coterie.transport.probe import answer_probe, is_probe, probe
from coterie.transport.server import PeerInfo, ServedLink
from coterie.transport.stream_link import StreamLink

log = get_logger(__name__)

DIAL_LIMIT_S = 4.0
"""For each address of a peer: where none answers there is another way, and a run waits for this."""

PROBE_LIMIT_S = 30.0
"""A network that lets small packets through and drops large ones would otherwise be measured for ever."""


class Peers:
    """The direct links of one worker.

    Args:
        on_frame: Called for each frame that is not part of a probe.
        on_lost: Called when an open link ends.
    """

    def __init__(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[WorkerId, CoterieError], None], host_id: str
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._host_id = host_id
        self._run = RunId("")
        self._token = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: dict[WorkerId, StreamLink] = {}
        self.carriers: dict[WorkerId, str] = {}

    def expect(self, run: RunId, token: str) -> None:
        """From now on let in peers of this run that show this token."""
        self._run = run
        self._token = token

    async def serve(self, link: ServedLink, peer: PeerInfo) -> None:
        """Let a dialling worker in and read from it until its link ends."""
        frame = await link.receive()
        hello = unpack(frame.header.body) if frame.header.kind == CONTROL else None
        if not isinstance(hello, PeerHello) or hello.run != self._run or not self._token:
            raise JoinRefusedError("a peer of another run dialled this worker")
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise JoinRefusedError("a peer showed a wrong token")
        link.accept()
        self._keep(hello.source, link, peer.carrier)
        await self._read(hello.source, link)

    async def dial(self, address: PeerAddress, source: WorkerId) -> tuple[LinkProfile, LinkProfile]:
        """Open and measure a link; profiles of both directions.

        Raises:
            CoterieError: No address answers, or the peer refuses.
        """
        if not address.port:
            raise NetworkError("it opens no port")
        link, carrier = await self._open(address)
        try:
            hello = PeerHello(run=self._run, source=source, token=self._token)
            await link.send(control(hello, source=source, target=address.worker))
            async with asyncio.timeout(PROBE_LIMIT_S):
                result = await probe(link)
        except TimeoutError:
            link.abort()
            raise NetworkError(f"the link opened but a probe did not get through it in {PROBE_LIMIT_S:.0f} s") from None
        except BaseException:  # cancelled, too: the worker leaves while it measures
            link.abort()
            raise
        self._keep(address.worker, link, carrier)
        task = asyncio.get_running_loop().create_task(self._read(address.worker, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        rates = (
            (source, address.worker, result.send_bytes_per_s),
            (address.worker, source, result.receive_bytes_per_s),
        )
        there, back = (
            LinkProfile(source=start, target=end, bytes_per_s=rate, latency_s=result.latency_s)
            for start, end, rate in rates
        )
        return there, back

    async def _open(self, address: PeerAddress) -> tuple[StreamLink, str]:
        """A Unix socket on the same machine, else TLS to whichever address answers with the right certificate."""
        if address.unix_path and address.host_id == self._host_id:
            try:
                return await connect_unix(Path(address.unix_path)), "unix"
            except NetworkError as error:
                log.info("no Unix socket to %s: %s", address.worker, error.message)
        # On another machine, that machine's 127.0.0.1 is this one: dialled only where nothing else is given.
        hosts = tuple(host for host in address.hosts if not is_loopback(host)) or address.hosts
        join = JoinLink(hosts=hosts, port=address.port, fingerprint=address.fingerprint, token=self._token)
        return await connect(join, timeout_s=DIAL_LIMIT_S), "tls"

    def _keep(self, worker: WorkerId, link: StreamLink, carrier: str) -> None:
        if (old := self.links.get(worker)) is not None:
            old.abort()
        self.links[worker] = link
        self.carriers[worker] = carrier

    async def _read(self, worker: WorkerId, link: StreamLink) -> None:
        try:
            while True:
                frame = await link.receive()
                if is_probe(frame):
                    await answer_probe(link, frame)
                    if isinstance(link, ServedLink):
                        link.share_memory()  # from now on: a probe's bulks would only make the memory grow
                else:
                    self._on_frame(frame)
        except CoterieError as error:
            if self.links.get(worker) is link:  # else a newer link took its place
                del self.links[worker]
                self._on_lost(worker, error)

    def forget(self) -> None:
        """Drop every link, and let nobody in until `expect`: the coordinator is lost, and all will be told anew."""
        for task in self._tasks:
            task.cancel()
        for link in self.links.values():
            link.abort()
        self.links.clear()
        self.carriers.clear()
        self._token = ""

    async def close(self) -> None:
        """Close every link."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links.values()))
