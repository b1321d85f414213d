"""Backends that are absent, fail or compute wrongly are left out with the reason, and closed."""

import sys
import types
from collections.abc import Sequence

import numpy as np
import pytest

from coterie.backends import catalog
from coterie.backends.backend import Backend, BackendInfo
from coterie.backends.catalog import find_backends
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.self_test import self_test
from coterie.errors import BackendError


class Variant(NumpyBackend):
    """Of another name, and right, slightly wrong or broken."""

    def __init__(self, name: str, *, factor: float = 1.0, broken: bool = False) -> None:
        super().__init__()
        self._name, self._factor, self._broken = name, factor, broken
        self.closed = False

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(name=self._name, device="a device", kind="gpu", driver="a driver")

    def forward(self, loaded, inputs, **settings):
        if self._broken:
            raise OSError("the device fell off the bus")
        return super().forward(loaded, inputs, **settings)

    def backward(self, saved, gradient, need, **settings):
        return super().backward(saved, gradient * np.float32(self._factor), need, **settings)

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def install(monkeypatch):
    """Makes the catalog consist of these, by name: backends to find, or the error of probing."""

    def replace(kinds: dict[str, Sequence[Backend] | Exception]) -> None:
        modules = {}
        for name, kind in kinds.items():

            def probe(threads: int, kind: Sequence[Backend] | Exception = kind) -> Sequence[Backend]:
                assert threads == 3
                if isinstance(kind, Exception):
                    raise kind
                return kind

            module = types.ModuleType(f"probed_{name}")
            module.probe = probe
            monkeypatch.setitem(sys.modules, module.__name__, module)
            modules[name] = module.__name__
        monkeypatch.setattr(catalog, "MODULES", modules)

    return replace


def test_torch_and_numpy_are_always_there():
    found = find_backends(1, ("torch", "numpy"))
    names = [backend.info.name for backend in found.backends]
    assert (names[0], names[-1]) == ("torch", "numpy")
    assert all(error < 5e-6 for error in found.errors.values())


def test_what_is_absent_wrong_or_broken_is_left_out_with_the_reason_and_closed(install):
    good, wrong, broken = Variant("good"), Variant("wrong", factor=1.001), Variant("broken", broken=True)
    install(
        {
            "none": BackendError("its package is missing", hint="pip install it"),
            "odd": RuntimeError("no display"),
            "good": (good,),
            "wrong": (wrong,),
            "broken": (broken,),
        }
    )
    found = find_backends(3)
    assert found.backends == (good,)
    assert found.absent["none"] == "its package is missing; pip install it"
    assert found.absent["odd"] == "RuntimeError: no display"
    assert found.absent["wrong"] == "it computes wrongly: relative error 1.0e-03 (at most 1e-04)"
    assert found.absent["broken"] == "its self-test failed: OSError: the device fell off the bus"
    assert (good.closed, wrong.closed, broken.closed) == (False, True, True)


def test_a_name_means_all_devices_of_a_kind_or_one_of_them(install):
    devices = [Variant("gpu"), Variant("gpu:1"), Variant("gpu:2")]
    install({"gpu": devices, "other": RuntimeError("never probed")})
    assert find_backends(3, ("gpu:1",)).backends == (devices[1],)
    assert [device.closed for device in devices] == [True, False, True]
    assert len(find_backends(3, ("gpu",)).backends) == 3


def test_a_name_that_is_absent_is_refused_with_its_reason_and_what_was_found_is_closed(install):
    good = Variant("good")
    install({"good": (good,), "none": BackendError("its package is missing")})
    with pytest.raises(BackendError, match="the backend none cannot be used: its package is missing") as caught:
        find_backends(3, ("good", "none"))
    assert "coterie doctor" in caught.value.hint
    assert good.closed
    with pytest.raises(BackendError, match="good:7 cannot be used"):
        find_backends(3, ("good:7",))


def test_a_name_that_nobody_knows_is_refused_with_the_known_ones():
    with pytest.raises(BackendError, match="there is no backend opncl") as caught:
        find_backends(1, ("opncl",))
    assert "torch, numpy" in caught.value.hint


def test_the_self_test_sees_small_mistakes():
    assert self_test(NumpyBackend()) < 5e-6
    assert self_test(NumpyBackend(np.float64)) < 1e-12
    assert 0.9e-4 < self_test(Variant("wrong", factor=1 + 1e-4)) < 1.1e-4
    assert self_test(Variant("wrong", factor=float("nan"))) == float("inf")
