"""One suite for every compute backend that this machine has: all shares, all gradients, against float64."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coterie.backends import torch_backend
from coterie.backends.backend import Backend
from coterie.backends.catalog import MODULES, find_backends
from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.child_process import ChildProcessBackend
from coterie.backends.self_test import relative_error, self_test
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

TOLERANCE = 5e-6
HOSTED = "numpy in a process of its own"
LEAST = float(np.finfo(np.float32).min)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def device_names() -> list[str]:
    """Every kind, of torch all accelerators, and a hosted one; of other kinds the first device stands for all."""
    accelerators = [one.info.name for one in torch_backend.probe(1)[1:]]
    return [*MODULES, *accelerators, HOSTED]


@pytest.fixture(scope="module", params=device_names())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == HOSTED:
        hosted = ChildProcessBackend("numpy")
        yield hosted
        hosted.close()
        return
    try:
        found = find_backends(1, (request.param,))
    except BackendError as error:
        if "computes wrongly" in error.message or "self-test failed" in error.message:
            raise
        pytest.skip(error.message)
    for one in found.backends[1:]:
        one.close()
    yield found.backends[0]
    found.backends[0].close()


def normal(draw: np.random.Generator, *size: int, scale: float = 1.0) -> Array:
    return (draw.standard_normal(size) * scale).astype(np.float32)


def make_weights(shape: Shape, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {name: normal(draw, *size, scale=size[-1] ** -0.5) for name, size in weight_shapes(shape).items()}


def make_added(shape: Shape, rows: int, tokens: int) -> dict[str, Array]:
    draw = np.random.default_rng(9)
    return {name: normal(draw, rows, tokens, width, scale=0.4) for name, width in added_widths(shape).items()}


def attention(heads: int, groups: int, **settings: object) -> AttentionShape:
    defaults: dict[str, object] = {"hidden": 40, "output": 36, "head_dim": 8, "scale": 8**-0.5}
    return AttentionShape(heads=heads, groups=groups, **{**defaults, **settings})  # type: ignore[arg-type]


def padding(rows: int, tokens: int) -> Array:
    bias = np.zeros((rows, 1, 1, tokens), np.float32)
    for row in range(1, rows):
        bias[row, ..., tokens - min(row, tokens - 1) :] = LEAST
    return bias


def causal(tokens: int) -> Array:
    return np.triu(np.full((tokens, tokens), LEAST, np.float32), 1)[None, None]


def alibi(heads: int, tokens: int) -> Array:
    distance = np.arange(tokens, dtype=np.float32)[None] - np.arange(tokens, dtype=np.float32)[:, None]
    slopes = 2.0 ** -np.arange(1, heads + 1, dtype=np.float32)
    return slopes[None, :, None, None] * distance + causal(tokens)


def tables(rows: int, tokens: int, dims: int, rotary: str) -> dict[str, Array]:
    angles = np.random.default_rng(3).uniform(0, 6, (rows, tokens, dims // 2)).astype(np.float32)
    both = np.concatenate([angles, angles], -1) if rotary == "half" else np.repeat(angles, 2, -1)
    return {"cos": np.cos(both), "sin": np.sin(both)}


def keep_mask(rows: int, heads: int, tokens: int) -> dict[str, object]:
    keep = (np.random.default_rng(4).random((rows, heads, tokens, tokens)) > 0.25).astype(np.uint8)
    return {"keep": keep, "keep_scale": 1 / 0.75}


def exact(array: Array) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def turned(x: Tensor, inputs: AttentionInputs, rotary: str) -> Tensor:
    cos, sin = (exact(t)[:, None] for t in (inputs.cos, inputs.sin))
    dims = cos.shape[-1]
    front = x[..., :dims]
    pairs = front.unflatten(-1, (2, -1)).transpose(-1, -2) if rotary == "half" else front.unflatten(-1, (-1, 2))
    rolled = torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
    other = rolled.transpose(-1, -2).flatten(-2) if rotary == "half" else rolled.flatten(-2)
    return torch.cat([front * cos + other * sin, x[..., dims:]], -1)


def right(shape: Shape, weights: dict[str, Array], inputs: Inputs, above: Array, inner_above: Array | None):
    """Outputs and gradients by torch's autograd in float64."""
    leaf = {name: exact(array).requires_grad_() for name, array in weights.items()}
    added = {name: exact(array).requires_grad_() for name, array in inputs.added.items()}
    x = exact(inputs.x).requires_grad_()

    def first(weight: str, bias: str, name: str) -> Tensor:
        return functional.linear(x, leaf[weight], leaf.get(bias)) + added.get(name, 0.0)

    if isinstance(shape, NeuronShape):
        up = first("w1", "b1", "up")
        act = ACTIVATIONS[shape.activation]
        inner = act(first("wg", "bg", "gate")) * up if shape.gated else act(up)
        y = inner @ leaf["w2"].T
    else:
        q, k, v = (
            first(f"w{n}", f"b{n}", n).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for n in ("q", "k", "v")
        )
        if shape.rotary != "none":
            q, k = turned(q, inputs, shape.rotary), turned(k, inputs, shape.rotary)
        each = shape.heads // shape.groups
        scores = q @ k.repeat_interleave(each, 1).mT * shape.scale
        if inputs.bias is not None:
            scores = scores + exact(inputs.bias)
        p = scores.softmax(-1)
        if inputs.keep is not None:
            p = p * torch.from_numpy(inputs.keep) * inputs.keep_scale
        inner = (p @ v.repeat_interleave(each, 1)).transpose(1, 2).flatten(2)
        y = inner @ leaf["wo"].T
    total = (y * torch.from_numpy(above)).sum()
    if inner_above is not None:
        total = total + (inner * torch.from_numpy(inner_above)).sum()
    total.backward()
    grads = Gradients(
        x=x.grad.numpy(),
        weights={name: tensor.grad.numpy() for name, tensor in leaf.items()},
        added={name: tensor.grad.numpy() for name, tensor in added.items()},
    )
    return Outputs(y=y.detach().numpy(), inner=inner.detach().numpy()), grads


def gradients_above(shape: Shape, inputs: Inputs) -> tuple[Array, Array]:
    draw = np.random.default_rng(5)
    rows, tokens = inputs.x.shape[:2]
    width = shape.heads * shape.head_dim if isinstance(shape, AttentionShape) else shape.neurons
    return normal(draw, rows, tokens, shape.output), normal(draw, rows, tokens, width)


def compare(outputs: Outputs, grads: Gradients, expected: tuple[Outputs, Gradients]) -> None:
    good, good_grads = expected
    assert relative_error(outputs.y, good.y) < TOLERANCE
    if outputs.inner is not None:
        assert relative_error(outputs.inner, good.inner) < TOLERANCE
    assert relative_error(grads.x, good_grads.x) < TOLERANCE
    for name, value in good_grads.weights.items():
        beside = good_grads.weights["bq"] if name == "bk" else None  # a softmax takes no notice of it: zero
        if good.y.shape[1] == 1 and name[1] in "qk":  # one key has all the attention, whatever queries and keys are
            beside = good_grads.weights[f"{name[0]}v"]
        assert relative_error(grads.weights[name], value, beside=beside) < TOLERANCE, name
    for name, value in good_grads.added.items():
        assert relative_error(grads.added[name], value) < TOLERANCE, name


def check(backend: Backend, shape: Shape, inputs: Inputs, *, inner: bool = True) -> None:
    weights = make_weights(shape)
    above, inner_above = gradients_above(shape, inputs)
    loaded = backend.load(shape, weights)
    outputs, saved = backend.forward(loaded, inputs, inner=inner)
    assert (outputs.inner is not None) == inner
    chosen = inner_above if inner else None
    grads = backend.backward(saved, above, Need(added=True), inner_gradient=chosen)
    loaded.release()
    compare(outputs, grads, right(shape, weights, inputs, above, chosen))


GATES = ((False, False), (False, True), (True, False), (True, True))
MASKS: dict[str, Callable[[int, int, int], Array | None]] = {
    "no mask": lambda *_: None,
    "padding": lambda rows, _, tokens: padding(rows, tokens),
    "causal": lambda _, __, tokens: causal(tokens),
    "causal and padding": lambda rows, _, tokens: np.minimum(causal(tokens), padding(rows, tokens)),
    "positions by head": lambda _, heads, tokens: alibi(heads, tokens),
}


@pytest.mark.parametrize(
    ("heads", "groups", "mask"),
    [
        *((9, 3, mask) for mask in MASKS),
        # Sizes and masks meet nowhere but where each head has a mask of its own.
        *((*sizes, mask) for sizes in ((3, 3), (14, 2), (4, 1), (1, 1)) for mask in ("padding", "positions by head")),
    ],
)
def test_heads_are_those_of_float64(backend: Backend, heads: int, groups: int, mask: str) -> None:
    x = normal(np.random.default_rng(1), 3, 7, 40)
    check(backend, attention(heads, groups), AttentionInputs(x=x, bias=MASKS[mask](3, heads, 7)))


@pytest.mark.parametrize(("rows", "tokens", "head_dim"), [(1, 1, 8), (2, 33, 24), (1, 65, 4), (5, 16, 64), (2, 3, 20)])
def test_any_sizes(backend: Backend, rows: int, tokens: int, head_dim: int) -> None:
    x = normal(np.random.default_rng(1), rows, tokens, 40)
    shape = attention(2, 1, head_dim=head_dim, scale=0.2, biased=False)
    check(backend, shape, AttentionInputs(x=x, bias=causal(tokens)))


@pytest.mark.parametrize("shared", [True, False], ids=["one table", "a table a row"])
@pytest.mark.parametrize(("rotary", "dims"), [("half", 8), ("half", 4), ("interleaved", 8), ("interleaved", 6)])
def test_positions_turn_queries_and_keys(backend: Backend, rotary: str, dims: int, shared: bool) -> None:
    x = normal(np.random.default_rng(1), 2, 9, 40)
    shape = attention(4, 2, biased=False, rotary=rotary, rotary_dims=dims)
    inputs = AttentionInputs(x=x, bias=causal(9), **tables(1 if shared else 2, 9, dims, rotary))
    check(backend, shape, inputs)


@pytest.mark.parametrize("mask", ["no mask", "causal and padding"])
def test_dropout_keeps_what_the_mask_keeps(backend: Backend, mask: str) -> None:
    x = normal(np.random.default_rng(1), 2, 9, 40)
    check(backend, attention(6, 2), AttentionInputs(x=x, bias=MASKS[mask](2, 6, 9), **keep_mask(2, 6, 9)))


@pytest.mark.parametrize("names", [("q", "k", "v"), ("q", "v"), ("k",)])
def test_what_is_added_to_projections_counts_and_gets_its_gradient(backend: Backend, names: tuple[str, ...]) -> None:
    x = normal(np.random.default_rng(1), 2, 9, 40)
    shape = attention(6, 2, rotary="half", rotary_dims=8)
    added = {name: array for name, array in make_added(shape, 2, 9).items() if name in names}
    check(backend, shape, AttentionInputs(x=x, added=added, **tables(1, 9, 8, "half")))


@pytest.mark.parametrize(
    ("activation", "gated", "biased", "neurons"),
    [
        *((activation, gated, biased, 7) for activation in ACTIVATIONS for gated, biased in GATES),
        *((activation, True, True, neurons) for activation in ("gelu", "silu") for neurons in (1, 64)),
    ],
)
def test_neurons_are_those_of_float64(
    backend: Backend, activation: str, gated: bool, biased: bool, neurons: int
) -> None:
    shape = NeuronShape(
        hidden=40, output=36, neurons=neurons, activation=activation, gated=gated, biased=biased
    )  # fmt: skip
    x = normal(np.random.default_rng(1), 2, 9, 40, scale=2.0)
    check(backend, shape, NeuronInputs(x=x, added=make_added(shape, 2, 9) if biased else {}))


def test_a_token_that_sees_nothing_gives_finite_numbers_and_spoils_no_other(backend: Backend) -> None:
    """The first tokens of a row that is padded on the left, under a causal mask."""
    shape = attention(4, 2)
    bias = np.repeat(causal(9), 2, 0)
    bias[1, ..., :3] = LEAST
    inputs = AttentionInputs(x=normal(np.random.default_rng(1), 2, 9, 40), bias=bias)
    weights = make_weights(shape)
    above, _ = gradients_above(shape, inputs)
    above[1, :3] = 0
    outputs, saved = backend.forward(backend.load(shape, weights), inputs)
    grads = backend.backward(saved, above, Need())
    assert np.isfinite(outputs.y).all()
    good, good_grads = right(shape, weights, inputs, above, None)
    outputs.y[1, :3] = good.y[1, :3]
    compare(outputs, grads, (good, good_grads))


def test_large_numbers_make_no_nan(backend: Backend) -> None:
    for activation in ACTIVATIONS:
        shape = NeuronShape(hidden=40, output=40, neurons=16, activation=activation)
        x = normal(np.random.default_rng(1), 2, 5, 40, scale=1000.0)
        check(backend, shape, NeuronInputs(x=x))


def test_arrays_that_must_not_be_written_to_are_taken(backend: Backend) -> None:
    shape = attention(4, 2)
    bias = np.broadcast_to(causal(5), (2, 1, 5, 5))
    x = normal(np.random.default_rng(1), 2, 5, 40)
    x.flags.writeable = False
    check(backend, shape, AttentionInputs(x=x, bias=bias))


def test_what_goes_into_the_second_product_is_given_only_if_asked_for(backend: Backend) -> None:
    x = normal(np.random.default_rng(1), 2, 9, 40)
    check(backend, attention(2, 2), AttentionInputs(x=x), inner=False)


@pytest.mark.parametrize("need", [Need(weights=False), Need(x=False), Need(x=False, weights=False, added=True)])
def test_only_the_gradients_that_are_needed_are_given(backend: Backend, need: Need) -> None:
    shapes: tuple[Shape, ...] = (attention(4, 2), NeuronShape(hidden=40, output=40, neurons=11, gated=True))
    for shape in shapes:
        x = normal(np.random.default_rng(1), 2, 5, 40)
        added = make_added(shape, 2, 5)
        inputs: Inputs = (
            AttentionInputs(x=x, added=added) if isinstance(shape, AttentionShape) else NeuronInputs(x=x, added=added)
        )
        weights = make_weights(shape)
        above, _ = gradients_above(shape, inputs)
        _, good = right(shape, weights, inputs, above, None)
        _, saved = backend.forward(backend.load(shape, weights), inputs)
        grads = backend.backward(saved, above, need)
        assert (grads.x is not None) == need.x
        assert set(grads.weights) == (set(good.weights) if need.weights else set())
        assert set(grads.added) == (set(good.added) if need.added else set())
        if need.x:
            assert relative_error(grads.x, good.x) < TOLERANCE
        for name in grads.added:
            assert relative_error(grads.added[name], good.added[name]) < TOLERANCE


def test_several_forwards_wait_for_their_backwards_in_any_order_each_with_its_own_weights(backend: Backend) -> None:
    shape = attention(4, 2)
    versions = [make_weights(shape, seed) for seed in (1, 2)]
    loaded = [backend.load(shape, weights) for weights in versions]
    waiting = []
    for index, tokens in enumerate((7, 4, 7, 7)):
        x = normal(np.random.default_rng(index), 2, tokens, 40)
        inputs = AttentionInputs(x=x, bias=causal(tokens))
        outputs, saved = backend.forward(loaded[index % 2], inputs)
        waiting.append((index, inputs, outputs, saved))
    for one in loaded:
        one.release()  # a backward that still needs them keeps them
    waiting.append(waiting.pop(0))
    for index, inputs, outputs, saved in waiting:
        above, _ = gradients_above(shape, inputs)
        grads = backend.backward(saved, above, Need())
        compare(outputs, grads, right(shape, versions[index % 2], inputs, above, None))


def test_a_forward_without_a_backward_gives_its_memory_back(backend: Backend) -> None:
    shape = NeuronShape(hidden=40, output=40, neurons=16)
    loaded = backend.load(shape, make_weights(shape))
    inputs = NeuronInputs(x=normal(np.random.default_rng(1), 2, 5, 40))
    outputs, saved = backend.forward(loaded, inputs, keep=False)
    saved.release()
    saved.release()
    again, saved = backend.forward(loaded, inputs)
    saved.release()
    np.testing.assert_array_equal(again.y, outputs.y)
    loaded.release()
    loaded.release()


def test_the_same_share_gives_the_same_bits(backend: Backend) -> None:
    shape = attention(4, 2)
    inputs = AttentionInputs(x=normal(np.random.default_rng(1), 2, 9, 40), bias=causal(9))
    above, _ = gradients_above(shape, inputs)
    results = []
    for _ in range(2):
        outputs, saved = backend.forward(backend.load(shape, make_weights(shape)), inputs)
        results.append((outputs.y.copy(), backend.backward(saved, above, Need())))
    (y, grads), (other_y, other) = results
    np.testing.assert_array_equal(y, other_y)
    np.testing.assert_array_equal(grads.x, other.x)
    for name, value in grads.weights.items():
        np.testing.assert_array_equal(value, other.weights[name])


def test_what_does_not_belong_to_a_share_is_refused_and_named(backend: Backend) -> None:
    shape = attention(4, 2)
    weights = make_weights(shape)
    with pytest.raises(BackendError, match="bq"):
        backend.load(shape, {name: array for name, array in weights.items() if name != "bq"})
    with pytest.raises(BackendError, match=r"wk .*\(16, 40\)"):
        backend.load(shape, {**weights, "wk": weights["wk"][:8]})
    with pytest.raises(BackendError, match="float32"):
        backend.load(shape, {**weights, "wk": weights["wk"].astype(np.float64)})
    loaded = backend.load(shape, weights)
    x = normal(np.random.default_rng(1), 2, 9, 40)
    for wrong, match in (
        (AttentionInputs(x=x[..., :8]), "40"),
        (AttentionInputs(x=x, bias=np.zeros((2, 3, 1, 9), np.float32)), "bias"),
        (AttentionInputs(x=x, keep=np.ones((2, 4, 9, 8), np.uint8)), "mask"),
        (AttentionInputs(x=x, added={"up": x}), "up"),
        (NeuronInputs(x=x), "AttentionShape"),
    ):
        with pytest.raises(BackendError, match=match):
            backend.forward(loaded, wrong)
    with pytest.raises(BackendError, match="groups"):
        backend.load(attention(4, 3), weights)


def test_the_self_test_passes_and_the_driver_is_named(backend: Backend) -> None:
    assert self_test(backend) < TOLERANCE
    info = backend.info
    assert info.device
    assert info.driver
