"""A backend's process that dies, hangs or talks nonsense: an error says how, the parent goes on, nothing is left."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from coterie.backends.child_process import ChildProcessBackend
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.self_test import self_test
from coterie.backends.shares import Need, NeuronInputs, NeuronShape
from coterie.errors import BackendError

MEMORY_FILES = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
SHAPE = NeuronShape(hidden=8, output=8, neurons=4, biased=False)
WEIGHTS = {"w1": np.ones((4, 8), np.float32), "w2": np.ones((8, 4), np.float32)}
INPUTS = NeuronInputs(x=np.ones((2, 3, 8), np.float32))
ABOVE = np.ones((2, 3, 8), np.float32)

PRELUDE = """
import os, signal, sys
from coterie.backends.child_messages import Reply, read_bytes, write_message
from coterie.backends.backend import BackendInfo
out = sys.stdout.buffer
def greet(): write_message(out, Reply(info=BackendInfo(name="odd", device="none", kind="cpu", driver="none")))
"""
FAULTY = """
from coterie.backends import child_program, numpy_backend
class Faulty(numpy_backend.NumpyBackend):
    def {method}(self, *args, **kwargs):
        {deed}
numpy_backend.hosted = lambda threads: (Faulty(),)
sys.argv = ["child", "numpy", "1"]
child_program.main()
"""


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PRELUDE + text)


def faulty(method: str, deed: str) -> tuple[str, ...]:
    return program(FAULTY.format(method=method, deed=deed))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No shared memory that has a name, no process, no thread stays behind."""
    before = _memory_files()
    threads = threading.active_count()
    children = {child.pid for child in _children()}
    yield
    assert _memory_files() <= before
    assert {child.pid for child in _children()} <= children
    assert threading.active_count() <= threads


def _memory_files() -> set[str]:
    return {path.name for path in MEMORY_FILES.glob("psm_*")} if MEMORY_FILES.exists() else set()


def _children() -> list[psutil.Process]:
    """Without Python's resource tracker, which stays for as long as this process."""
    found = []
    for child in psutil.Process().children():
        try:
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def step(backend: ChildProcessBackend) -> None:
    _, saved = backend.forward(backend.load(SHAPE, WEIGHTS), INPUTS)
    backend.backward(saved, ABOVE, Need())


def test_a_hosted_backend_gives_the_bits_of_one_that_is_not() -> None:
    here, there = NumpyBackend(), ChildProcessBackend("numpy")
    results = []
    for backend in (here, there):
        outputs, saved = backend.forward(backend.load(SHAPE, WEIGHTS), INPUTS, inner=True)
        results.append((outputs, backend.backward(saved, ABOVE, Need(), inner_gradient=np.ones((2, 3, 4), np.float32))))
    there.close()
    (outputs, grads), (other, other_grads) = results
    np.testing.assert_array_equal(other.y, outputs.y)
    np.testing.assert_array_equal(other.inner, outputs.inner)
    np.testing.assert_array_equal(other_grads.x, grads.x)
    for name, value in grads.weights.items():
        np.testing.assert_array_equal(other_grads.weights[name], value)


@pytest.mark.parametrize("method", ["load", "forward", "backward"])
def test_a_process_that_is_killed_in_the_middle_of_a_call_is_an_error_with_its_signal(method: str) -> None:
    deed = "print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    backend = ChildProcessBackend("numpy", program=faulty(method, deed))
    with pytest.raises(BackendError, match=rf"numpy ended in {method} \(signal SIGKILL: last words\)"):
        step(backend)
    with pytest.raises(BackendError, match="SIGKILL"):
        step(backend)
    backend.close()


def test_forwards_that_wait_for_a_backward_can_be_released_after_the_process_died() -> None:
    backend = ChildProcessBackend("numpy")
    loaded = backend.load(SHAPE, WEIGHTS)
    waiting = [backend.forward(loaded, INPUTS)[1] for _ in range(3)]
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="SIGKILL"):
        backend.backward(waiting[0], ABOVE, Need())
    for saved in waiting:
        saved.release()
    loaded.release()
    backend.close()


def test_an_exit_is_an_error_with_its_code() -> None:
    backend = ChildProcessBackend("numpy", program=faulty("forward", "os._exit(7)"))
    with pytest.raises(BackendError, match=r"ended in forward \(exit code 7\)"):
        step(backend)
    backend.close()


def test_a_process_that_does_not_answer_is_ended_at_its_deadline() -> None:
    backend = ChildProcessBackend("numpy", program=faulty("forward", "signal.pause()"))
    pid, loaded = backend.pid, backend.load(SHAPE, WEIGHTS)
    backend._call_s = 0.1  # from here on: a slow start is no fault
    with pytest.raises(BackendError, match=r"did not answer within 0\.3\d* s in forward"):
        backend.forward(loaded, INPUTS)
    assert not psutil.pid_exists(pid)
    backend.close()


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("out.write(b'Traceback, most recent call last'); out.flush()", "cannot be read"),
        ("out.write(b'\\x03\\0\\0\\0abc'); out.flush()", "cannot be read"),
        ("write_message(out, Reply(places={'y': (0, (2, 3), 'float32')}))", "was asked for"),
        ("write_message(out, Reply(places={'y': (1 << 40, (2, 3, 8), 'float32')}))", "outside its block"),
        ("out.write(b'\\x40\\0\\0\\0ab'); out.flush(); os._exit(0)", "ended in forward"),
    ],
    ids=["text", "no message", "another size", "a place outside", "half a message"],
)
def test_an_answer_that_cannot_be_read_is_an_error(deed: str, told: str) -> None:
    text = f"greet()\nread_bytes(sys.stdin.buffer)\nwrite_message(out, Reply())\nread_bytes(sys.stdin.buffer)\n{deed}\n"
    backend = ChildProcessBackend("odd", program=program(text))
    loaded = backend.load(SHAPE, WEIGHTS)
    with pytest.raises(BackendError, match=told):
        backend.forward(loaded, INPUTS)
    backend.close()


def test_an_error_of_the_backend_is_told_and_the_process_goes_on() -> None:
    deed = "return super().load(*args) if args[0].neurons == 4 else [][0]"
    backend = ChildProcessBackend("numpy", program=faulty("load", deed))
    wide = NeuronShape(hidden=8, output=8, neurons=5, biased=False)
    with pytest.raises(BackendError, match="IndexError"):
        backend.load(wide, {"w1": np.ones((5, 8), np.float32), "w2": np.ones((8, 5), np.float32)})
    step(backend)
    backend.close()


def test_what_a_library_prints_does_not_get_between_messages() -> None:
    deed = "print('x' * 100_000); os.write(1, b'noise'); return super().forward(*args, **kwargs)"
    backend = ChildProcessBackend("numpy", program=faulty("forward", deed))
    step(backend)
    backend.close()


def test_a_backend_that_is_absent_says_why_and_leaves_no_process() -> None:
    with pytest.raises(BackendError, match="there is no backend abacus"):
        ChildProcessBackend("abacus")
    with pytest.raises(BackendError, match=r"ended in start \(exit code 3: no such driver\)"):
        ChildProcessBackend("odd", program=program("print('no such driver', file=sys.stderr); sys.exit(3)"))


def test_closing_twice_is_fine_and_calls_after_it_are_refused() -> None:
    backend = ChildProcessBackend("numpy")
    pid = backend.pid
    step(backend)
    backend.close()
    backend.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(BackendError, match="is closed"):
        step(backend)


def test_blocks_are_used_again() -> None:
    backend = ChildProcessBackend("numpy")
    self_test(backend)
    mapped = len(psutil.Process(backend.pid).memory_maps(grouped=False))
    for _ in range(20):
        loaded = backend.load(SHAPE, WEIGHTS)
        _, saved = backend.forward(loaded, INPUTS)
        backend.backward(saved, ABOVE, Need())
        backend.forward(loaded, INPUTS, keep=False)
        loaded.release()
    assert len(psutil.Process(backend.pid).memory_maps(grouped=False)) <= mapped + 2
    backend.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in the middle of a call"])
def test_a_parent_that_is_killed_takes_the_process_with_it(busy: bool) -> None:
    text = """
from coterie.backends.child_process import ChildProcessBackend
import numpy as np
from coterie.backends.shares import NeuronInputs, NeuronShape
if __name__ == "__main__":
    backend = ChildProcessBackend("numpy", program={program})
    loaded = backend.load(
        NeuronShape(hidden=8, output=8, neurons=4, biased=False),
        {{"w1": np.ones((4, 8), np.float32), "w2": np.ones((8, 4), np.float32)}},
    )
    print(backend.pid, flush=True)
    if {busy}:
        backend.forward(loaded, NeuronInputs(x=np.ones((2, 3, 8), np.float32)))
    sys.stdin.read()
"""
    # In the middle of a call it is the child that kills its parent: nobody has to guess when.
    child = faulty("forward", "os.kill(os.getppid(), signal.SIGKILL); signal.pause()")
    parent = subprocess.Popen(
        (sys.executable, "-c", "import sys\n" + text.format(program=child, busy=busy)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child_process = psutil.Process(int(parent.stdout.readline()))
    if not busy:
        parent.kill()
    assert parent.wait(100) == -signal.SIGKILL
    psutil.wait_procs([child_process], timeout=100)
    assert not child_process.is_running()
    parent.stdout.close()
    parent.stdin.close()
