"""The endpoints beside the frames: without the token nobody learns a thing, with it the run is seen and controlled."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from coterie.cluster.control_messages import Refusal
from coterie.coordinator.control import MAX_BODY_BYTES, add_controls, front_page
from coterie.errors import ControlRefusedError, NetworkError
from coterie.metrics.status import RunStatus
from coterie.transport.pinned_https import Answer, Endpoint, request
from coterie.transport.server import FrameServer

TOKEN = "the-control-token-of-this-run"


class Asked:
    """Controls of a run that only notes what it is asked."""

    def __init__(self) -> None:
        self.wishes: list[str] = []
        self.cannot_pause = ""

    def status(self) -> RunStatus:
        self.wishes.append("status")
        return RunStatus(run="r", step=3, total_steps=9)

    def pause(self) -> None:
        if self.cannot_pause:
            raise ControlRefusedError(self.cannot_pause, hint="stop it")
        self.wishes.append("pause")

    def go_on(self) -> None:
        self.wishes.append("continue")

    def request_stop(self, *, now: bool) -> None:
        self.wishes.append(f"stop now={now}")


class Visit:
    """A coordinator's port, and who asks there."""

    def __init__(self, server: FrameServer, asked: Asked) -> None:
        self.endpoint = Endpoint(hosts=("127.0.0.1",), port=server.port, fingerprint=server.fingerprint, token=TOKEN)
        self.asked = asked

    def ask(self, method: str, path: str, *, body: bytes = b"", token: str = TOKEN) -> Answer:
        return request(msgspec.structs.replace(self.endpoint, token=token), method, path, body=body)


@pytest.fixture
def visit() -> Callable[[Callable[[Visit], None]], None]:
    """Runs `test(visit)` in a thread beside the server."""

    def run(test: Callable[[Visit], None]) -> None:
        async def serve() -> None:
            async with asyncio.timeout(60):
                asked, app = Asked(), front_page()
                add_controls(app, asked, TOKEN)
                server = FrameServer(_nobody, app=app)
                await server.start("127.0.0.1")
                try:
                    await asyncio.to_thread(test, Visit(server, asked))
                finally:
                    await server.close()

        asyncio.run(serve())

    return run


async def _nobody(link, _peer) -> None:
    await link.close()


@pytest.mark.parametrize("token", ["another-token-of-that-length", "", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_without_the_token_every_path_is_answered_alike_and_nothing_happens(visit, token):
    def test(visit):
        for method, path in (
            ("GET", "/v1/status"),
            ("POST", "/v1/stop"),
            ("POST", "/v1/pause"),
            ("DELETE", "/v1/stop"),
            ("GET", "/v1/nothing"),
            ("GET", "/../../etc/passwd"),
        ):
            assert visit.ask(method, path, token=token) == Answer(status=401, body=b"")
        assert visit.asked.wishes == []

    visit(test)


def test_the_holder_of_the_token_sees_and_controls_the_run(visit):
    def test(visit):
        answer = visit.ask("GET", "/v1/status")
        assert answer.status == 200
        assert msgspec.json.decode(answer.body, type=RunStatus).step == 3
        for path, body in (
            ("pause", b""),
            ("continue", b""),
            ("stop", b""),
            ("stop", b'{"now": true}'),
        ):
            assert visit.ask("POST", f"/v1/{path}", body=body).status == 200
        wishes = [wish for wish in visit.asked.wishes if wish != "status"]
        assert wishes == ["pause", "continue", "stop now=False", "stop now=True"]

    visit(test)


def test_what_a_run_cannot_do_is_said_in_words(visit):
    def test(visit):
        visit.asked.cannot_pause = "it has not begun to train"
        answer = visit.ask("POST", "/v1/pause")
        assert answer.status == 409
        refusal = msgspec.json.decode(answer.body, type=Refusal)
        assert refusal == Refusal(slug="control-refused", message="it has not begun to train", hint="stop it")

    visit(test)


def test_a_wish_that_is_too_long_or_none_is_refused_and_a_page_of_another_origin_may_read_nothing(visit):
    def test(visit):
        assert visit.ask("POST", "/v1/stop", body=b" " * (MAX_BODY_BYTES + 1)).status == 413
        for body in (b"now", b'{"now": 1}', b'{"now": true, "and": 2}', b"[]"):
            assert visit.ask("POST", "/v1/stop", body=body).status == 400
        assert visit.ask("GET", "/v1/stop").status == 405
        assert visit.ask("OPTIONS", "/v1/stop").status == 405
        assert [wish for wish in visit.asked.wishes if wish != "status"] == []

    visit(test)


def test_anybody_learns_that_a_coordinator_is_here_and_nothing_else(visit):
    def test(visit):
        answer = visit.ask("GET", "/", token="")
        assert (answer.status, answer.body.split()[0]) == (200, b"coterie")
        assert visit.asked.wishes == []

    visit(test)


def test_the_token_is_sent_to_nobody_with_another_certificate(visit):
    def test(visit):
        stranger = msgspec.structs.replace(visit.endpoint, fingerprint="0" * 64)
        with pytest.raises(ControlRefusedError, match=r"this run's is 0{16}…"):
            request(stranger, "GET", "/v1/status")
        assert visit.asked.wishes == []

    visit(test)


def test_where_nobody_listens_the_error_names_port_and_addresses():
    endpoint = Endpoint(hosts=("127.0.0.1", "::1"), port=1, fingerprint="0" * 64, token=TOKEN)
    with pytest.raises(NetworkError, match=r"port 1: 127\.0\.0\.1: .*; ::1: "):
        request(endpoint, "GET", "/v1/status", timeout_s=5)
    assert TOKEN not in repr(endpoint)
