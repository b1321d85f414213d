"""What is said over HTTPS beside a run's status: wishes, and why one is not granted."""

import msgspec


class StopWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/stop`."""

    now: bool = False


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an answer that is no status: an error by its slug."""

    slug: str
    message: str
    hint: str = ""
