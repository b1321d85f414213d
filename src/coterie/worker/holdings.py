"""What a worker keeps from one stage to the next: the tensors that training never changes, of the units in both.

And copies of the trained state of its own stage and its neighbour's, see `TrainedCopies`.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from coterie.jobs.model_spec import ModelSpec
from coterie.models.anatomy import describe
from coterie.models.frozen_weights import held_names
from coterie.worker.trained_copies import TrainedCopies


class Holdings:
    """Frozen tensors by name, and the units whose frozen tensors are all here.

    They are the very tensors of the stage that was built with them, so keeping them takes no memory while it stands.
    A matrix that both ends of the model use has one name, and is held once.

    Args:
        copies_folder: For copies of trained state that are too large for memory; None: these are not kept.
    """

    def __init__(self, copies_folder: Path | None = None) -> None:
        self.trained = TrainedCopies(copies_folder)
        self._spec: ModelSpec | None = None
        self._tensors: dict[str, Tensor] = {}
        self.units: frozenset[int] = frozenset()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All that is held."""
        return self._tensors

    def lacking(self, units: Iterable[int]) -> list[int]:
        """Those of some units that are not held."""
        return sorted(set(units) - self.units)

    def keep_only(self, spec: ModelSpec, units: Collection[int]) -> bool:
        """Let go of what is of no use to a stage of these units, or of another model; whether there was such."""
        kept = self.units & set(units) if spec == self._spec else frozenset()
        names = {name for unit in kept for name in frozen_names(spec, unit)}
        before = len(self._tensors)
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}
        self._spec, self.units = spec, kept
        return len(self._tensors) < before

    def hold(self, spec: ModelSpec, units: Iterable[int], tensors: Mapping[str, Tensor]) -> None:
        """Hold the frozen tensors of a stage that has been built, in place of what was held."""
        self._spec, self.units, self._tensors = spec, frozenset(units), dict(tensors)

    def clear(self) -> None:
        """Let go of everything."""
        self.trained.clear()
        self._spec, self.units, self._tensors = None, frozenset(), {}


def wanted_names(spec: ModelSpec, unit: int) -> list[str]:
    """All tensors of a unit that a stage is given, trained or not, as they travel; buffers too."""
    anatomy = describe(spec)
    names = held_names(spec, anatomy.names_in(unit, unit + 1))
    return names + [name for name, owner in anatomy.buffers.items() if owner == unit]


def frozen_names(spec: ModelSpec, unit: int) -> list[str]:
    """Those of them that training never changes."""
    return [name for name in wanted_names(spec, unit) if name not in describe(spec).trainable_names]


def trained_names(spec: ModelSpec, unit: int) -> list[str]:
    """Those that it does."""
    return [name for name in wanted_names(spec, unit) if name in describe(spec).trainable_names]
