"""The text by which a run is controlled from another machine: a join link's shape, another scheme, another token.

coterie-control://HOST:PORT/?fp=FINGERPRINT&host=OTHER_HOST#CONTROL_TOKEN
"""

from coterie.errors import UsageError
from coterie.transport.join_link import SCHEME as JOIN_SCHEME
from coterie.transport.join_link import JoinLink
from coterie.transport.pinned_https import Endpoint

SCHEME = "coterie-control"


def control_link(endpoint: Endpoint) -> str:
    """The link as one line; it contains the token."""
    join = JoinLink(
        hosts=endpoint.hosts, port=endpoint.port, fingerprint=endpoint.fingerprint, token=endpoint.token
    ).to_text()
    return SCHEME + join.removeprefix(JOIN_SCHEME)


def parse_control_link(text: str) -> Endpoint:
    """Read a link.

    Raises:
        UsageError: The text is no control link; the message says which part is wrong.
    """
    scheme, colon, rest = text.strip().partition(":")
    hint = "copy the whole line that `coterie status --show-link` prints on the coordinator's machine, in quotes"
    if scheme == JOIN_SCHEME and colon:
        raise UsageError("this is a join link: it lets a device join, and nobody control the run", hint=hint)
    if scheme != SCHEME:
        raise UsageError(f"a control link begins with {SCHEME}://, not {scheme[:20]!r}", hint=hint)
    try:
        join = JoinLink.from_text(f"{JOIN_SCHEME}:{rest}")
    except UsageError as error:
        raise UsageError(error.message.replace("join link", "control link"), hint=hint) from error
    return Endpoint(hosts=join.hosts, port=join.port, fingerprint=join.fingerprint, token=join.token)
