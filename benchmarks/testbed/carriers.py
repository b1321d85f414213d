"""What lies between the hosts of a test bed: the seam, and the carrier that needs no root."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from coterie.transport.join_link import JoinLink

Cut = Literal["silent", "closed"]
"""`silent`: half-open, nobody is told. `closed`: connections end and new ones are refused."""

MBIT = 1e6 / 8
"""Bytes a second."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's link can do, in each direction; a rate of 0 is no limit."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0


class Line(Protocol):
    """One host's link to all others.

    Attributes:
        prefix: Words that go before a command so that it runs on this host; none: it can run anywhere.
        direct_links: Whether hosts can reach each other past the coordinator (and are shaped then, too).
    """

    prefix: tuple[str, ...]
    direct_links: bool

    def reach(self, join: JoinLink) -> JoinLink:
        """The coordinator's link as this host has to dial it."""
        ...

    def shape(self, shape: Shape) -> None:
        """Limit the rate, add latency; at once, for connections that stand too."""
        ...

    def cut(self, how: Cut) -> None:
        """Let nothing through any more."""
        ...

    def restore(self) -> None:
        """Mend what `cut` did."""
        ...


class Carrier(Protocol):
    """Makes lines.

    Attributes:
        name: How it is called in tables.
        host: Where the coordinator listens.
        prefix: Words that go before the coordinator's command, as in a line.
    """

    name: str
    host: str
    prefix: tuple[str, ...]

    def line(self, host: str) -> Line:
        """The line of one more host."""
        ...

    def close(self) -> None:
        """Take everything down."""
        ...


class RelayLine:
    """A host that dials the relay where it means to dial the coordinator.

    Hosts share the machine's loopback, on which they would find each other past the relay: they take no direct links,
    so every byte of a host passes its line.
    """

    def __init__(self, relay: "RelayCarrier", name: str) -> None:
        self._relay = relay
        self._name = name
        self.prefix: tuple[str, ...] = ()
        self.direct_links = False

    def reach(self, join: JoinLink) -> JoinLink:
        """See `Line`."""
        answer = self._relay.ask(do="open", line=self._name, target=["127.0.0.1", join.port])
        return msgspec.structs.replace(join, hosts=("127.0.0.1",), port=answer["port"])

    def shape(self, shape: Shape) -> None:
        """See `Line`."""
        self._relay.ask(do="shape", line=self._name, bytes_per_s=shape.bytes_per_s, latency_s=shape.latency_s)

    def cut(self, how: Cut) -> None:
        """See `Line`."""
        self._relay.ask(do="cut", line=self._name, how=how)

    def restore(self) -> None:
        """See `Line`."""
        self._relay.ask(do="restore", line=self._name)

    def moved(self) -> tuple[int, int]:
        """Bytes that went up (from the host) and down so far, encryption included."""
        answer = self._relay.ask(do="moved", line=self._name)
        return answer["up_bytes"], answer["down_bytes"]


class RelayCarrier:
    """Lines through one relay process. Needs nothing from the system."""

    name = "relay"
    host = "127.0.0.1"
    prefix: tuple[str, ...] = ()

    def __init__(self) -> None:
        program = Path(__file__).with_name("relay_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self, host: str) -> RelayLine:
        """See `Carrier`. The coordinator's port is told by `reach`; until then the line leads nowhere."""
        self.ask(do="open", line=host, target=["127.0.0.1", 9])
        return RelayLine(self, host)

    def ask(self, **wish: object) -> dict[str, int]:
        """Have the relay do something; its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the relay process ended, code {self._process.wait()}")
        return msgspec.json.decode(answer, type=dict[str, int])

    def close(self) -> None:
        """See `Carrier`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
