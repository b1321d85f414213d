"""Several hosts on one machine: a coordinator and workers in processes of their own, joined by links one can spoil."""

import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.carriers import Carrier, RelayCarrier
from testbed.events import wait_for
from testbed.host import Host, HostSettings
from testbed.launching import Launch, Nursery, launch
from testbed.programs import CoordinatorProgram

JOIN_S = 600.0
"""Until all have joined and measured what they can do, on a busy machine."""


class Bed:
    """A coordinator and its hosts. Use it in a `with`; what still runs at the end is ended.

    Args:
        folder: Everything is kept here: each program's log and state.
        carrier: What lies between them; a relay by default.
        nursery: Forks the programs from a process that has imported all, where the carrier lets them run anywhere.
        caches: A folder in which hosts of the same name find what they measured in earlier beds.
    """

    def __init__(
        self,
        folder: Path,
        carrier: Carrier | None = None,
        nursery: Nursery | None = None,
        caches: Path | None = None,
    ) -> None:
        self.folder = folder
        self.carrier = carrier or RelayCarrier()
        self._nursery = nursery
        self._caches = caches
        self.hosts: dict[str, Host] = {}
        self.coordinator: CoordinatorProgram | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, settings: HostSettings) -> Host:
        """One more host; it does not run yet."""
        folder = self.folder / settings.name
        cache = None if self._caches is None else self._caches / settings.name
        line = self.carrier.line(settings.name)
        host = Host(settings, line, folder, self._launch(line.prefix), cache)
        self.hosts[settings.name] = host
        return host

    def begin(self, words: list[str], hosts: Sequence[HostSettings]) -> CoordinatorProgram:
        """Start a run with these hosts: the coordinator, then the workers, which join by its link. Waits for its plan.

        Args:
            words: Flags of `coterie train`; output, host and number of workers are added.
            hosts: Who takes part from the beginning.

        Raises:
            TimeoutError: Somebody ended before, or it took too long.
        """
        self.coordinator = CoordinatorProgram(
            words,
            self.folder / "run",
            host=self.carrier.host,
            workers=len(hosts),
            folder=self.folder / "coordinator",
            launch=self._launch(self.carrier.prefix),
        )
        self.coordinator.start()
        link = self.coordinator.join_link()
        for settings in hosts:
            self.add(settings).start(link)
        events = self.coordinator.events
        programs = (self.coordinator, *self.hosts.values())
        try:
            wait_for(
                "a plan",
                events.stage_workers,
                timeout_s=JOIN_S,
                alive=lambda: all(program.runs for program in programs),
            )
        except TimeoutError as error:
            ended = [program for program in programs if not program.runs]
            last = "; ".join(f"{program.name}: {program.said()[-300:]}" for program in ended)
            raise TimeoutError(f"{error} {last}") from None
        return self.coordinator

    def _launch(self, prefix: tuple[str, ...]) -> Launch:
        if self._nursery is not None and not prefix:
            return self._nursery.launch
        return functools.partial(launch, prefix=prefix)

    def close(self) -> None:
        """End whatever still runs."""
        if self.coordinator is not None:
            self.coordinator.end()
        for host in self.hosts.values():
            host.end()
        self.carrier.close()
