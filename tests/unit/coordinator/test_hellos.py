"""What is said to a peer that speaks another version, or is no worker at all."""

import msgspec
import pytest

from coterie import __version__
from coterie.cluster.messages import CONTROL, Heartbeat, control, pack
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.coordinator.hellos import read_hello
from coterie.errors import ProtocolError, VersionMismatchError
from coterie.transport.frame import Frame, FrameHeader


def saying(**fields):
    return Frame(FrameHeader(kind=CONTROL, body=msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize("version", [1, WIRE_VERSION + 1])
def test_a_hello_of_another_version_is_refused_naming_both_whatever_its_other_words_are(version):
    newer = saying(type="Hello", wire_version=version, package_version="9.9", name="board", threads="many", novel=[1])
    with pytest.raises(VersionMismatchError) as caught:
        read_hello(newer)
    assert f"board speaks wire version {version} (coterie 9.9)" in caught.value.message
    assert f"this coordinator speaks {WIRE_VERSION} (coterie {__version__})" in caught.value.message


@pytest.mark.parametrize(
    "frame",
    [
        saying(type="Hello", wire_version=WIRE_VERSION, package_version="0", name="board"),
        saying(type="Welcome", wire_version=99, package_version="0", name="board"),
        saying(type="Hello", wire_version="99", package_version="0", name="board"),
        control(Heartbeat()),
        Frame(FrameHeader(kind=CONTROL, body=b"\x80\x04\x95 a pickle")),
        Frame(FrameHeader(kind="hidden", body=pack(Heartbeat()))),
    ],
    ids=["fields missing", "another message", "no number", "heartbeat", "pickle", "data"],
)
def test_what_is_no_hello_is_a_protocol_error(frame):
    with pytest.raises(ProtocolError):
        read_hello(frame)
