"""The process that hosts one backend: `python -m coterie.backends.child_program NAME THREADS`.

Requests come in over stdin, replies go out over what was stdout; whatever a library prints goes to stderr.
"""

import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import BinaryIO, cast

import msgspec

from coterie.backends.backend import Backend, Loaded, Saved
from coterie.backends.catalog import MODULES
from coterie.backends.child_messages import (
    Arrays,
    Reply,
    Request,
    arrays_to_inputs,
    gradients_to_arrays,
    outputs_to_arrays,
    pack,
    read_bytes,
    view,
    write_message,
)
from coterie.errors import BackendError, CoterieError


class Host:
    """One backend, and what the parent holds of it by number."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._blocks: dict[str, SharedMemory] = {}
        self._held: dict[int, Loaded | Saved] = {}

    def answer(self, request: Request) -> Reply:
        """Do what is asked."""
        for name in request.attach:
            self._blocks[name] = SharedMemory(name=name)
        for number in request.drop:
            # A backward releases its forward by itself, so the number may be gone already.
            if (held := self._held.pop(number, None)) is not None:
                held.release()
        if request.call == "close":
            self._backend.close()
            return Reply()
        memory = self._memory(request.block)
        arrays = {name: view(place, memory) for name, place in request.places.items()}
        result = self._compute(request, arrays)
        return Reply(places=pack(result, self._memory(request.answer)) if result else {})

    def _compute(self, request: Request, arrays: Arrays) -> Arrays:
        if request.call == "load":
            shape = request.attention or request.neurons
            assert shape is not None
            self._held[request.number] = self._backend.load(shape, arrays)
            return {}
        if request.call == "forward":
            loaded = cast("Loaded", self._held[request.loaded])
            inputs = arrays_to_inputs(loaded.shape, arrays, request.keep_scale)
            outputs, saved = self._backend.forward(loaded, inputs, inner=request.inner, keep=request.keep)
            self._held[request.number] = saved
            return outputs_to_arrays(outputs)
        inner = arrays.get("inner_gradient")
        saved = self._held.pop(request.number)
        return gradients_to_arrays(
            self._backend.backward(saved, arrays["gradient"], request.need, inner_gradient=inner)
        )

    def _memory(self, name: str) -> memoryview:
        memory = self._blocks[name].buf
        assert memory is not None
        return memory


def make_backend(name: str, threads: int) -> Backend:
    """The backend of that name; `hosted` of a module is what it makes inside such a process.

    Raises:
        BackendError: There is none.
    """
    family = name.partition(":")[0]
    if family not in MODULES:
        raise BackendError(f"there is no backend {name}", hint=f"known are {', '.join(MODULES)}")
    module = importlib.import_module(MODULES[family])
    candidates: Sequence[Backend] = getattr(module, "hosted", module.probe)(threads)
    for backend in candidates:
        if name in (family, backend.info.name):
            return backend
    raise BackendError(f"this device has no {name}")


def main() -> None:
    """Serve until the parent closes the stream or says so."""
    # Ctrl-C reaches the whole terminal; it is the parent that decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = _own_streams()
    _leave_blocks_to_parent()
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    try:
        backend = make_backend(sys.argv[1], int(sys.argv[2]))
    except Exception as error:  # whatever a foreign library raises: the parent is told, and leaves the backend out
        write_message(replies, Reply(error=_told(error)))
        os._exit(0)
    host = Host(backend)
    write_message(replies, Reply(info=backend.info))
    while True:
        request = msgspec.msgpack.decode(waiting.get(), type=Request)
        try:
            reply = host.answer(request)
        except Exception as error:  # as above
            reply = Reply(error=_told(error))
        write_message(replies, reply)
        if request.call == "close":
            # Arrays may still look into shared memory; the system takes all of it, and nothing complains.
            os._exit(0)


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Streams for messages only: nothing that a library prints or reads can get between them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _leave_blocks_to_parent() -> None:
    """Blocks are the parent's: before Python 3.13 opening one makes this process feel responsible for it too."""
    resource_tracker.register = lambda *_: None


def _read(requests: BinaryIO, waiting: "queue.SimpleQueue[bytes]") -> None:
    """Read in a thread of its own, so that the parent's end ends this process in the middle of whatever it does."""
    while (body := read_bytes(requests)) is not None:
        waiting.put(body)
    os._exit(0)


def _told(error: Exception) -> str:
    if isinstance(error, CoterieError):
        return error.message
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
