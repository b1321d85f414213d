"""Counts the bytes that tensors hold while work runs, and what autograd saves; on fake tensors as on real ones."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the only hook below autograd


class SavedBytes:
    """Distinct storages that autograd keeps for a backward, without those that exist anyway (parameters, inputs)."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self._existing = [tensor.untyped_storage() for tensor in existing]
        self._existing_ids = {id(storage) for storage in self._existing}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which to run a forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @property
    def total_bytes(self) -> int:
        """Bytes saved so far."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._existing_ids:
            self._saved[id(storage)] = storage
        return tensor.detach()

    def forget(self) -> None:
        """Let go of the storages, so that a backward frees them as it would without being watched."""
        self._saved.clear()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves __init_subclass__ untyped
    """Bytes of all storages made inside this mode that are still alive, and their peak since `mark`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.now_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def mark(self) -> int:
        """Start a new peak here; returns the bytes alive now."""
        self.peak_bytes = self.now_bytes
        return self.now_bytes

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors' storages, which the caller accounts for, when an operation returns them."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation, then count what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            self._add(storage, storage.nbytes())
        return result

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self.now_bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def _tensors_in(value: object) -> list[Tensor]:
    """All tensors in an operation's result: one, a list or tuple of them, or none."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in cast("Iterable[object]", value) for tensor in _tensors_in(item)]
    return []
