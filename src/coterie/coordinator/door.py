"""Who may come in: tokens of join links, devices by their identities and tickets; kept so that it outlives a kill.

A run's folder holds the certificate, the port, digests of tokens and what is known of each device, so that a
coordinator that was killed opens the same door again, under the same link. A device that was in needs no token to come
back. Each joining gives it a fresh ticket: one that shows an older ticket is a copy of it, or was copied.
"""

import asyncio
import hmac
import secrets
from pathlib import Path

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.cluster.messages import Hello
from coterie.errors import JoinRefusedError, StorageError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.transport.certificates import Identity, make_identity
from coterie.transport.identity import check_proof, short
from coterie.transport.join_link import JoinToken, JoinTokens, digest_of
from coterie.transport.private_files import make_private_folder, write_private
from coterie.transport.stream_link import StreamLink

log = get_logger(__name__)

DOOR = "door"
"""The folder's name in the run's."""

_CERTIFICATE = "certificate.json"
_BOOK = "book.json"
_TICKET_BYTES = 16
_LISTEN_S = 0.05
_WRITE_AGAIN_S = 30.0
"""After who is in could not be written down."""
_MOST_GUESTS = 256
"""That a standing door knows; older ones need a token again."""


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was let in.

    Attributes:
        identity: Its public key.
        name: As it called itself last.
        worker: The id that it had last.
        ticket: The last one that it is known to have received; empty: none yet.
        pending: The one given last. It counts beside `ticket` until it is known to have arrived: a link may break under
            a welcome.
        token: Digest of the token that it came in by.
    """

    identity: str
    name: str
    worker: WorkerId
    ticket: str
    pending: str
    token: str


class _Book(msgspec.Struct, frozen=True, kw_only=True):
    """What a door keeps on disk beside its certificate."""

    port: int
    tokens: tuple[JoinToken, ...]
    guests: tuple[Guest, ...]


class Door:
    """The tokens, identities and tickets of one run.

    Args:
        folder: Where to keep them; None: in memory, for runs that cannot be resumed.
        clock: Tells when tokens expire.
        reopen: Go on from what the folder holds, if it holds a door.
        standing: It is the door of several runs, one after the other: devices that were in come back to the next one,
            tokens of runs that are over are good no more.

    Raises:
        StorageError: The folder cannot be read or written.
    """

    def __init__(
        self, folder: Path | None = None, *, clock: Clock | None = None, reopen: bool = False, standing: bool = False
    ) -> None:
        self._folder = folder
        self._standing = standing
        certificate, book = _read(folder) if folder is not None and (reopen or standing) else (None, None)
        self.certificate = certificate or make_identity()
        self.port = book.port if book else 0
        self._clock = clock or SystemClock()
        self._unwritten_since_s: float | None = None
        self._tokens = JoinTokens(clock, book.tokens if book and not standing else ())
        self._guests = {guest.identity: guest for guest in book.guests} if book else {}
        self._new: set[str] = set()
        self._own: set[str] = set()
        if folder is not None and certificate is None:
            _write(folder, _CERTIFICATE, self.certificate)
            self._save()  # no book of an older certificate must be found beside it

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate."""
        return self.certificate.fingerprint

    @property
    def guests(self) -> tuple[Guest, ...]:
        """Every device with an identity that was let in so far."""
        return tuple(self._guests.values())

    @property
    def told_tokens(self) -> tuple[str, ...]:
        """Digests of the tokens that people were told: whoever shows that it knows one is told that this is the run."""
        return tuple(token.digest for token in self._tokens.known if token.digest not in self._own)

    def opened(self, port: int) -> None:
        """Remember the port that was opened."""
        self.port = port
        self._save()

    def issue(self, *, uses: int = 1, minutes: float | None = None, own: bool = False) -> str:
        """A new token, good for `uses` devices and, if `minutes` are given, for so long.

        One that is `own` is for workers that the coordinator starts beside itself, and nobody else gets to know it.
        """
        token = self._tokens.issue(uses=uses, minutes=minutes)
        if own:
            self._own.add(digest_of(token))
        self._save()
        return token

    def is_own(self, hello: Hello) -> bool:
        """Whether a device that was let in is a worker that this process has started beside itself."""
        return any(hmac.compare_digest(digest_of(hello.token), digest) for digest in self._own)

    def knock(self, hello: Hello) -> WorkerId | None:
        """Check who knocks, and take a use of its token if it was never in. `let_in` or `turn_away` must follow.

        Returns:
            The id that it had when it was in before; None: it is new.

        Raises:
            JoinRefusedError: A wrong, used or expired token, an identity that is not proven, or one that was copied.
        """
        guest = self._guests.get(hello.identity)
        if hello.identity:
            check_proof(
                hello.identity,
                hello.proof,
                coordinator=self.fingerprint,
                token=hello.token,
                ticket=hello.ticket,
                nonce=hello.fingerprint,
            )
        if guest is None:
            self._tokens.redeem(hello.token)
            return None
        shown = hello.ticket.encode("utf-8", "surrogatepass")
        if not any(hmac.compare_digest(shown, ticket.encode()) for ticket in (guest.ticket, guest.pending)):
            raise JoinRefusedError(
                f"the identity {short(hello.identity)} of {hello.name} was copied: {guest.name} has joined with it "
                f"since this device did",
                hint="let one of the two have an identity of its own: `coterie worker LINK --identity FILE` with a new "
                "FILE; it then joins as a new device",
            )
        return guest.worker

    def let_in(self, hello: Hello, worker: WorkerId) -> str:
        """Write down that a device is in.

        Returns:
            Its fresh ticket; empty for a device without an identity.
        """
        if not hello.identity:
            self._keep()
            return ""
        old = self._guests.get(hello.identity)
        if old is None:
            self._new.add(hello.identity)
        ticket = secrets.token_urlsafe(_TICKET_BYTES)
        self._guests[hello.identity] = Guest(
            identity=hello.identity,
            name=hello.name,
            worker=worker,
            # What it has just shown is what it is sure to have.
            ticket=hello.ticket if old else "",
            pending=ticket,
            token=old.token if old else digest_of(hello.token),
        )
        self._keep()
        return ticket

    def heard(self, hello: Hello) -> None:
        """A device has spoken after its welcome, so it has its ticket: from now on only that one counts."""
        guest = self._guests.get(hello.identity)
        if guest is not None and guest.ticket != guest.pending:
            self._guests[hello.identity] = msgspec.structs.replace(guest, ticket=guest.pending)
            self._keep()
        elif self._unwritten_since_s is not None and self._clock.now() - self._unwritten_since_s >= _WRITE_AGAIN_S:
            self._keep()

    def turn_away(self, hello: Hello) -> None:
        """Undo `knock` for a device that is not let in for another reason than what it showed."""
        if hello.identity not in self._guests:
            self._tokens.give_back(digest_of(hello.token))
            self._keep()

    def left_early(self, hello: Hello) -> None:
        """A device has left before the run began: its token is good for another one, which may be itself again."""
        if hello.identity and hello.identity not in self._new:
            return  # in from before a kill: it may come back, and its place is not given away
        guest = self._guests.pop(hello.identity, None)
        self._new.discard(hello.identity)
        self._tokens.give_back(guest.token if guest else digest_of(hello.token))
        self._keep()

    def _keep(self) -> None:
        """Write down who came or went. A disk that is full refuses no device: it is tried again later.

        Until then a coordinator that was killed takes whoever it did not write down for a copy, or for a stranger.
        """
        try:
            self._save()
        except StorageError as error:
            if self._unwritten_since_s is None:
                log.warning("%s; devices are let in, but would not be known again by --resume", error.message)
            self._unwritten_since_s = self._clock.now()
        else:
            self._unwritten_since_s = None

    def _save(self) -> None:
        if self._folder is None:
            return
        guests = self.guests
        if self._standing:  # workers that a run starts beside itself never come back to the next one
            guests = tuple(guest for guest in guests if guest.token not in self._own)[-_MOST_GUESTS:]
        _write(self._folder, _BOOK, _Book(port=self.port, tokens=self._tokens.known, guests=guests))


async def lives(link: StreamLink, within_s: float) -> bool:
    """Whether bytes come over a link in two such spans of time, one after the other.

    One burst may be what was still on its way from a device that has gone and come back. Not a moment longer is waited
    than it takes to know.
    """
    return await _speaks(link, within_s) and await _speaks(link, within_s)


async def _speaks(link: StreamLink, within_s: float) -> bool:
    heard = link.bytes_received
    for _ in range(max(round(within_s / _LISTEN_S), 1)):
        await asyncio.sleep(_LISTEN_S)
        if link.bytes_received != heard:
            return True
        if link.is_closed:
            return False
    return False


def _write(folder: Path, name: str, content: msgspec.Struct) -> None:
    try:
        make_private_folder(folder)
        write_private(folder / name, msgspec.json.encode(content))
    except OSError as error:
        raise StorageError(
            f"cannot keep who may join in {folder}: {error.strerror or error}", hint="free some space there"
        ) from error


def _read(folder: Path) -> tuple[Identity | None, _Book | None]:
    """What an earlier process kept. Without its certificate, what else it kept is of no use."""
    try:
        certificate = msgspec.json.decode((folder / _CERTIFICATE).read_bytes(), type=Identity)
        book = msgspec.json.decode((folder / _BOOK).read_bytes(), type=_Book)
    except FileNotFoundError:
        return None, None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("the door in %s cannot be read (%s): a new one is made, under a new link", folder, error)
        return None, None
    return certificate, book
