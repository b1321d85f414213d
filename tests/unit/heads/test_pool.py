"""Backends at work together: the parts add up to the layer, and whoever fails is replaced at once."""

import itertools
import threading

import numpy as np
import pytest
import torch

from coterie.backends.backend import BackendInfo
from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.self_test import relative_error
from coterie.backends.shares import AttentionInputs, AttentionShape, Gradients, Need, NeuronInputs, NeuronShape
from coterie.backends.torch_backend import TorchBackend
from coterie.errors import BackendError
from coterie.heads.dealing import count_of, joined, part_inner, part_inputs, part_shape, part_weights
from coterie.heads.part_job import PartJob
from coterie.heads.pool import BackendPool, PartSaved
from coterie.heads.verifying import VERIFY_EVERY

ATTENTION = AttentionShape(
    hidden=24, output=20, head_dim=4, heads=12, groups=6, scale=0.5, rotary="half", rotary_dims=4
)
NEURONS = NeuronShape(hidden=24, output=20, neurons=30, gated=True)
ROWS, TOKENS = 3, 7


class Faulty(NumpyBackend):
    """Goes wrong when told to: raises, or gives what it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.threads: set[int] = set()

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(name="faulty", device="processor", kind="cpu", driver="none")

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        self.threads.add(threading.get_ident())
        outputs, saved = super().forward(loaded, inputs, inner=inner, keep=keep)
        if self.fault == "forward":
            raise BackendError("the device is gone")
        if self.fault == "nan":
            outputs.y[0, 0, 0] = np.nan
        if self.fault == "wrong" or (self.fault == "wrong heads" and isinstance(loaded.shape, AttentionShape)):
            outputs.y[:] *= 1.01
        return outputs, saved

    def backward(self, saved, gradient, need, *, inner_gradient=None):
        grads = super().backward(saved, gradient, need, inner_gradient=inner_gradient)
        if self.fault == "wrong gradient":
            grads.x[:] *= 1.01
        if self.fault == "backward":
            raise BackendError("the device is gone")
        if self.fault == "infinite gradient":
            return Gradients(x=grads.x * np.inf, weights=grads.weights, added=grads.added)
        if self.fault == "infinite gradient of a weight":
            next(iter(grads.weights.values()))[:] = np.inf
        return grads


@pytest.fixture
def faulty():
    return Faulty()


@pytest.fixture
def told():
    return []


@pytest.fixture
def pool(faulty, told):
    with BackendPool((TorchBackend(), NumpyBackend(), faulty), lambda *event: told.append(event)) as made:
        yield made


def layer(shape):
    """Weights, inputs, and gradients above of a whole layer."""
    draw = np.random.default_rng(2)

    def normal(*size):
        return draw.standard_normal(size).astype(np.float32)

    weights = {name: normal(*size) * np.float32(0.2) for name, size in weight_shapes(shape).items()}
    added = {name: normal(ROWS, TOKENS, width) for name, width in added_widths(shape).items()}
    x, above = normal(ROWS, TOKENS, 24), normal(ROWS, TOKENS, 20)
    if isinstance(shape, NeuronShape):
        return weights, NeuronInputs(x=x, added=added), above, normal(ROWS, TOKENS, shape.neurons)
    angles = draw.uniform(0, 6, (1, TOKENS, 2)).astype(np.float32)
    tables = np.concatenate([angles, angles], -1)
    keep = (draw.random((ROWS, shape.heads, TOKENS, TOKENS)) > 0.2).astype(np.uint8)
    inputs = AttentionInputs(
        x=x, bias=normal(1, shape.heads, TOKENS, TOKENS), cos=np.cos(tables), sin=np.sin(tables), keep=keep,
        keep_scale=1.25, added=added,
    )  # fmt: skip
    return weights, inputs, above, normal(ROWS, TOKENS, shape.heads * shape.head_dim)


def deal(shape, weights, inputs, counts, *, strategy="fused", version=0):
    jobs, start = [], 0
    for backend, count in counts.items():
        part = range(start, start + count)
        start += count
        jobs.append(
            PartJob(
                backend=backend, shape=part_shape(shape, count), weights=part_weights(shape, weights, part),
                slot=("layer", start), version=version, inputs=part_inputs(shape, inputs, part), strategy=strategy,
                inner=True,
            )
        )  # fmt: skip
    assert start == count_of(shape)
    return jobs


def run(pool, shape, counts, *, strategy="fused", version=0):
    """Everything of a layer, from its parts."""
    weights, inputs, above, inner_above = layer(shape)
    jobs = deal(shape, weights, inputs, counts, strategy=strategy, version=version)
    results = pool.run_forward(jobs)
    edges = np.cumsum([0, *counts.values()])
    inner_gradients = [part_inner(shape, inner_above, range(a, b)) for a, b in itertools.pairwise(edges)]
    grads = pool.run_backward([part for _, part in results], above, Need(added=True), inner_gradients)
    return (
        np.add.reduce([outputs.y for outputs, _ in results]),
        np.concatenate([outputs.inner for outputs, _ in results], -1),
        np.add.reduce([one.x for one in grads]),
        {**joined([one.weights for one in grads]), **joined([one.added for one in grads])},
    )


def whole(shape):
    weights, inputs, above, inner_above = layer(shape)
    oracle = NumpyBackend(np.float64)
    outputs, saved = oracle.forward(oracle.load(shape, weights), inputs, inner=True)
    grads = oracle.backward(saved, above, Need(added=True), inner_gradient=inner_above)
    return outputs.y, outputs.inner, grads.x, {**grads.weights, **grads.added}


def assert_equal(got, expected):
    for one, other in zip(got[:3], expected[:3], strict=True):
        assert relative_error(one, other) < 5e-6
    assert got[3].keys() == expected[3].keys()
    for name, value in expected[3].items():
        beside = expected[3]["bq"] if name == "bk" else None
        assert relative_error(got[3][name], value, beside=beside) < 5e-6, name


@pytest.mark.parametrize("strategy", ["fused", "each"])
@pytest.mark.parametrize("counts", [(6, 0, 0), (0, 6, 0), (3, 3, 0), (1, 2, 3), (4, 1, 1)])
def test_the_parts_of_all_backends_are_the_layers_heads(pool, counts, strategy):
    shares = {name: count for name, count in zip(("torch", "numpy", "faulty"), counts, strict=True) if count}
    assert_equal(run(pool, ATTENTION, shares, strategy=strategy), whole(ATTENTION))


@pytest.mark.parametrize("counts", [(30, 0, 0), (13, 17, 0), (1, 1, 28)])
def test_the_parts_of_all_backends_are_the_layers_neurons(pool, counts):
    shares = {name: count for name, count in zip(("torch", "numpy", "faulty"), counts, strict=True) if count}
    assert_equal(run(pool, NEURONS, shares), whole(NEURONS))


@pytest.mark.parametrize("fault", ["forward", "nan", "backward", "infinite gradient", "infinite gradient of a weight"])
@pytest.mark.parametrize("shape", [ATTENTION, NEURONS], ids=["heads", "neurons"])
def test_a_part_whose_backend_fails_is_repeated_and_the_backend_left_out(pool, faulty, told, shape, fault):
    shares = {"torch": 2, "faulty": count_of(shape) - 2}
    assert_equal(run(pool, shape, shares), whole(shape))
    assert told == []
    faulty.fault = fault
    assert_equal(run(pool, shape, shares), whole(shape))
    ((name, reason),) = told
    assert name == "faulty"
    assert reason in {
        "it failed: the device is gone", "it gave numbers that are not finite", "a gradient of it is not finite"
    }  # fmt: skip
    jobs = pool.usage["faulty"].jobs
    assert_equal(run(pool, shape, shares), whole(shape))
    assert pool.usage["faulty"].jobs == jobs
    assert len(told) == 1


@pytest.mark.parametrize(("fault", "rounds"), [("wrong", 1), ("wrong gradient", 1), ("wrong heads", 2)])
def test_a_backend_that_turns_wrong_is_noticed_within_the_stated_number_of_jobs(pool, faulty, told, fault, rounds):
    faulty.fault = fault
    shares = {"torch": 4, "faulty": 2}
    # Heads and neurons take turns, as in a model; one that is wrong in one of them only is noticed too.
    for _ in range(-(-rounds * VERIFY_EVERY // 2)):
        run(pool, ATTENTION, shares)
        if told:
            break
        run(pool, NEURONS, {"torch": 28, "faulty": 2})
        if told:
            break
    ((name, reason),) = told
    assert name == "faulty"
    assert "1.0e-02 away from torch" in reason
    assert_equal(run(pool, ATTENTION, shares), whole(ATTENTION))


def test_numbers_that_are_not_finite_in_torch_either_are_nobodys_fault(pool, told):
    weights, inputs, _, _ = layer(NEURONS)
    inputs.x[0, 0, 0] = np.nan
    results = pool.run_forward(deal(NEURONS, weights, inputs, {"numpy": 30}))
    assert np.isnan(results[0][0].y).any()
    assert told == []


def test_a_backend_is_used_in_one_thread_which_is_not_ours(pool, faulty):
    for _ in range(3):
        run(pool, ATTENTION, {"torch": 3, "faulty": 3})
    pool.call("faulty", lambda backend: backend.threads.add(threading.get_ident()))
    assert len(faulty.threads) == 1
    assert threading.get_ident() not in faulty.threads


def test_weights_are_sent_again_only_when_they_have_changed(faulty, told):
    loads = []
    faulty.load = lambda shape, weights: loads.append(shape) or NumpyBackend.load(faulty, shape, weights)
    with BackendPool((faulty,), lambda *event: told.append(event)) as pool:
        for version in (0, 0, 1, 1, 2):
            run(pool, ATTENTION, {"faulty": 6}, version=version)
    assert len(loads) == 3


def test_the_threads_begin_with_the_pool_and_other_work_needs_none_of_its_own(faulty):
    before = set(threading.enumerate())
    with BackendPool([faulty]) as pool:
        begun = set(threading.enumerate()) - before
        assert len(begun) == 1, "later an enforced memory limit might leave no room for its stack"
        assert pool.beside(threading.current_thread).result() in begun
        assert pool.call("faulty", lambda _: threading.current_thread()) in begun
        assert set(threading.enumerate()) - before == begun


def test_a_closed_pool_has_no_threads(faulty):
    pool = BackendPool((faulty,))
    run(pool, ATTENTION, {"faulty": 6})
    pool.close()
    pool.close()
    assert not any(thread.name.startswith("faulty") for thread in threading.enumerate())
    assert pool.usage["faulty"].jobs == 2
    assert pool.usage["faulty"].busy_s > 0


def test_torch_on_the_processor_computes_in_the_thread_that_waits_for_the_others(pool, faulty):
    here = threading.get_ident()
    assert pool.call("torch", lambda _: threading.get_ident()) == here
    run(pool, ATTENTION, {"torch": 3, "faulty": 3})
    assert faulty.threads
    assert here not in faulty.threads


def test_others_are_at_work_before_torch_begins(pool):
    begun, waited = threading.Event(), []
    pool.call_together({"torch": lambda _: waited.append(begun.wait(60)), "numpy": lambda _: begun.set()})
    assert waited == [True]


def test_an_error_in_the_callers_thread_comes_when_all_have_ended(pool):
    ended = []

    def fail(_backend):
        raise BackendError("no more")

    with pytest.raises(BackendError, match="no more"):
        pool.call_together({"torch": fail, "numpy": lambda _: ended.append(1)})
    assert ended


def test_an_error_that_ends_the_step_takes_the_other_backends_parts_with_it(pool, faulty, monkeypatch):
    class UnforeseenError(Exception):
        pass

    def fail(*_args, **_kwargs):
        raise UnforeseenError

    kept = []
    numpy_backend = pool._backends["numpy"]
    forward = numpy_backend.forward

    def remembered(*args, **kwargs):
        outputs, saved = forward(*args, **kwargs)
        kept.append(saved)
        return outputs, saved

    monkeypatch.setattr(faulty, "forward", fail)
    monkeypatch.setattr(numpy_backend, "forward", remembered)
    released = []
    monkeypatch.setattr(PartSaved, "release", lambda part: released.extend(part.saved))
    with pytest.raises(UnforeseenError):
        run(pool, NEURONS, {"numpy": 15, "faulty": 15})
    pool.call("numpy", lambda _: pool._release_dropped("numpy"))
    assert kept
    assert released == kept


def test_weights_that_came_within_an_inference_may_be_trained_later(pool):
    with torch.inference_mode():
        first = run(pool, NEURONS, {"torch": 15, "numpy": 15})
    again = run(pool, NEURONS, {"torch": 15, "numpy": 15})
    np.testing.assert_array_equal(first[0], again[0])


def test_what_torch_keeps_is_none_of_the_callers_saved_tensors(pool):
    def forbidden(tensor):
        raise AssertionError(f"the caller's hook was given {tensor.shape}")

    with torch.autograd.graph.saved_tensors_hooks(forbidden, forbidden):
        run(pool, ATTENTION, {"torch": 3, "numpy": 3})


def test_who_closes_a_pool_waits_for_who_computes_in_it(pool):
    begun, end, order = threading.Event(), threading.Event(), []

    def compute(_backend):
        begun.set()
        end.wait(60)
        order.append("computed")

    computing = threading.Thread(target=pool.call, args=("torch", compute))
    computing.start()
    begun.wait(60)
    closing = threading.Thread(target=lambda: (pool.close(), order.append("closed")))
    closing.start()
    closing.join(0.1)
    end.set()
    for thread in (computing, closing):
        thread.join(60)
    assert order == ["computed", "closed"]
