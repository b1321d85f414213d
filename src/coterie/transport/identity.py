"""A device's identity: an Ed25519 key of its own, by which a coordinator knows it again.

The key says nothing about who owns the device and is never sent; what is sent is its public half (`Hello.identity`), a
signature that only fits one coordinator and one joining (`proof`), and the `ticket` that this coordinator gave last.
Each joining gets a fresh ticket, so of two devices that use copies of one key, one sooner or later shows an old ticket.
"""

import hashlib
import os
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock, Timeout

from coterie.errors import JoinRefusedError, StorageError, UsageError
from coterie.logs import get_logger
from coterie.transport.private_files import write_private
from coterie.transport.user_settings import IDENTITY_VARIABLE, IN_MEMORY, config_folder

_log = get_logger(__name__)

_DOMAIN = b"coterie device identity 1"
_TICKETS = ".tickets"
_MOST_TICKETS = 64
_MOST_ON_ONE_MACHINE = 64


class DeviceIdentity:
    """A device's key, and the tickets that coordinators gave it, both in files that only this user can read.

    Make one with `open_identity`. It holds a lock on its file while the process runs: two workers on one machine have
    two identities.
    """

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None, lock: FileLock | None = None) -> None:
        self._key = key
        self._path = path
        self._lock = lock
        self._tickets = _read_tickets(_beside(path)) if path is not None else {}
        self.public = key.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"DeviceIdentity({short(self.public)})"

    @property
    def path(self) -> Path | None:
        """Where the key is kept; None: in memory."""
        return self._path

    def ticket_for(self, coordinator: str) -> str:
        """The last ticket from the coordinator with this certificate fingerprint; empty if it never gave one."""
        return self._tickets.get(coordinator, "")

    def keep_ticket(self, coordinator: str, ticket: str) -> None:
        """Put a ticket away, on disk before this returns: say nothing more to the coordinator earlier than that.

        Raises:
            StorageError: It cannot be written.
        """
        others = {known: kept for known, kept in self._tickets.items() if known != coordinator}
        newest = list(others.items())[-(_MOST_TICKETS - 1) :]
        self._tickets = dict(newest) | {coordinator: ticket}
        if self._path is not None:
            _write_private(_beside(self._path), msgspec.json.encode(self._tickets))

    def prove(self, *, coordinator: str, token: str, ticket: str, nonce: str) -> str:
        """The signature that shows that this device holds its key, in hex; see `check_proof`."""
        return self._key.sign(_statement(coordinator, token, ticket, nonce)).hex()

    def close(self) -> None:
        """Let another process of this machine use the identity. Idempotent."""
        if self._lock is not None:
            self._lock.release()


def check_proof(identity: str, proof: str, *, coordinator: str, token: str, ticket: str, nonce: str) -> None:
    """Check that whoever says `identity` holds its key.

    Args:
        identity: The public key, 64 hex digits.
        proof: The signature, in hex.
        coordinator: Fingerprint of the certificate that the device saw: a proof for one is none for another.
        token: Of the join link.
        ticket: That the device shows.
        nonce: Fingerprint of the device's own listener, which is new with every start of its worker.

    Raises:
        JoinRefusedError: It does not, or one of the two is no hex of the right length.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(identity))
        key.verify(bytes.fromhex(proof), _statement(coordinator, token, ticket, nonce))
    except (ValueError, InvalidSignature) as error:
        raise JoinRefusedError(
            f"the device's identity {short(identity)} is not proven: its signature does not fit this coordinator",
            hint="start the worker again with the join link that the coordinator printed",
        ) from error


def open_identity(chosen: str | Path | None = None) -> DeviceIdentity:
    """This device's identity, made at its first use.

    Args:
        chosen: A file, or `IN_MEMORY`; None: what `COTERIE_IDENTITY` says, else a file in the user's own folder for
            settings. If another worker of this machine uses that one, a second one beside it, and so on.

    Raises:
        UsageError: The chosen file is in use by another worker, or holds no key.
        StorageError: It cannot be read or written.
    """
    named = chosen or os.environ.get(IDENTITY_VARIABLE) or None
    if named is not None and str(named) == IN_MEMORY:
        return DeviceIdentity(Ed25519PrivateKey.generate())
    if named is not None:
        path = Path(named).expanduser()
        if (lock := _hold(path)) is None:
            raise UsageError(
                f"another worker on this machine uses the identity {path}",
                hint="give each worker a file of its own with --identity, or leave --identity out",
            )
        return _load(path, lock)
    folder = config_folder()
    for number in range(1, _MOST_ON_ONE_MACHINE + 1):
        path = folder / ("identity" if number == 1 else f"identity-{number}")
        if (lock := _hold(path)) is not None:
            return _load(path, lock)
    raise UsageError(
        f"{_MOST_ON_ONE_MACHINE} workers on this machine use all the identities in {folder}",
        hint="stop some of them, or name files with --identity",
    )


def short(identity: str) -> str:
    """As people compare it: the first 12 digits."""
    return f"{identity[:12]}…"


def _statement(coordinator: str, token: str, ticket: str, nonce: str) -> bytes:
    """What is signed. Digests of equal length: no field can pose as part of its neighbour."""
    parts = (coordinator, token, ticket, nonce)
    return _DOMAIN + b"".join(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest() for part in parts)


def _hold(path: Path) -> FileLock | None:
    """The lock of an identity's file; None if another process has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(path.with_name(path.name + ".lock"), timeout=0, mode=0o600)
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    return lock


def _load(path: Path, lock: FileLock) -> DeviceIdentity:
    try:
        pem = path.read_bytes()
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        encoding, shape = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        # Tickets of a key that was deleted say nothing about the new one.
        _beside(path).unlink(missing_ok=True)
        _write_private(path, key.private_bytes(encoding, shape, serialization.NoEncryption()))
        return DeviceIdentity(key, path, lock)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        found = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} holds no key", hint="delete it for a new identity, or name another file with --identity"
        ) from error
    if not isinstance(found, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key of another kind", hint="name another file with --identity")
    return DeviceIdentity(found, path, lock)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _TICKETS)


def _read_tickets(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("the tickets in %s cannot be read (%s): coordinators may take this device for a copy", path, error)
        return {}


def _write_private(path: Path, content: bytes) -> None:
    try:
        write_private(path, content)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the identity {path} cannot be read or written: {error.strerror or error}",
        hint="name another file with --identity, or `--identity memory` for one that is gone with the worker",
    )
