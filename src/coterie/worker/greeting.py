"""A worker's first words, and the coordinator's answer."""

from coterie import __version__
from coterie.cluster.messages import CONTROL, Hello, Refused, Welcome, unpack
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.errors import ProtocolError, VersionMismatchError, error_from_slug
from coterie.profiles.cluster_profile import plannable_bytes
from coterie.transport.addresses import own_addresses
from coterie.transport.frame import Frame
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
        keeps_shards=settings.shard_cache is not None,
    )


def welcome_in(frame: Frame) -> Welcome:
    """The coordinator's answer to the hello.

    Raises:
        CoterieError: It refused; this is its reason.
        VersionMismatchError: It answered in words that this version does not know.
        ProtocolError: It answered with something else.
    """
    if frame.header.kind != CONTROL:
        raise ProtocolError(f"the coordinator answered a hello with a {frame.header.kind[:40]} frame")
    try:
        answer = unpack(frame.header.body)
    except ProtocolError as error:
        raise VersionMismatchError(
            f"the coordinator answered in words that this worker does not know; "
            f"it speaks wire version {WIRE_VERSION} (coterie {__version__}), the coordinator probably a newer one",
            hint="install the coordinator's version of coterie here: `coterie --version` there tells it",
        ) from error
    match answer:
        case Welcome():
            return answer
        case Refused(slug=slug, message=message, hint=hint):
            raise error_from_slug(slug, message, hint)
        case _:
            raise ProtocolError(f"the coordinator answered a hello with {type(answer).__name__}")
