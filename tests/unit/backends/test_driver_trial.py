"""A driver that crashes takes a process of its own with it, and the backend is absent with that reason."""

import pytest

from coterie.backends import catalog, driver_trial
from coterie.backends.catalog import find_backends
from coterie.backends.driver_trial import crash_of
from coterie.errors import BackendError

ENDS = {
    "crashes": "import os, signal\n\ndef probe(threads):\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "hangs": "import time\n\ndef probe(threads):\n    time.sleep(600)\n",
    "is_absent": "from coterie.errors import BackendError\n\ndef probe(threads):\n    raise BackendError('none')\n",
    "works": "def probe(threads):\n    assert threads == 1\n    print('hello')\n    return ()\n",
}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Modules of the catalog that a process of its own can import too."""
    for name, code in ENDS.items():
        (tmp_path / f"driver_that_{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    crash_of.cache_clear()
    return lambda name: f"driver_that_{name}"


def test_a_crash_is_the_reason_why_the_backend_is_absent(driver, monkeypatch):
    monkeypatch.setattr(catalog, "MODULES", {"opencl": driver("crashes"), "numpy": catalog.MODULES["numpy"]})
    found = find_backends(1)
    assert [backend.info.name for backend in found.backends] == ["numpy"]
    assert found.absent["opencl"].startswith("its driver crashed in a trial (signal SIGSEGV)")
    with pytest.raises(BackendError, match="signal SIGSEGV"):
        find_backends(1, ("opencl",))


def test_one_that_hangs_is_not_waited_for(driver, monkeypatch):
    monkeypatch.setattr(driver_trial, "TRIAL_S", 0.2)
    assert crash_of(driver("hangs"), 1) == "its driver did not answer within 0 s"


@pytest.mark.parametrize("name", ["works", "is_absent"])
def test_what_does_not_crash_speaks_for_itself(driver, name, capfd):
    assert crash_of(driver(name), 1) == ""
    assert capfd.readouterr() == ("", "")
