"""Names in a checkpoint and names in memory, by transformers' own conversion.

The two differ for old files, for base-model files under a task's class, and for mixtures of experts, whose experts are
many tensors on disk and one in memory. This is the only module that touches transformers' loading internals.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from coterie.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ReadTensor = Callable[[str], torch.Tensor]


class CheckpointNames:
    """Which file tensors make up each of a model's tensors."""

    def __init__(
        self, model: "PreTrainedModel", keys: Iterable[str], transforms: Sequence[object] | None = None
    ) -> None:
        """Works out the mapping.

        Args:
            model: The whole empty model.
            keys: Every tensor name in the checkpoint.
            transforms: How names and tensors change on their way; by default as for a saved folder of the model.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - heavy
        from transformers.core_model_loading import (  # noqa: PLC0415 - heavy
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self._model = model
        if transforms is None:
            transforms = get_model_conversion_mapping(model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        state = model.state_dict()
        prefix = model.base_model_prefix
        self._converter_of: dict[str, Any] = {p: c for c in converters for p in c.source_patterns}
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        for key in sorted(keys, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target in state:
                self._parts.setdefault(target, []).append((key, pattern))
        self.used = frozenset(key for parts in self._parts.values() for key, _ in parts)
        self._group_of: dict[str, str] = {}
        for target, parts in self._parts.items():
            for name in self._outputs(target, parts):
                self._group_of[name] = target

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds the model's tensor `name`."""
        return name in self._group_of

    def read(self, names: Iterable[str], read: ReadTensor) -> dict[str, torch.Tensor]:
        """The tensors `names` (each must be contained), reading only the files' tensors that make them up."""
        wanted = set(names)
        found: dict[str, torch.Tensor] = {}
        for group in sorted({self._group_of[name] for name in wanted}):
            made = self._convert(group, read)
            found.update({name: tensor for name, tensor in made.items() if name in wanted})
        lost = wanted - found.keys()
        if lost:
            raise ModelError(
                f"the checkpoint's tensors could not be converted to {', '.join(sorted(lost)[:3])}",
                hint="save the model again with a current transformers",
            )
        return found

    def _outputs(self, target: str, parts: list[tuple[str, str | None]]) -> list[str]:
        pattern = parts[0][1]
        if pattern is None:
            return [target]
        patterns = self._converter_of[pattern].target_patterns
        return [target.replace(patterns[0], other) for other in patterns]

    def _convert(self, target: str, read: ReadTensor) -> Mapping[str, torch.Tensor]:
        parts = self._parts[target]
        if parts[0][1] is None:
            return {target: read(parts[-1][0])}
        from copy import deepcopy  # noqa: PLC0415 - beside its one use

        converter = deepcopy(self._converter_of[parts[0][1]])
        for key, pattern in parts:
            converter.add_tensor(target, key, pattern, lambda key=key: read(key))
        made = converter.convert(target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
