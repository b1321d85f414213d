"""One HTTPS request to a coordinator that is known by its certificate's fingerprint; no proxy, redirect or cookie."""

import http.client
import ssl

import msgspec

from coterie.errors import ControlRefusedError, NetworkError, ProtocolError
from coterie.transport.certificates import HTTP_PROTOCOL, client_context, fingerprint_of

MAX_ANSWER_BYTES = 1 << 20
"""Of an answer: whoever answers in a coordinator's place must not fill this machine's memory."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where to ask, and whom.

    Attributes:
        hosts: Names or addresses to try in turn.
        fingerprint: SHA-256 of the certificate that must answer.
        token: Sent as a bearer token once that certificate was shown; a secret.
    """

    hosts: tuple[str, ...]
    port: int
    fingerprint: str
    token: str

    def __repr__(self) -> str:
        return f"Endpoint(hosts={self.hosts!r}, port={self.port}, fingerprint={self.fingerprint[:16]!r}…, token=…)"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back."""

    status: int
    body: bytes


def request(endpoint: Endpoint, method: str, path: str, *, body: bytes = b"", timeout_s: float = 10.0) -> Answer:
    """Ask the first host that answers with the right certificate. Nothing is sent to any other.

    Raises:
        NetworkError: Nobody answers at any of the hosts.
        ControlRefusedError: Somebody does, with another certificate.
        ProtocolError: What came back is no HTTP, or too much of it.
    """
    failures: list[str] = []
    stranger: ControlRefusedError | None = None
    for host in endpoint.hosts:
        connection = http.client.HTTPSConnection(host, endpoint.port, timeout=timeout_s, context=_context())
        try:
            connection.connect()
            _check(connection, endpoint.fingerprint)
            return _ask(connection, endpoint.token, (method, path), body)
        except ControlRefusedError as error:
            stranger = error
        except OSError as error:  # timeouts and failed handshakes included
            failures.append(f"{host}: {error.strerror or error}")
        except http.client.HTTPException as error:
            raise ProtocolError(
                f"{host} port {endpoint.port} answered with something that is no HTTP: {error}"
            ) from error
        finally:
            connection.close()
    if stranger is not None:
        raise stranger
    raise NetworkError(
        f"no coordinator answers at port {endpoint.port}: " + "; ".join(failures),
        hint="is the run still going on, and can this machine reach it?",
    )


def _context() -> ssl.SSLContext:
    context = client_context()
    context.set_alpn_protocols([HTTP_PROTOCOL])
    return context


def _check(connection: http.client.HTTPSConnection, fingerprint: str) -> None:
    """Before a byte is sent: is it the coordinator?"""
    assert isinstance(connection.sock, ssl.SSLSocket)
    found = fingerprint_of(connection.sock.getpeercert(binary_form=True) or b"")
    if found != fingerprint:
        raise ControlRefusedError(
            f"{connection.host} port {connection.port} shows a certificate with fingerprint {found[:16]}…, "
            f"this run's is {fingerprint[:16]}…",
            hint="another program or another run has the port now; the token was not sent to it",
        )


def _ask(connection: http.client.HTTPSConnection, token: str, what: tuple[str, str], body: bytes) -> Answer:
    method, path = what
    headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
    if body:
        headers["Content-Type"] = "application/json"
    connection.request(method, path, body=body or None, headers=headers)
    answer = connection.getresponse()
    content = answer.read(MAX_ANSWER_BYTES + 1)
    if len(content) > MAX_ANSWER_BYTES:
        raise ProtocolError(f"{connection.host} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
    return Answer(status=answer.status, body=content)
