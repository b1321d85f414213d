"""A worker's first words."""

from coterie import __version__
from coterie.cluster.messages import Hello
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.profiles.cluster_profile import plannable_bytes
from coterie.transport.addresses import own_addresses
from coterie.transport.identity import DeviceIdentity
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.worker.host import host_id, is_local
from coterie.worker.settings import WorkerSettings


def hello_of(
    settings: WorkerSettings, join: JoinLink, server: FrameServer, budget_bytes: int, identity: DeviceIdentity
) -> Hello:
    """Who the worker is, and where others reach it.

    Args:
        settings: The owner's.
        join: The link that it joins by, with the token.
        server: Where it listens.
        budget_bytes: Memory it may use.
        identity: The device's key; the coordinator's certificate, which it proves itself to, is the join link's.
    """
    ticket = identity.ticket_for(join.fingerprint)
    proof = identity.prove(coordinator=join.fingerprint, token=join.token, ticket=ticket, nonce=server.fingerprint)
    return Hello(
        wire_version=WIRE_VERSION,
        package_version=__version__,
        token=join.token,
        name=settings.name,
        device_type=settings.device_type,
        threads=settings.threads,
        memory_bytes=plannable_bytes(budget_bytes),
        host_id=host_id(),
        hosts=("127.0.0.1",) if is_local(join) else own_addresses(),
        port=server.port,
        fingerprint=server.fingerprint,
        unix_path=str(server.unix_path or ""),
        role=settings.role,
        identity=identity.public,
        proof=proof,
        ticket=ticket,
    )
