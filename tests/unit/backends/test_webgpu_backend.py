"""What the contract cannot see of WebGPU: limits of buffers and groups."""

from collections.abc import Iterator

import numpy as np
import pytest

from coterie.backends import webgpu_backend
from coterie.backends.kernel_backend import KernelBackend
from coterie.backends.self_test import self_test
from coterie.backends.webgpu_backend import WebGPUEngine, probe
from coterie.errors import BackendError


@pytest.fixture(scope="module")
def backend() -> Iterator[KernelBackend]:
    try:
        found = probe(1)
    except BackendError as error:
        pytest.skip(error.message)
    assert isinstance(found[0], KernelBackend)
    yield found[0]
    for one in found:
        one.close()


def test_more_groups_than_a_dimension_has_are_gone_through_in_strides(
    backend: KernelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webgpu_backend, "_MOST_GROUPS", 2)
    assert self_test(backend) < 5e-6


def test_a_buffer_larger_than_the_device_allows_is_refused_with_its_size(backend: KernelBackend) -> None:
    engine = backend._engine
    assert isinstance(engine, WebGPUEngine)
    with pytest.raises(BackendError, match="bytes in one buffer"):
        engine.take(2**40)


def test_bytes_that_fill_no_whole_number_are_uploaded(backend: KernelBackend) -> None:
    engine = backend._engine
    keep = engine.upload(np.array([1, 0, 1, 1, 0], np.uint8))
    source = engine.upload(np.arange(1, 6, dtype=np.float32))
    target = engine.output((5,))
    engine.drop(source, keep, target, 5, 2.0)
    np.testing.assert_array_equal(engine.download(target, (5,)), [2, 0, 6, 8, 0])
