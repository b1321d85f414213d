"""Two ends that share a token find out that they do, before the token itself or anything else is told.

Each shows an HMAC over the fingerprint of the coordinator's certificate as it sees it: somebody in between shows
another certificate, so what it is told fits no other connection. The key is the token's digest, which is what a
coordinator keeps of it; a token has 128 random bits, so nobody finds it by trying.
"""

import hashlib
import hmac
import http.client
import secrets
import ssl
from collections.abc import Sequence

import msgspec

from coterie.errors import JoinRefusedError, NetworkError
from coterie.transport.certificates import HTTP_PROTOCOL, client_context, fingerprint_of
from coterie.transport.discovery import FoundRun
from coterie.transport.join_link import JoinLink, digest_of

PAIR_PATH = "/pair"
TIMEOUT_S = 8.0
_MAX_ANSWER_BYTES = 4096
_DOMAIN = b"coterie pairing 1"


class PairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's proof that it knows a token, for one connection."""

    nonce: str
    proof: str


class PairAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's."""

    proof: str


def pair(found: FoundRun, token: str) -> JoinLink:
    """The join link of a run that was found in the network, if its coordinator knows the token. Blocks.

    Raises:
        JoinRefusedError: Who answers there does not.
        NetworkError: Nobody answers.
    """
    failures = []
    for host in found.hosts:
        try:
            fingerprint, answer, nonce = _ask(host, found.port, token)
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{host}: {error}")
            continue
        expected = proof_of(digest_of(token), "coordinator", fingerprint, nonce)
        if answer is None or not hmac.compare_digest(expected.encode(), answer.proof.encode()):
            raise JoinRefusedError(
                f"who answers for run {found.run} at {host} does not know the join token",
                hint="type the part of the join link behind #, as the coordinator printed it; or copy the whole link",
            )
        others = tuple(other for other in found.hosts if other != host)
        return JoinLink(hosts=(host, *others), port=found.port, fingerprint=fingerprint, token=token)
    raise NetworkError(
        f"the run {found.run} is announced, and nobody answers at port {found.port}: " + "; ".join(failures),
        hint="is the port open in the coordinator's firewall?",
    )


def answer_pairing(digests: Sequence[str], fingerprint: str, request: PairRequest) -> PairAnswer | None:
    """The coordinator's side: its proof, by the token that the request was made with; None if it knows none such.

    Args:
        digests: Of the tokens that were told to people.
        fingerprint: Of its own certificate.
        request: What came.
    """
    known = None
    shown = request.proof.encode("utf-8", "surrogatepass")
    for digest in digests:  # all of them: the time taken says nothing about which one matched
        if hmac.compare_digest(proof_of(digest, "worker", fingerprint, request.nonce).encode(), shown):
            known = digest
    return None if known is None else PairAnswer(proof=proof_of(known, "coordinator", fingerprint, request.nonce))


def proof_of(digest: str, side: str, fingerprint: str, nonce: str) -> str:
    """That `side` knows the token with this digest, over a connection with this certificate; in hex."""
    parts = (side, fingerprint, nonce)
    text = _DOMAIN + b"".join(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest() for part in parts)
    return hmac.new(bytes.fromhex(digest), text, hashlib.sha256).hexdigest()


def _ask(host: str, port: int, token: str) -> tuple[str, PairAnswer | None, str]:
    """The fingerprint of who answers at an address, its answer, and the nonce that was sent."""
    context = client_context()
    context.set_alpn_protocols([HTTP_PROTOCOL])
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    try:
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        fingerprint = fingerprint_of(connection.sock.getpeercert(binary_form=True) or b"")
        nonce = secrets.token_hex(16)
        request = PairRequest(nonce=nonce, proof=proof_of(digest_of(token), "worker", fingerprint, nonce))
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", PAIR_PATH, body=msgspec.json.encode(request), headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER_BYTES)
    finally:
        connection.close()
    try:
        return fingerprint, msgspec.json.decode(body, type=PairAnswer) if answer.status == 200 else None, nonce
    except msgspec.DecodeError:
        return fingerprint, None, nonce
