"""The coordinator's answer to a worker that has found the run in the network and was told the token."""

import msgspec
from aiohttp import web

from coterie.coordinator.door import Door
from coterie.transport.pairing import PAIR_PATH, PairRequest, answer_pairing

_MAX_REQUEST_BYTES = 4096


def answer_pairings(app: web.Application, door: Door) -> None:
    """Let an application answer workers that ask whether this coordinator knows their token."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.content.read(_MAX_REQUEST_BYTES)
        try:
            asked = msgspec.json.decode(body, type=PairRequest)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return web.Response(status=400)
        known = answer_pairing(door.told_tokens, door.fingerprint, asked)
        if known is None:
            return web.Response(status=403)
        return web.Response(body=msgspec.json.encode(known), content_type="application/json")

    app.router.add_post(PAIR_PATH, answer)
