"""MNN, an engine made for phones, through its training interface. In a process of its own: it holds Python's lock."""

import importlib.metadata
import importlib.util
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.backends.backend import BackendInfo, Loaded, Saved
from coterie.backends.checks import check_inputs, check_shape, check_weights
from coterie.backends.child_process import ChildProcessBackend
from coterie.backends.shares import Array, Gradients, Inputs, Need, Outputs, Shape
from coterie.errors import BackendError

if TYPE_CHECKING:
    from coterie.backends.mnn_graph import Graph, Sizes

MOST_GRAPHS = 24
"""Kept, those used last: each has the memory of one forward and backward of its size."""


class _Loaded:
    """The caller's arrays, read in place."""

    def __init__(self, shape: Shape, weights: dict[str, Array]) -> None:
        self.shape = shape
        self.weights = weights

    def release(self) -> None:
        """Nothing is held but references."""


class _Saved:
    """Inputs and weights: MNN's backward starts from them again."""

    def __init__(self, loaded: _Loaded, inputs: Inputs) -> None:
        self.loaded = loaded
        self.inputs: Inputs | None = inputs

    def release(self) -> None:
        self.inputs = None


class MnnBackend:
    """MNN in this process. Its wheel computes on the processor whatever device one asks it for, so nothing is asked."""

    def __init__(self, threads: int) -> None:
        from MNN import expr  # noqa: PLC0415 - heavy, and prints

        expr.set_global_executor_config(0, 1, threads)  # the processor, high precision
        expr.lazy_eval(1)
        self._threads = threads
        self._graphs: OrderedDict[tuple[Shape, Sizes], Graph] = OrderedDict()
        self._written: dict[tuple[Shape, Sizes], tuple[_Loaded, Inputs]] = {}

    @property
    def info(self) -> BackendInfo:
        """The processor."""
        driver = f"MNN {importlib.metadata.version('mnn')}"
        return BackendInfo(name="mnn", device="processor", kind="cpu", driver=driver, threads=self._threads)

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> _Loaded:
        """See `Backend.load`."""
        check_shape(shape)
        check_weights(shape, weights)
        return _Loaded(shape, dict(weights))

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, _Saved]:
        """See `Backend.forward`."""
        assert isinstance(loaded, _Loaded)
        check_inputs(loaded.shape, inputs)
        saved = _Saved(loaded, inputs)
        outputs = self._graph(loaded, inputs).outputs(inner=inner)
        if not keep:
            saved.release()
        return outputs, saved

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """See `Backend.backward`."""
        assert isinstance(saved, _Saved)
        assert saved.inputs is not None
        gradients = self._graph(saved.loaded, saved.inputs).gradients(gradient, need, inner_gradient)
        saved.release()
        return gradients

    def trim(self) -> None:
        """Graphs stay: each holds the memory that it computes in, and takes long to make."""

    def close(self) -> None:
        """Its graphs go."""
        self._graphs.clear()
        self._written.clear()

    def _graph(self, loaded: _Loaded, inputs: Inputs) -> "Graph":
        """The graph for inputs of that size, with these inputs and weights written into it."""
        from coterie.backends.mnn_graph import Graph, sizes_of  # noqa: PLC0415 - imports MNN

        key = (loaded.shape, sizes_of(inputs))
        if key not in self._graphs:
            self._graphs[key] = Graph(*key)
            if len(self._graphs) > MOST_GRAPHS:
                oldest, _ = self._graphs.popitem(last=False)
                self._written.pop(oldest, None)
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        weights, micro_batch = self._written.get(key, (None, None))
        if weights is not loaded:
            graph.write_weights(loaded.weights)
        if micro_batch is not inputs:
            graph.write(inputs)
        self._written[key] = (loaded, inputs)
        return graph


def hosted(threads: int) -> tuple[MnnBackend, ...]:
    """What the process that hosts it makes."""
    return (MnnBackend(threads),)


def probe(threads: int) -> tuple[ChildProcessBackend, ...]:
    """MNN in a process of its own.

    Raises:
        BackendError: The package is absent, or its process does not start.
    """
    if importlib.util.find_spec("MNN") is None:
        raise BackendError("the package mnn is not installed", hint="pip install 'coterie[backends]'")
    return (ChildProcessBackend("mnn", threads),)
