"""What a broken or hostile peer can do: lose its own link, over every carrier that has bytes."""

import asyncio
import pickle
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from coterie.errors import CoterieError, NetworkError, ProtocolError, VersionMismatchError
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.wire import MAGIC, PREAMBLE, WIRE_VERSION
from coterie.units import MIB

STREAMS = ["tls", "plain"] + ([] if sys.platform == "win32" else ["unix"])
Listening = Callable[..., AbstractAsyncContextManager[Any]]  # the fixture's own class lives in conftest.py


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def header_bytes(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"kind": "x", **fields})


def tensor(**fields: object) -> dict[str, object]:
    return {"name": "x", "dtype": "float32", "shape": [2], "nbytes": 8, **fields}


def opened(header: bytes, payload_bytes: int = 0) -> bytes:
    return PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), payload_bytes) + header


BROKEN = {
    "HTTP instead of a frame": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolError),
    "a pickle": (pickle.dumps({"weights": [1.0] * 50}), ProtocolError),
    "a pickle as header": (opened(pickle.dumps(["x"])), ProtocolError),
    "another version": (PREAMBLE.pack(MAGIC, WIRE_VERSION + 1, 0, 10, 0), VersionMismatchError),
    "a huge header": (PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 2**32 - 1, 0), ProtocolError),
    "a huge payload": (PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 10, 2**64 - 1), ProtocolError),
    "a huge tensor": (opened(header_bytes(tensors=[tensor(shape=[2**40], nbytes=2**42)]), 2**32), ProtocolError),
    "an unknown dtype": (opened(header_bytes(tensors=[tensor(dtype="object")]), 8), ProtocolError),
    "a negative shape": (opened(header_bytes(tensors=[tensor(shape=[-2])]), 8), ProtocolError),
    "a shape of another size": (opened(header_bytes(tensors=[tensor(shape=[3])]), 8), ProtocolError),
    "sizes that do not add up": (opened(header_bytes(tensors=[tensor()]), 12), ProtocolError),
    "a wrong type": (opened(header_bytes(step="1")), ProtocolError),
    "closing in mid-preamble": (MAGIC, NetworkError),
    "closing in mid-header": (opened(header_bytes())[:-1], NetworkError),
    "closing in mid-tensor": (opened(header_bytes(tensors=[tensor()]), 8) + b"1234567", NetworkError),
}


@pytest.mark.parametrize("carrier", STREAMS)
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_hostile_peer_loses_only_its_own_link(carrier: str, case: str, listening: Listening) -> None:
    data, error = BROKEN[case]

    async def test() -> None:
        async with listening(carrier) as place:
            good = await place.dial()
            good_end = await place.arrived.get()
            _, writer = await place.dial_raw()
            bad_end = await place.arrived.get()
            writer.write(data)
            if error is NetworkError:
                writer.close()
            tracemalloc.start()
            with pytest.raises(error) as caught:
                await bad_end.receive()
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak_bytes < 4 * MIB
            assert isinstance(caught.value, CoterieError)
            if error is NetworkError:
                assert "mid-frame" in str(caught.value)
            with pytest.raises(error):
                await bad_end.receive()
            writer.close()
            await good.send(Frame(FrameHeader(kind="data", step=1)))
            assert (await good_end.receive()).header.step == 1
            await good.close()

    run(test)


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_frame_cut_short_is_noticed_by_what_follows_it(carrier: str, listening: Listening) -> None:
    async def test() -> None:
        async with listening(carrier) as place:
            _, writer = await place.dial_raw()
            end = await place.arrived.get()
            whole = opened(header_bytes(tensors=[tensor()]), 8) + bytes(8)
            writer.write(whole + whole[:-3] + whole)
            assert (await end.receive()).payload_bytes == 8
            assert (await end.receive()).payload_bytes == 8
            with pytest.raises(ProtocolError, match="no frame"):
                await end.receive()
            writer.close()

    run(test)
