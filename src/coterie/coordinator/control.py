"""What a coordinator answers over HTTPS beside the frames: a run's status, and what its owner asks of it.

Everything but `/` and pairing needs the control token as a bearer token; without it the answer is 401 and nothing
else, whether the path exists or not. No answer may be read by a web page of another origin: there is no CORS header,
and no cookie.
"""

import hashlib
import hmac
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coterie import __version__
from coterie.cluster.control_messages import Refusal, StopWish
from coterie.errors import CoterieError
from coterie.logs import get_logger
from coterie.metrics.status import RunStatus
from coterie.transport.pairing import PAIR_PATH

log = get_logger(__name__)

MAX_BODY_BYTES = 1024
"""Of a request: nothing longer than `{"now": true}` is expected."""


class Controls(Protocol):
    """What may be asked of a run, from the event loop's thread. Each answers at once; the run follows when it can."""

    def status(self) -> RunStatus:
        """The run now."""
        ...

    def pause(self) -> None:
        """Rest; raises `ControlRefusedError` if this run cannot."""
        ...

    def go_on(self) -> None:
        """Go on after a pause."""
        ...

    def request_stop(self, *, now: bool) -> None:
        """End with a checkpoint, or at once."""
        ...


def front_page() -> web.Application:
    """What a browser sees at the port: that this is a coordinator, and nothing about the run."""

    async def front(_request: web.Request) -> web.Response:
        return web.Response(text=f"coterie {__version__} coordinator\n")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/", front)
    app.on_response_prepare.append(_say_little)
    return app


def add_controls(app: web.Application, controls: Controls, token: str) -> None:
    """Let whoever has `token` control the run; before the port is opened."""

    async def status(_request: web.Request) -> web.Response:
        return _json(controls.status())

    async def pause(_request: web.Request) -> web.Response:
        controls.pause()
        return _json(controls.status())

    async def go_on(_request: web.Request) -> web.Response:
        controls.go_on()
        return _json(controls.status())

    async def stop(request: web.Request) -> web.Response:
        wish = await _stop_wish(request)
        controls.request_stop(now=wish.now)
        return _json(controls.status())

    app.middlewares.append(_guard(token))
    app.middlewares.append(_tell_refusals)
    app.router.add_get("/v1/status", status)
    for name, handler in {"pause": pause, "continue": go_on, "stop": stop}.items():
        app.router.add_post(f"/v1/{name}", handler)


def _guard(token: str) -> Middleware:
    """Lets nobody past without the token; digests are compared, so that neither content nor length takes longer."""
    expected = _digest(f"Bearer {token}")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in ("/", PAIR_PATH):  # for workers that cannot join yet
            return await handler(request)
        shown = _digest(request.headers.get("Authorization", ""))
        if not hmac.compare_digest(shown, expected):
            log.info("a request from %s had no right to ask", request.remote)
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guard


@web.middleware
async def _tell_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a run cannot do is said in words, to whoever may ask."""
    try:
        return await handler(request)
    except CoterieError as error:
        refusal = Refusal(slug=error.slug, message=error.message, hint=error.hint)
        return _json(refusal, status=409)


async def _stop_wish(request: web.Request) -> StopWish:
    body = await request.read()  # more than `client_max_size` is refused by aiohttp
    if not body:
        return StopWish()
    try:
        return msgspec.json.decode(body, type=StopWish)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"{error}\n") from error


async def _say_little(_request: web.Request, response: web.StreamResponse) -> None:
    """Which versions of which libraries answer is nobody's business; and no browser keeps or shows what it gets."""
    response.headers["Server"] = "coterie"
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


def _json(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
