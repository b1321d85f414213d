"""A worker's hello, and what it makes of the coordinator's answer."""

import msgspec
import pytest

from coterie import __version__
from coterie.cluster.messages import CONTROL, Heartbeat, Refused, Welcome, control
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.errors import JoinRefusedError, ProtocolError, VersionMismatchError
from coterie.ids import RunId, WorkerId
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.identity import check_proof, open_identity
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.transport.user_settings import IN_MEMORY
from coterie.worker.greeting import hello_of, welcome_in
from coterie.worker.settings import WorkerSettings


async def _nobody(_link, _peer):
    """Serves no link."""


def test_a_hello_proves_the_devices_identity_to_the_coordinator_of_the_join_link():
    device = open_identity(IN_MEMORY)
    device.keep_ticket("ab" * 32, "a-ticket")
    join = JoinLink(hosts=("127.0.0.1",), port=1, fingerprint="ab" * 32, token="a-token")
    hello = hello_of(WorkerSettings(name="board"), join, FrameServer(_nobody), 1 << 30, device)
    assert (hello.identity, hello.ticket) == (device.public, "a-ticket")
    facts = {"token": "a-token", "ticket": "a-ticket", "nonce": hello.fingerprint}
    check_proof(hello.identity, hello.proof, coordinator="ab" * 32, **facts)
    with pytest.raises(JoinRefusedError):
        check_proof(hello.identity, hello.proof, coordinator="cd" * 32, **facts)


def test_a_welcome_is_taken_and_a_refusal_is_its_error():
    welcome = Welcome(worker=WorkerId("board"), run=RunId("run"), heartbeat_s=1.0, silence_limit_s=10.0)
    assert welcome_in(control(welcome)) == welcome
    with pytest.raises(JoinRefusedError, match="used up"):
        welcome_in(control(Refused(slug="join-refused", message="the join token is used up")))


def test_an_answer_in_words_of_a_newer_version_names_the_own_version_and_says_what_to_install():
    newer = Frame(FrameHeader(kind=CONTROL, body=msgspec.msgpack.encode({"type": "WelcomeIn", "seat": 3})))
    with pytest.raises(VersionMismatchError, match=rf"wire version {WIRE_VERSION} \(coterie {__version__}\)") as caught:
        welcome_in(newer)
    assert "install the coordinator's version" in caught.value.hint


@pytest.mark.parametrize("frame", [control(Heartbeat()), Frame(FrameHeader(kind="hidden"))], ids=["heartbeat", "data"])
def test_any_other_answer_is_a_protocol_error(frame):
    with pytest.raises(ProtocolError, match="answered a hello with"):
        welcome_in(frame)
