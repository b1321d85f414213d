"""What the contract cannot see of OpenCL: memory that is used again, forms of the product, arrays read in place."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from coterie.backends.engine import Buffer, Product, View
from coterie.backends.kernel_backend import KernelBackend
from coterie.backends.opencl_backend import OpenCLEngine, probe
from coterie.backends.opencl_forms import Form, candidates
from coterie.backends.product_words import product_words
from coterie.backends.self_test import self_test
from coterie.backends.shares import Array, AttentionInputs, AttentionShape, Need, NeuronInputs, NeuronShape
from coterie.errors import BackendError

FORMS_CPU = candidates(is_cpu=True, native_width=16)
FORMS = [*FORMS_CPU, *candidates(is_cpu=False, native_width=4)]
SHAPE = NeuronShape(hidden=24, output=20, neurons=33)


@pytest.fixture(scope="module")
def device() -> object:
    cl = pytest.importorskip("pyopencl")
    try:
        return cl.get_platforms()[0].get_devices()[0]
    except cl.Error as error:
        pytest.skip(f"no OpenCL device: {error}")


@pytest.fixture
def backend(device: object) -> Iterator[KernelBackend]:
    backend = KernelBackend(OpenCLEngine(device, "opencl", 1, form=Form(panels=True)))
    yield backend
    backend.close()


def weights(seed: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    sizes = {"w1": (33, 24), "b1": (33,), "w2": (20, 33)}
    return {name: draw.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def inputs(seed: int, rows: int = 2) -> NeuronInputs:
    return NeuronInputs(x=np.random.default_rng(seed).standard_normal((rows, 7, 24)).astype(np.float32))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_the_product_computes_the_same(device: object, form: Form) -> None:
    backend = KernelBackend(OpenCLEngine(device, "opencl", 1, form=form))
    assert self_test(backend) < 5e-6
    backend.close()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_all_layouts_fill_whole_panels_and_parts_of_them(device: object, form: Form) -> None:
    engine = OpenCLEngine(device, "opencl", 1, form=form)
    assert engine.form is form  # builds the kernels
    draw = np.random.default_rng(0)
    for rows, columns, inner in ((64, 64, 272), (37, 75, 33), (1, 33, 1), (16, 31, 300)):
        a, b = (draw.standard_normal(sides).astype(np.float32) for sides in ((rows, inner), (inner, columns)))
        for turned_a in (False, True):
            for turned_b in (False, True):
                view_a, view_b = view_of(engine, a, turned=turned_a), view_of(engine, b, turned=turned_b)
                result = engine.take(rows * columns)
                view_c = View(buffer=result, row=columns)
                engine.product(Product(a=view_a, b=view_b, c=view_c, rows=rows, columns=columns, inner=inner))
                expected = a.astype(np.float64) @ b.astype(np.float64)
                np.testing.assert_allclose(engine.read(result, (rows, columns)), expected, atol=1e-4)
    engine.close()


def view_of(engine: OpenCLEngine, matrix: Array, *, turned: bool) -> View:
    """The matrix on the device, row by row or column by column."""
    lies = np.ascontiguousarray(matrix.T if turned else matrix)
    view = View(buffer=engine.load(lies, pack=False), row=lies.shape[1])
    return view.turned if turned else view


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_columns_are_summed_whatever_their_number(device: object, form: Form) -> None:
    engine = OpenCLEngine(device, "opencl", 1, form=form)
    assert engine.form is form
    for columns in (1, 15, 128, 129, 300):
        matrix = np.random.default_rng(columns).standard_normal((9, columns)).astype(np.float32)
        result = engine.take(columns)
        engine.column_sums(engine.load(matrix, pack=False), result, 9, columns)
        np.testing.assert_allclose(engine.read(result, (columns,)), matrix.sum(axis=0, dtype=np.float64), atol=1e-5)
    engine.close()


def test_weights_may_change_after_loading(backend: KernelBackend) -> None:
    arrays = weights(1)
    loaded = backend.load(SHAPE, arrays)
    before, saved = backend.forward(loaded, inputs(2))
    expected = backend.backward(saved, before.y, Need()).x
    for array in arrays.values():
        array[:] = 0
    after, saved = backend.forward(loaded, inputs(2))
    np.testing.assert_array_equal(after.y, before.y)
    np.testing.assert_array_equal(backend.backward(saved, before.y, Need()).x, expected)


def test_a_forward_outlives_the_release_of_its_weights(backend: KernelBackend) -> None:
    loaded = backend.load(SHAPE, weights(1))
    outputs, saved = backend.forward(loaded, inputs(2))
    expected = backend.backward(saved, outputs.y, Need()).x
    _, saved = backend.forward(loaded, inputs(2))
    loaded.release()
    other = backend.load(SHAPE, weights(5))  # would be given the same memory
    backend.forward(other, inputs(6))
    np.testing.assert_array_equal(backend.backward(saved, outputs.y, Need()).x, expected)


def test_memory_is_used_again_at_the_next_step(backend: KernelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = backend.load(SHAPE, weights(1))
    engine = backend._engine
    made: list[int] = []
    assert isinstance(engine, OpenCLEngine)
    make = engine._pool._make

    def counting(n: int) -> Buffer:
        made.append(n)
        return make(n)

    monkeypatch.setattr(engine._pool, "_make", counting)
    counts = []
    for seed in range(3):
        made.clear()
        outputs, saved = backend.forward(loaded, inputs(seed))
        backend.backward(saved, outputs.y, Need())
        counts.append(len(made))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_a_second_backward_of_a_forward_is_refused(backend: KernelBackend) -> None:
    outputs, saved = backend.forward(backend.load(SHAPE, weights(1)), inputs(2))
    backend.backward(saved, outputs.y, Need())
    with pytest.raises(BackendError, match="released"):
        backend.backward(saved, outputs.y, Need())


def test_a_processor_takes_as_many_compute_units_as_it_may(device: object) -> None:
    one = OpenCLEngine(device, "opencl", 1)
    if one.info.kind != "cpu":
        pytest.skip("the device is no processor")
    assert one.info.threads == 1
    assert one.form in FORMS_CPU
    one.close()


def test_a_processor_holds_as_many_copies_of_weights_as_it_says(backend: KernelBackend) -> None:
    if backend.info.kind != "cpu":
        pytest.skip("the device is no processor")
    buffers = backend.load(SHAPE, weights(1)).buffers
    matrices = [buffer for buffer in buffers.values() if buffer.packed]
    assert len(matrices) == 2
    assert all(len(matrix.packed) == backend.info.weight_copies for matrix in matrices)


@pytest.mark.usefixtures("device")
def test_a_platform_that_is_installed_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cl = pytest.importorskip("pyopencl")
    platforms = cl.get_platforms()
    names = [backend.info.name for backend in probe(1)]
    monkeypatch.setattr(cl, "get_platforms", lambda: [*platforms, *platforms])
    assert [backend.info.name for backend in probe(1)] == names


@pytest.mark.usefixtures("device")
def test_a_device_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cl = pytest.importorskip("pyopencl")
    monkeypatch.setattr(cl, "get_platforms", list)
    with pytest.raises(BackendError, match="no device"):
        probe(1)


def test_a_processor_computes_with_no_more_threads_than_it_may(device: object) -> None:
    engine = OpenCLEngine(device, "opencl", 1)
    assert engine.info.threads == 1
    assert engine._queue.device.max_compute_units == 1
    engine.close()


@pytest.mark.parametrize("form", FORMS_CPU, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 32, 77])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 20), (3, 3, 32), (4, 1, 40)])
@pytest.mark.parametrize("share", [0.0, 0.3], ids=["whole", "dropout"])
def test_heads_mixed_in_one_kernel_are_those_of_products(
    device: object, form: Form, tokens: int, heads: int, groups: int, head_dim: int, share: float
) -> None:
    shape = AttentionShape(
        hidden=24, output=20, heads=heads, groups=groups, head_dim=head_dim, scale=head_dim**-0.5, biased=False
    )
    draw = np.random.default_rng(tokens)
    sizes = {"wq": (heads, 24), "wk": (groups, 24), "wv": (groups, 24)}
    weights = {
        name: draw.standard_normal((count * head_dim, width)).astype(np.float32)
        for name, (count, width) in sizes.items()
    } | {"wo": draw.standard_normal((20, heads * head_dim)).astype(np.float32)}
    given = AttentionInputs(
        x=draw.standard_normal((2, tokens, 24)).astype(np.float32),
        bias=draw.standard_normal((2, heads, tokens, tokens)).astype(np.float32),
        keep=(draw.random((2, heads, tokens, tokens)) >= share).astype(np.uint8) if share else None,
        keep_scale=1 / (1 - share),
    )
    gradient = draw.standard_normal((2, tokens, 20)).astype(np.float32)
    found = []
    for mixes in (True, False):
        engine = OpenCLEngine(device, "opencl", 1, form=form)
        assert engine.form is form
        assert engine.mixer is not None
        calls = counted_calls(engine, mixes=mixes)
        backend = KernelBackend(engine)
        outputs, saved = backend.forward(backend.load(shape, weights), given, inner=True)
        found.append((outputs, backend.backward(saved, gradient, Need())))
        assert calls == (["forward", "backward"] if mixes else [])
        backend.close()
    (mixed, mixed_gradients), (right, right_gradients) = found
    np.testing.assert_allclose(mixed.inner, right.inner, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mixed.y, right.y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mixed_gradients.x, right_gradients.x, rtol=1e-4, atol=1e-3)
    for name, array in right_gradients.weights.items():
        np.testing.assert_allclose(mixed_gradients.weights[name], array, rtol=1e-4, atol=1e-3, err_msg=name)


def counted_calls(engine: OpenCLEngine, *, mixes: bool) -> list[str]:
    """The mixer's calls from now on; without `mixes` it finds no room."""
    mixer = engine.mixer
    assert mixer is not None
    if not mixes:
        mixer._local_bytes = 0
    calls: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(mixer, name)

        def call(*args: object, name: str = name, original: Callable[..., None] = original) -> None:
            calls.append(name)
            original(*args)

        setattr(mixer, name, call)
    return calls


def test_strides_beyond_32_bits_are_the_backends_failure_and_not_the_steps() -> None:
    buffer = Buffer(None, 1)
    far = View(buffer=buffer, row=8192, batch=32 * 8192**2, head=8192**2)
    with pytest.raises(BackendError, match="8192 by 8192 for each of 32 heads needs strides beyond"):
        product_words(Product(a=far, b=far, c=far, rows=8192, columns=8192, inner=64, heads=32))
