"""A checkpoint as a source of weights: what was trained comes from its shards, the rest from the model folder."""

from collections.abc import Iterable

import torch

from coterie.checkpoint.reading import Checkpoint
from coterie.jobs.model_spec import ModelSpec
from coterie.models.anatomy import describe
from coterie.models.weights import WeightStore


class CheckpointWeights:
    """A `WeightStore` for building any stage, or the whole model, as it was when the checkpoint was written."""

    def __init__(self, checkpoint: Checkpoint, base: WeightStore) -> None:
        self._checkpoint = checkpoint
        self._base = base
        self._in_shards = frozenset(checkpoint.manifest.unit_of)

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of `names`, reading nothing else.

        Raises:
            ModelError: The model folder does not hold one that the checkpoint does not hold either.
        """
        wanted = list(names)
        found = self._checkpoint.parameters([name for name in wanted if name in self._in_shards])
        rest = [name for name in wanted if name not in self._in_shards]
        if rest:
            found.update(self._base.get(rest))
        return found


def unit_shapes(spec: ModelSpec, *, everything: bool = False) -> dict[int, dict[str, tuple[int, ...]]]:
    """What a checkpoint of this model must hold, for `CheckpointStore.begin`: per unit its parameters' shapes.

    Args:
        spec: The model.
        everything: Parameters that are not trained too, so that the model folder is not needed to go on.
    """
    anatomy = describe(spec)
    units: dict[int, dict[str, tuple[int, ...]]] = {}
    for unit, trained in enumerate(anatomy.trainable):
        names = [name for name, owner in anatomy.unit_of.items() if owner == unit] if everything else trained
        units[unit] = {name: anatomy.shapes[name] for name in names}
    return units
