"""A device's free memory, kept for the next launch: no more of it than was once needed at the same time."""

from collections.abc import Callable

from coterie.backends.engine import Buffer

SLACK_BYTES = 2**25
"""Kept beyond that: heads and neurons take turns, with other sizes, and neither's should be made anew each time."""


class BufferPool:
    """Buffers by exact size. What is given back is kept as long as all memory together is not more than it has been.

    Rows are padded to the longest of their micro-batch, so that every other micro-batch has other sizes: whoever is
    used again last goes first.

    Args:
        make: Makes a buffer of so many floats; may raise.
        settle: Waits until no kernel uses what was given back.
    """

    def __init__(self, make: Callable[[int], Buffer], settle: Callable[[], None]) -> None:
        self._make = make
        self._settle = settle
        self._free: dict[int, list[Buffer]] = {}
        self._oldest_first: dict[Buffer, None] = {}
        self._used_bytes = self._free_bytes = self._most_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is kept."""
        return self._free_bytes

    def take(self, n: int) -> Buffer:
        """Memory of n floats, with any contents.

        Raises:
            BackendError: There is none.
        """
        found = self._free.get(n)
        if found:
            buffer = found.pop()
            del self._oldest_first[buffer]
            self._free_bytes -= _bytes(n)
        else:
            self._make_room(_bytes(n))
            buffer = self._make(n)
        self._used_bytes += _bytes(n)
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Give back what was taken here; kernels that were started before may still use it."""
        size = _bytes(buffer.floats)
        self._used_bytes -= size
        self._free.setdefault(buffer.floats, []).append(buffer)
        self._oldest_first[buffer] = None
        self._free_bytes += size
        self._make_room(0)

    def trim(self) -> None:
        """Keep nothing, and forget how much was needed."""
        self._settle()
        self._free.clear()
        self._oldest_first.clear()
        self._free_bytes = 0
        self._most_bytes = self._used_bytes

    def _make_room(self, size: int) -> None:
        limit = max(self._most_bytes, self._used_bytes + size) + SLACK_BYTES
        if self._oldest_first and self._used_bytes + self._free_bytes + size > limit:
            self._settle()
        while self._oldest_first and self._used_bytes + self._free_bytes + size > limit:
            oldest = next(iter(self._oldest_first))
            del self._oldest_first[oldest]
            same = self._free[oldest.floats]
            same.remove(oldest)
            if not same:
                del self._free[oldest.floats]
            self._free_bytes -= _bytes(oldest.floats)


def _bytes(floats: int) -> int:
    return 4 * max(floats, 1)
