"""The text that lets a worker join: where the coordinator is, how to know it, and a token.

    coterie://HOST:PORT/?fp=FINGERPRINT&host=OTHER_HOST#TOKEN

The token stands behind `#`, as browsers never send that part, and is left out of every representation but `to_text`.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.errors import JoinRefusedError, UsageError
from coterie.transport.certificates import parse_fingerprint
from coterie.units import format_seconds

SCHEME = "coterie"
_TOKEN_BYTES = 16
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]{0,251}[A-Za-z0-9_.])?")
_TOKEN = re.compile(r"[A-Za-z0-9_\-]{8,128}")
_HINT = "a join link looks like coterie://HOST:PORT/?fp=FINGERPRINT#TOKEN; copy it whole, in quotes"


class JoinLink(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach and recognise a coordinator.

    Attributes:
        hosts: Names or addresses to try, best first.
        port: The one port.
        fingerprint: SHA-256 of the coordinator's certificate, 64 hex digits.
        token: What lets its holder join; a secret.
    """

    hosts: tuple[str, ...]
    port: int
    fingerprint: str
    token: str

    def __repr__(self) -> str:
        return f"JoinLink(hosts={self.hosts!r}, port={self.port}, fingerprint={self.fingerprint[:16]!r}…, token=…)"

    def to_text(self) -> str:
        """The link as one line; it contains the token."""
        first, *others = self.hosts
        query = urlencode([("fp", self.fingerprint), *(("host", host) for host in others)], quote_via=quote, safe=":")
        return f"{SCHEME}://{_bracketed(first)}:{self.port}/?{query}#{self.token}"

    @classmethod
    def from_text(cls, text: str) -> "JoinLink":
        """Read a link.

        Raises:
            UsageError: The text is no join link; the message says which part is wrong.
        """
        try:
            parts = urlsplit(text.strip())
            host, port = parts.hostname, parts.port
            query = parse_qs(parts.query, strict_parsing=bool(parts.query), max_num_fields=64)
        except ValueError as error:
            raise UsageError(f"the join link cannot be read: {error}", hint=_HINT) from error
        if parts.scheme != SCHEME:
            raise UsageError(f"a join link begins with {SCHEME}://, not {parts.scheme[:20]!r}", hint=_HINT)
        if not host or not port:
            raise UsageError("the join link names no host or no port", hint=_HINT)
        if len(query.get("fp", ())) != 1:
            raise UsageError("the join link has no fingerprint (fp=…)", hint=_HINT)
        if not parts.fragment:
            raise UsageError(
                "the join link has no token (the part behind #)", hint="quote the link: many shells cut it at # or &"
            )
        if _TOKEN.fullmatch(parts.fragment) is None:
            raise UsageError("the join link's token has characters that no token has", hint=_HINT)
        hosts = (host, *query.get("host", ()))
        for name in hosts:
            _check_host(name)
        return cls(hosts=hosts, port=port, fingerprint=parse_fingerprint(query["fp"][0]), token=parts.fragment)


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as the coordinator keeps it.

    Attributes:
        digest: SHA-256, in hex; the token itself is not kept.
        uses_left: For so many more workers.
        expires_at_s: Seconds since 1970; None: never.
    """

    digest: str
    uses_left: int
    expires_at_s: float | None = None


class JoinTokens:
    """The tokens that the coordinator has given out. Only their digests are kept.

    Args:
        clock: Tells when tokens expire.
        known: Those of an earlier process of the same run.
    """

    def __init__(self, clock: Clock | None = None, known: Iterable[JoinToken] = ()) -> None:
        self._clock = clock or SystemClock()
        self._known = {token.digest: token for token in known}

    @property
    def known(self) -> tuple[JoinToken, ...]:
        """All of them, to be kept on disk."""
        return tuple(self._known.values())

    def issue(self, *, uses: int = 1, minutes: float | None = None) -> str:
        """A new token, good for `uses` workers and, if `minutes` are given, for so long."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        while token.startswith("-"):  # a command line would take it for a flag
            token = secrets.token_urlsafe(_TOKEN_BYTES)
        expires_at_s = None if minutes is None else self._clock.wall() + 60 * minutes
        kept = JoinToken(digest=digest_of(token), uses_left=uses, expires_at_s=expires_at_s)
        self._known[kept.digest] = kept
        return token

    def redeem(self, token: str) -> None:
        """Take one use of a token.

        Raises:
            JoinRefusedError: It was never given out, has expired, or is used up.
        """
        presented = digest_of(token)
        known = None
        for digest in self._known:  # all of them: the time taken says nothing about which one matched
            if hmac.compare_digest(digest, presented):
                known = self._known[digest]
        if known is None:
            raise JoinRefusedError("the join token is not known", hint="copy the whole join link of the current run")
        late_s = 0.0 if known.expires_at_s is None else self._clock.wall() - known.expires_at_s
        if late_s > 0:
            raise JoinRefusedError(
                f"the join token expired {format_seconds(late_s)} ago", hint="ask the coordinator for a new join link"
            )
        if known.uses_left < 1:
            raise JoinRefusedError("the join token is used up", hint="ask the coordinator for a new join link")
        self._known[known.digest] = msgspec.structs.replace(known, uses_left=known.uses_left - 1)

    def give_back(self, digest: str) -> None:
        """Return one use of the token with this digest: its worker left before the run began."""
        if (known := self._known.get(digest)) is not None:
            self._known[digest] = msgspec.structs.replace(known, uses_left=known.uses_left + 1)


def digest_of(token: str) -> str:
    """SHA-256 of a token, in hex: what may be kept of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_host(host: str) -> None:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise UsageError(f"the join link's host {host[:80]!r} is no IPv6 address", hint=_HINT) from error
    elif _HOST.fullmatch(host) is None:
        raise UsageError(f"the join link's host {host[:80]!r} is no host name", hint=_HINT)
