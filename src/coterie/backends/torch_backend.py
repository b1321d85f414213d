"""torch, on the processor or on an accelerator that it knows: its own operators, its own autograd."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from coterie.backends.backend import BackendInfo, Loaded, Saved
from coterie.backends.checks import check_inputs, check_shape, check_weights
from coterie.backends.shares import (
    Activation,
    Array,
    AttentionInputs,
    AttentionShape,
    Gradients,
    Inputs,
    Mask,
    Need,
    NeuronInputs,
    NeuronShape,
    Outputs,
    Rotary,
    Shape,
)
from coterie.errors import BackendError

PROCESSOR = "torch"


class _Loaded:
    """Weights of a share as leaves of graphs; on the processor they are the caller's own arrays."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights

    def release(self) -> None:
        """Graphs that still need them hold them."""
        self.weights = {}


class _Saved:
    """The ends of one forward's graph."""

    def __init__(self, loaded: _Loaded, x: Tensor, added: dict[str, Tensor]) -> None:
        self.weights = dict(loaded.weights)
        self.x = x
        self.added = added
        self.y: Tensor | None = None
        self.inner: Tensor | None = None

    def release(self) -> None:
        self.weights, self.added, self.y, self.inner = {}, {}, None, None


class TorchBackend:
    """One torch device."""

    def __init__(self, device: str = "cpu", threads: int = 1) -> None:
        self._device = torch.device(device)
        self._threads = threads

    @property
    def info(self) -> BackendInfo:
        """The device as torch names it."""
        driver = f"torch {torch.__version__}"
        kind = self._device.type
        if kind == "cpu":
            return BackendInfo(name=PROCESSOR, device="processor", kind="cpu", driver=driver, threads=self._threads)
        name = f"{PROCESSOR}:{self._device}"
        if kind == "cuda":
            return BackendInfo(name=name, device=torch.cuda.get_device_name(self._device), kind="gpu", driver=driver)
        if kind == "xpu":
            return BackendInfo(name=name, device=torch.xpu.get_device_name(self._device), kind="gpu", driver=driver)
        return BackendInfo(name=name, device=kind, kind="gpu", driver=driver)

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> _Loaded:
        """See `Backend.load`."""
        check_shape(shape)
        check_weights(shape, weights)
        with self._at_work():
            return _Loaded(shape, {name: self._leaf(array) for name, array in weights.items()})

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, _Saved]:
        """See `Backend.forward`."""
        assert isinstance(loaded, _Loaded)
        check_inputs(loaded.shape, inputs)
        with self._at_work(), torch.enable_grad() if keep else torch.no_grad():
            x = self._leaf(inputs.x)
            saved = _Saved(loaded, x, {name: self._leaf(array) for name, array in inputs.added.items()})
            if isinstance(inputs, AttentionInputs):
                into = self._attention(loaded, inputs, saved)
                y = functional.linear(into, loaded.weights["wo"])
            else:
                into = self._neurons(loaded, inputs, saved)
                y = functional.linear(into, loaded.weights["w2"])
            outputs = Outputs(y=_array(y), inner=_array(into) if inner else None)
        if keep:
            saved.y, saved.inner = y, into
        return outputs, saved

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """See `Backend.backward`."""
        assert isinstance(saved, _Saved)
        assert saved.y is not None, "a forward that kept nothing has no backward"
        assert saved.inner is not None
        wanted = {
            **({"x": saved.x} if need.x else {}),
            **({f"weight/{name}": weight for name, weight in saved.weights.items()} if need.weights else {}),
            **({f"added/{name}": tensor for name, tensor in saved.added.items()} if need.added else {}),
        }
        with self._at_work():
            ends, above = [saved.y], [self._tensor(gradient)]
            if inner_gradient is not None:
                ends.append(saved.inner)
                above.append(self._tensor(inner_gradient))
            found = torch.autograd.grad(ends, list(wanted.values()), above) if wanted else ()
            arrays = {name: _array(tensor) for name, tensor in zip(wanted, found, strict=True)}
        saved.release()
        return Gradients(
            x=arrays.pop("x", None),
            weights={n.removeprefix("weight/"): a for n, a in arrays.items() if n.startswith("weight/")},
            added={n.removeprefix("added/"): a for n, a in arrays.items() if n.startswith("added/")},
        )

    def trim(self) -> None:
        """An accelerator's cached memory goes back."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """The same: nothing else is held."""
        self.trim()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """With this backend's threads and graphs of its own, whatever the caller is computing.

        An accelerator's failures are the backend's, the processor's are everyone's.
        """
        before = torch.get_num_threads()
        changed = self._device.type == "cpu" and before != self._threads
        if changed:
            torch.set_num_threads(self._threads)
        try:
            # A caller that recomputes drops what its own graph saves; weights outlive an inference in which they came.
            with torch.inference_mode(mode=False), saved_tensors_hooks(_as_it_is, _as_it_is):
                yield
        except RuntimeError as error:
            if self._device.type == "cpu":
                raise
            raise BackendError(f"torch on {self._device}: {error}") from error
        finally:
            if changed:
                torch.set_num_threads(before)

    def _tensor(self, array: Array | Mask) -> Tensor:
        # torch warns of arrays that it must not write to (a broadcast, another process's memory); it gets a copy.
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    def _leaf(self, array: Array) -> Tensor:
        return self._tensor(array).requires_grad_()

    @staticmethod
    def _first(loaded: _Loaded, saved: _Saved, names: tuple[str, str, str]) -> Tensor:
        """One projection [B,T,n] with its bias and what is added to it."""
        weight, bias, added = names
        result = functional.linear(saved.x, loaded.weights[weight], loaded.weights.get(bias))
        return result + saved.added[added] if added in saved.added else result

    def _attention(self, loaded: _Loaded, inputs: AttentionInputs, saved: _Saved) -> Tensor:
        shape = loaded.shape
        assert isinstance(shape, AttentionShape)
        q = _heads(self._first(loaded, saved, ("wq", "bq", "q")), shape.heads)
        k = _heads(self._first(loaded, saved, ("wk", "bk", "k")), shape.groups)
        v = _heads(self._first(loaded, saved, ("wv", "bv", "v")), shape.groups)
        if shape.rotary != "none":
            assert inputs.cos is not None
            assert inputs.sin is not None
            cos, sin = self._tensor(inputs.cos)[:, None], self._tensor(inputs.sin)[:, None]
            q, k = (turn(one, cos, sin, shape.rotary) for one in (q, k))
        each = shape.heads // shape.groups
        if each > 1:
            k, v = (one.repeat_interleave(each, 1) for one in (k, v))
        bias = None if inputs.bias is None else self._tensor(inputs.bias)
        if inputs.keep is None:
            if bias is not None:
                bias = bias.expand(q.shape[0], bias.shape[1], q.shape[2], q.shape[2])
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=shape.scale)
        else:
            scores = q @ k.transpose(-1, -2) * shape.scale
            probabilities = torch.softmax(scores if bias is None else scores + bias, -1)
            mixed = (probabilities * self._tensor(inputs.keep) * inputs.keep_scale) @ v
        return mixed.transpose(1, 2).flatten(2)

    def _neurons(self, loaded: _Loaded, inputs: NeuronInputs, saved: _Saved) -> Tensor:
        del inputs  # all of them are leaves by now
        shape = loaded.shape
        assert isinstance(shape, NeuronShape)
        up = self._first(loaded, saved, ("w1", "b1", "up"))
        if not shape.gated:
            return activate(up, shape.activation)
        return activate(self._first(loaded, saved, ("wg", "bg", "gate")), shape.activation) * up


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().to("cpu").contiguous().numpy()
    return array


def _heads(x: Tensor, count: int) -> Tensor:
    """[B,T,n] as [B,count,T,d]."""
    rows, tokens, width = x.shape
    return x.view(rows, tokens, count, width // count).transpose(1, 2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Turns the first R numbers of the last axis, in pairs."""
    dims = cos.shape[-1]
    front, rest = x[..., :dims], x[..., dims:]
    if rotary == "half":
        one, two = front.chunk(2, -1)
        other = torch.cat([-two, one], -1)
    else:
        other = torch.stack([-front[..., 1::2], front[..., ::2]], -1).flatten(-2)
    turned = front * cos + other * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The function's values."""
    match activation:
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
        case "silu":
            return functional.silu(x)


def probe(threads: int) -> tuple[TorchBackend, ...]:
    """The processor, and every accelerator that this torch sees."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    devices += [f"xpu:{index}" for index in range(torch.xpu.device_count() if torch.xpu.is_available() else 0)]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return (TorchBackend("cpu", threads), *(TorchBackend(device) for device in devices))
