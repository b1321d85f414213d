"""Where training can go on from: all trained tensors after so many steps, whoever keeps them."""

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

UnitState = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]
"""Parameters by name, and the optimizer's tensors by parameter name and field."""


class TrainedState(Protocol):
    """A checkpoint on disk, or a replica in memory."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def unit_of(self) -> Mapping[str, int]:
        """Name of each trained parameter, to the unit that it belongs to."""
        ...

    def read(self, names: Collection[str]) -> UnitState:
        """The state of the parameters in `names`.

        Raises:
            CheckpointError: A name is not among them.
        """
        ...
