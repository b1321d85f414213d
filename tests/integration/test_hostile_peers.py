"""Guests that no run wants: each is turned away at the one port, and the run goes on."""

import asyncio
import contextlib
import secrets
import socket
import ssl
import threading

import msgspec

from coterie.cluster.messages import CONTROL, Hello, Refused, control, unpack
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.errors import (
    JoinRefusedError,
)
from coterie.metrics.records import StepRecord
from coterie.transport.connect import connect
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.join_link import JoinLink


def test_hostile_and_lost_peers_are_refused_while_a_run_waits_and_while_it_trains(tmp_path, make_recipe, cluster, run):
    watcher = cluster()
    knocked = threading.Event()
    outcomes: list[str] = []

    def knock_once(record):
        if isinstance(record, StepRecord) and record.step == 2:
            guests = threading.Thread(target=lambda: outcomes.extend(asyncio.run(hostile(watcher.join_link))))
            guests.start()
            watcher.threads.append(guests)
            knocked.set()

    watcher.on_record = knock_once
    join = watcher.joinable

    def disturbed(link):
        outcomes.extend(asyncio.run(hostile(link)))
        join(link)

    # From a thread of its own: an observer must not block the event loop that is to answer.
    watcher.joinable = lambda link: threading.Thread(target=disturbed, args=(link,)).start()
    recipe = make_recipe(tmp_path / "run", epochs=10)
    result = run(recipe, watcher)
    assert knocked.is_set()
    assert len(outcomes) == 2 * len(HOSTILE)
    assert set(outcomes) == {"refused"}
    assert len(result.losses) == 90
    assert watcher.failures == {}


async def hostile(link_text):
    """Every bad guest once; each must be turned away soon."""
    join = JoinLink.from_text(link_text)
    outcomes = []
    for guest in HOSTILE:
        try:
            async with asyncio.timeout(60):
                outcomes.append(await guest(join))
        except TimeoutError:
            outcomes.append(f"{guest.__name__} was not turned away")
    return outcomes


async def wrong_token(join):
    return await _greeted(join, control(_hello(token="a-token-from-elsewhere")))


async def used_token(join):
    """A token of a run that is full, or none at all, is as good as a wrong one."""
    return await _greeted(join, control(_hello(token="")))


async def wrong_version(join):
    return await _greeted(join, control(_hello(token=join.token, wire_version=999)))


async def pickled(join):
    return await _greeted(join, Frame(FrameHeader(kind=CONTROL, body=b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00.")))


async def wrong_fingerprint(join):
    try:
        await connect(msgspec.structs.replace(join, fingerprint="ab" * 32))
    except JoinRefusedError:
        return "refused"
    return "taken"


async def huge_length(join):
    return await _raw(join, b"COTR" + (1).to_bytes(2, "little") + bytes(2) + b"\xff" * 12)


async def garbage(join):
    return await _raw(join, secrets.token_bytes(4096))


async def over_http(join):
    """The same port answers a browser, and tells it nothing of the run."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return "refused" if b"coordinator" in answer and join.token.encode() not in answer else "told too much"


async def no_tls(join):
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    try:
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    writer.close()
    return "refused" if b"HTTP" not in answer else "answered"


async def hang_up(join):
    with socket.create_connection((join.hosts[0], join.port)):
        return "refused"


HOSTILE = (
    wrong_token,
    used_token,
    wrong_version,
    pickled,
    wrong_fingerprint,
    huge_length,
    garbage,
    over_http,
    no_tls,
    hang_up,
)


def _hello(**changes):
    fields = {
        "wire_version": WIRE_VERSION,
        "package_version": "0",
        "name": "guest",
        "device_type": "cpu",
        "threads": 1,
        "memory_bytes": 1,
        "host_id": "",
        "hosts": (),
        "port": 0,
        "fingerprint": "",
    }
    return Hello(**(fields | changes))


async def _greeted(join, frame):
    link = await connect(join)
    await link.send(frame)
    answer = unpack((await link.receive()).header.body)
    await link.close()
    return "refused" if isinstance(answer, Refused) else "taken"


async def _raw(join, content):
    """Bytes on the frame stream that are no frame."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["coterie/1"])
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port, ssl=context)
    writer.write(content)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await reader.read()
    writer.close()
    return "refused"
