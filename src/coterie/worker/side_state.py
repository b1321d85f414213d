"""A server's state on its disk: side network, optimizer and position, whole or absent whenever it is killed."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from coterie.checkpoint.sealed_tensors import DamagedError, read_sealed, write_sealed
from coterie.errors import CheckpointError
from coterie.ids import RunId

STATE_FILE = "side_state.safetensors"


class SideState:
    """The newest state of one run's side network in a server's folder."""

    def __init__(self, folder: Path, run: RunId) -> None:
        self._folder = folder / f"run-{run}"

    def read(self) -> dict[str, Tensor] | None:
        """What was saved last; None if nothing was.

        Raises:
            CheckpointError: It is damaged.
        """
        path = self._folder / STATE_FILE
        if not path.exists():
            return None
        try:
            return read_sealed(path)
        except (OSError, DamagedError) as error:
            raise CheckpointError(
                f"the server's state {path} cannot be read: {error}",
                hint="delete the file: the side network is then trained again from the cache",
            ) from error

    def save(self, state: Mapping[str, Tensor]) -> None:
        """Put a state in the place of the one before.

        Raises:
            StorageError: The disk is full, or the folder cannot be written.
        """
        write_sealed(self._folder / STATE_FILE, state)
