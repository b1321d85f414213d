"""Who is to have no layers any more, and why: wishes of workers and what their batteries say. No wire, no clock."""

import msgspec

from coterie.ids import WorkerId


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is to be released once its layers are elsewhere; `cause` is a word, `reason` for people."""

    worker: WorkerId
    device_name: str
    cause: str
    reason: str


class Departures:
    """Those that are due, and those that nobody could stand in for: they are asked about again when somebody joins."""

    def __init__(self) -> None:
        self._due: dict[WorkerId, Departure] = {}
        self._refused: dict[WorkerId, Departure] = {}

    @property
    def due(self) -> tuple[Departure, ...]:
        """Not dealt with yet."""
        return tuple(self._due.values())

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Of those that are due."""
        return frozenset(self._due)

    def of(self, worker: WorkerId) -> Departure | None:
        """Why one is to leave, whether it can be spared or not; None: it is not."""
        return self._due.get(worker) or self._refused.get(worker)

    def add(self, departure: Departure) -> bool:
        """A worker is to leave; False if that was known."""
        if departure.worker in self._due or departure.worker in self._refused:
            return False
        self._due[departure.worker] = departure
        return True

    def refuse(self) -> None:
        """Nobody can hold the layers of those that are due: they stay for now."""
        self._refused |= self._due
        self._due = {}

    def somebody_joined(self) -> None:
        """Those that were refused are due again."""
        self._due |= self._refused
        self._refused = {}

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        self._due.pop(worker, None)
        self._refused.pop(worker, None)
