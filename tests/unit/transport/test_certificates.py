import os
import ssl
import stat
import tempfile
from pathlib import Path

import pytest

from coterie.errors import JoinRefusedError, UsageError
from coterie.transport.certificates import (
    FRAME_PROTOCOL,
    Identity,
    check_peer,
    client_context,
    make_identity,
    parse_fingerprint,
    server_context,
)


def handshake(identity: Identity) -> ssl.SSLObject:
    """A client's and a server's TLS joined in memory; the client's side of it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context().wrap_bio(to_client, to_server)
    server = server_context(identity).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client


def test_the_client_finds_the_fingerprint_that_the_server_announces() -> None:
    identity = make_identity()
    client = handshake(identity)
    check_peer(client, identity.fingerprint)
    assert client.version() == "TLSv1.3"
    assert client.selected_alpn_protocol() == FRAME_PROTOCOL


def test_another_certificate_is_refused_naming_both_fingerprints() -> None:
    identity, expected = make_identity(), make_identity().fingerprint
    with pytest.raises(JoinRefusedError, match=f"{identity.fingerprint[:16]}….*{expected[:16]}…") as caught:
        check_peer(handshake(identity), expected)
    assert "join link" in caught.value.hint


def test_each_identity_is_new_and_none_shows_its_key() -> None:
    one, other = make_identity(), make_identity()
    assert one.fingerprint != other.fingerprint
    assert "PRIVATE" not in repr(one)
    assert one.fingerprint in repr(one)


def test_the_key_is_never_on_disk_in_clear_and_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, int]] = []
    original = ssl.SSLContext.load_cert_chain

    def spy(context: ssl.SSLContext, file: Path, password: str) -> None:
        seen.append((file.read_bytes(), stat.S_IMODE(file.parent.stat().st_mode)))
        original(context, file, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server_context(make_identity())
    ((content, mode),) = seen
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in content
    assert b"BEGIN PRIVATE KEY" not in content
    assert os.name == "nt" or mode == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_fingerprint_is_refused() -> None:
    for text in ("", "12", "g" * 64, "0" * 63, "0" * 65):
        with pytest.raises(UsageError, match="not a certificate fingerprint"):
            parse_fingerprint(text)
