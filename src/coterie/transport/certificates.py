"""The server's identity: a self-signed certificate made at start, known to workers by its fingerprint.

Nobody has to install anything: a join link carries the SHA-256 of the certificate, and a worker talks to no server that
shows another one. Names and dates in the certificate are therefore not checked.
"""

import datetime as dt
import hashlib
import hmac
import re
import secrets
import ssl
import tempfile
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coterie.errors import JoinRefusedError, UsageError

FRAME_PROTOCOL = "coterie/1"
"""The ALPN name of the frame stream."""
HTTP_PROTOCOL = "http/1.1"

_LIFETIME = dt.timedelta(days=3650)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate and its private key, both PEM; the key is a secret."""

    certificate_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        return f"Identity(fingerprint={self.fingerprint!r})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, 64 lower-case hex digits."""
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(self.certificate_pem.decode("ascii")))


def make_identity() -> Identity:
    """A new self-signed certificate on the curve P-256."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie coordinator")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("coterie")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Identity(
        certificate_pem=certificate.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def fingerprint_of(certificate_der: bytes) -> str:
    """SHA-256 of a certificate, 64 lower-case hex digits."""
    return hashlib.sha256(certificate_der).hexdigest()


def parse_fingerprint(text: str) -> str:
    """A fingerprint as people paste it, colons and upper case allowed, in this project's form.

    Raises:
        UsageError: It is not a SHA-256 fingerprint.
    """
    plain = text.replace(":", "").strip().lower()
    if re.fullmatch(r"[0-9a-f]{64}", plain) is None:
        raise UsageError(
            f"{text[:80]!r} is not a certificate fingerprint (64 hex digits)", hint="copy the whole join link"
        )
    return plain


def server_context(identity: Identity) -> ssl.SSLContext:
    """TLS for the server: 1.3 only, frames and HTTP told apart by ALPN.

    Python reads keys from files only: the key is written encrypted under a password that lives in memory, into a folder
    that only this user can enter, and deleted once read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is ever resumed
    context.set_alpn_protocols([FRAME_PROTOCOL, HTTP_PROTOCOL])
    password = secrets.token_bytes(32).hex()
    key = serialization.load_pem_private_key(identity.key_pem, password=None)
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        file = Path(folder) / "identity.pem"
        sealed = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode("ascii")),
        )
        file.write_bytes(sealed + identity.certificate_pem)
        context.load_cert_chain(file, password=password)
    return context


def client_context() -> ssl.SSLContext:
    """TLS for a worker: 1.3 only. The certificate is checked by `check_peer`, before anything is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([FRAME_PROTOCOL])
    return context


def check_peer(connection: ssl.SSLObject, fingerprint: str) -> None:
    """Compare the server's certificate with the expected fingerprint.

    Raises:
        JoinRefusedError: It is another one: not the server the join link is from.
    """
    certificate = connection.getpeercert(binary_form=True) or b""
    found = fingerprint_of(certificate)
    if not hmac.compare_digest(found, fingerprint):
        raise JoinRefusedError(
            f"the server shows a certificate with fingerprint {found[:16]}…, the join link says {fingerprint[:16]}…",
            hint="use the join link that the coordinator printed at its latest start; "
            "if it is that one, somebody else answers at this address",
        )
