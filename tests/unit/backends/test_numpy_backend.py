"""What the contract cannot see of NumPy: threads that nobody gives it, and that take cores all the same."""

import pytest

from coterie.backends.numpy_backend import NumpyBackend
from coterie.planner.head_allocation import allocate
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, ShareTiming


def test_its_threads_are_those_of_its_library(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert NumpyBackend().info.threads == 3
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert NumpyBackend().info.threads == 1


def test_it_is_never_a_third_on_two_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    timings = tuple(ShareTiming(count=count, seconds=float(count), fused_s=float(count)) for count in range(1, 13))
    backends = tuple(
        BackendProfile(name=name, device="processor", attention=timings, threads=threads)
        for name, threads in (("torch", 1), ("opencl", 1), ("numpy", NumpyBackend().info.threads))
    )
    profiles = DeviceBackends(key="k", groups=12, neurons=0, rows=8, tokens=128, backends=backends, cores=2)
    allocation = allocate(profiles).attention
    assert allocation is not None
    assert len(allocation.shares) == 2
    assert [reason for reason in allocation.left_out.values() if "2 cores" in reason]


@pytest.mark.parametrize("value", ["", "all", "0"])
def test_a_setting_that_says_nothing_means_all_cores(monkeypatch, value):
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert NumpyBackend().info.threads == 7
