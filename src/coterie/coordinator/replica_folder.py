"""The last replica on disk, from which a run goes on whose coordinator was killed; written in the background."""

import asyncio
from collections.abc import Callable, Mapping

from coterie.checkpoint.durable import remove_folder
from coterie.checkpoint.manifest import Manifest
from coterie.checkpoint.shard_file import Shapes
from coterie.checkpoint.store import CheckpointStore
from coterie.clock import Clock
from coterie.coordinator.replicas import Replica
from coterie.errors import CoterieError
from coterie.logs import get_logger

log = get_logger(__name__)

LEAST_PAUSE_S = 2.0
"""Between two writes, so that a fast run does not wear out its disk."""

PAUSE_PER_WRITE = 20.0
"""A write that takes long is followed by a pause of so many times its length: at most 5 % of a core are spent on it."""


class ReplicaFolder:
    """Writes the newest replica as a checkpoint of its own, hashed and renamed when whole; others are left out.

    Args:
        store: Of the replicas' own folder.
        units: What a replica must hold.
        manifest: What a checkpoint of that step says.
        tell: Told once, when a write fails: the run goes on without.
    """

    def __init__(
        self,
        store: CheckpointStore,
        units: Mapping[int, Shapes],
        manifest: Callable[[int], Manifest],
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._store = store
        self._units = units
        self._manifest = manifest
        self._clock = clock
        self._tell = tell
        self._newest: Replica | None = None
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ended = False

    def offer(self, replica: Replica) -> None:
        """Write it soon, unless a newer one comes before."""
        self._newest = replica
        if self._task is None and not self._ended:
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    def superseded(self, step: int) -> None:
        """A checkpoint of `step` is whole: what is older need not be written any more."""
        if self._newest is not None and self._newest.step <= step:
            self._newest = None

    async def close(self) -> None:
        """Write what is still to be written, at once; nothing is written afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writing is not None:  # a thread that writes cannot be stopped
            await self._writing
        if not self._ended:
            await self._write()
        self._ended = True

    def remove(self) -> None:
        """The run is finished: its model is saved, and nobody goes on from here."""
        remove_folder(self._store.folder)

    async def _write_all(self) -> None:
        while self._newest is not None and not self._ended:
            start_s = self._clock.now()
            self._writing = asyncio.get_running_loop().create_task(self._write())
            await asyncio.shield(self._writing)
            self._writing = None
            took_s = self._clock.now() - start_s
            await asyncio.sleep(max(LEAST_PAUSE_S, PAUSE_PER_WRITE * took_s))
        self._task = None

    async def _write(self) -> None:
        replica, self._newest = self._newest, None
        if replica is None:
            return
        manifest = self._manifest(replica.step)
        try:
            await asyncio.to_thread(self._write_now, replica, manifest)
        except CoterieError as error:  # such as a full disk: what a replica is for has not happened yet
            self._ended = True
            log.warning("no replica is kept on disk: %s", error.message)
            self._tell(f"replicas are kept in memory only from here on: {error.message}")

    def _write_now(self, replica: Replica, manifest: Manifest) -> None:
        with self._store.begin(replica.step, self._units) as writer:
            for unit, (parameters, state) in replica.units.items():
                writer.write_unit(unit, parameters, state)
            writer.commit(manifest)
