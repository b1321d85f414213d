"""The seam between programs and the network: a `Link` carries frames both ways, in order, with back-pressure."""

from typing import Protocol

from coterie.transport.frame import Frame


class Link(Protocol):
    """One ordered, reliable connection. One task sends, one task receives; both live on the link's event loop."""

    async def send(self, frame: Frame) -> None:
        """Queue a frame and wait while more than the queue's limit of bytes is unsent.

        Raises:
            NetworkError: The link is closed or broke.
            ProtocolError: The frame breaks a limit.
        """
        ...

    async def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            NetworkError: The link closed or broke.
            ProtocolError: The peer sent bytes that are no frame, or one over the limits; the link is closed.
        """
        ...

    async def close(self) -> None:
        """Flush what is queued, then close. Idempotent."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the network so far, headers included."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes taken from the network so far, headers included."""
        ...
