"""A backend over an engine: takes shares, keeps track of whose memory is still needed."""

from collections.abc import Mapping

from coterie.backends.backend import BackendInfo, Loaded, Saved
from coterie.backends.checks import check_inputs, check_shape, check_weights
from coterie.backends.engine import Buffer, Engine
from coterie.backends.launches_attention import SavedHeads, backward_heads, forward_heads
from coterie.backends.launches_neurons import SavedNeurons, backward_neurons, forward_neurons
from coterie.backends.shares import (
    Array,
    AttentionInputs,
    AttentionShape,
    Gradients,
    Inputs,
    Need,
    NeuronInputs,
    NeuronShape,
    Outputs,
    Shape,
)
from coterie.errors import BackendError


class _Weights:
    """A share's weights on the device; freed when released and no forward needs them any more."""

    def __init__(self, engine: Engine, shape: Shape, buffers: dict[str, Buffer]) -> None:
        self._engine = engine
        self._shape = shape
        self.buffers = buffers
        self._users = 0
        self._released = False

    @property
    def shape(self) -> Shape:
        return self._shape

    def release(self) -> None:
        self._released = True
        self._free_if_unused()

    def use(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._released and not self._users:
            for buffer in self.buffers.values():
                self._engine.give(buffer)
            self.buffers = {}


class _Activations:
    """What a forward keeps."""

    def __init__(self, engine: Engine, weights: _Weights, saved: SavedHeads | SavedNeurons) -> None:
        self._engine = engine
        self.weights = weights
        self.saved: SavedHeads | SavedNeurons | None = saved
        weights.use()

    def release(self) -> None:
        if self.saved is not None:
            for buffer in self.saved.buffers():
                self._engine.give(buffer)
            self.saved = None
            self.weights.leave()


class KernelBackend:
    """A backend whose maths are kernels on an engine (see `backend.Backend`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def info(self) -> BackendInfo:
        """Where it runs."""
        return self._engine.info

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> Loaded:
        """Take a share's weights; the arrays may change afterwards."""
        check_shape(shape)
        check_weights(shape, weights)
        buffers = {name: self._engine.load(array) for name, array in weights.items()}
        self._engine.settle()
        return _Weights(self._engine, shape, buffers)

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, Saved]:
        """Compute a share's part of the layer's output."""
        assert isinstance(loaded, _Weights), "weights of another backend"
        check_inputs(loaded.shape, inputs)
        outputs: Outputs
        saved: SavedHeads | SavedNeurons
        match loaded.shape, inputs:
            case AttentionShape() as shape, AttentionInputs():
                outputs, saved = forward_heads(self._engine, shape, loaded.buffers, inputs, inner=inner)
            case NeuronShape() as shape, NeuronInputs():
                outputs, saved = forward_neurons(self._engine, shape, loaded.buffers, inputs, inner=inner)
            case _:
                raise BackendError(f"{self.info.name}: inputs of another kind than the share's weights")
        activations = _Activations(self._engine, loaded, saved)
        if not keep:
            activations.release()
        return outputs, activations

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """Compute gradients; releases `saved`."""
        assert isinstance(saved, _Activations), "a forward of another backend"
        held, loaded = saved.saved, saved.weights
        if held is None:
            raise BackendError(f"{self.info.name}: a backward of a forward that was released")
        gradients = (gradient, inner_gradient)
        try:
            if isinstance(held, SavedHeads):
                assert isinstance(loaded.shape, AttentionShape)
                return backward_heads(self._engine, loaded.shape, loaded.buffers, held, gradients, need=need)
            assert isinstance(loaded.shape, NeuronShape)
            return backward_neurons(self._engine, loaded.shape, loaded.buffers, held, gradients, need=need)
        finally:
            saved.release()

    def trim(self) -> None:
        """Give free memory back to the driver."""
        self._engine.trim()

    def close(self) -> None:
        """Give everything back."""
        self._engine.close()
