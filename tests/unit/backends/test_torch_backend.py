"""What only torch promises: the caller's arrays are used in place, and its threads are the ones it was given."""

import numpy as np
import pytest
import torch

from coterie.backends.shares import Need, NeuronInputs, NeuronShape
from coterie.backends.torch_backend import TorchBackend

SHAPE = NeuronShape(hidden=8, output=8, neurons=4, biased=False)


def weights() -> dict[str, np.ndarray]:
    return {"w1": np.ones((4, 8), np.float32), "w2": np.ones((8, 4), np.float32)}


def test_weights_are_read_in_place_on_the_processor():
    arrays = weights()
    loaded = TorchBackend().load(SHAPE, arrays)
    assert {name: tensor.data_ptr() for name, tensor in loaded.weights.items()} == {
        name: array.ctypes.data for name, array in arrays.items()
    }


def test_frozen_weights_get_no_gradient_computed(monkeypatch):
    asked = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: asked.append(len(given[1])) or grad(*given))
    backend = TorchBackend()
    _, saved = backend.forward(backend.load(SHAPE, weights()), NeuronInputs(x=np.ones((1, 2, 8), np.float32)))
    backend.backward(saved, np.ones((1, 2, 8), np.float32), Need(weights=False))
    assert asked == [1]


@pytest.mark.parametrize("threads", [1, 2])
def test_it_computes_with_its_own_threads_and_leaves_the_callers(threads, monkeypatch):
    before = torch.get_num_threads()
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *given: seen.append(torch.get_num_threads()) or linear(*given)
    )
    backend = TorchBackend("cpu", threads)
    backend.forward(backend.load(SHAPE, weights()), NeuronInputs(x=np.ones((1, 2, 8), np.float32)))
    assert set(seen) == {threads}
    assert torch.get_num_threads() == before
    assert backend.info.threads == threads
