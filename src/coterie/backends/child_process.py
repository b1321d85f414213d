"""Any backend in a process of its own: one that holds Python's lock, or may crash, cannot stop a worker."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import msgspec
import numpy.typing as npt

from coterie.backends.backend import BackendInfo, Loaded, Saved
from coterie.backends.checks import check_inputs, check_shape, check_weights, weight_shapes
from coterie.backends.child_blocks import Blocks
from coterie.backends.child_messages import (
    Arrays,
    Reply,
    Request,
    arrays_to_gradients,
    inputs_to_arrays,
    pack,
    packed_bytes,
    read_bytes,
    room_bytes,
    view,
    write_message,
)
from coterie.backends.shares import Array, AttentionShape, Gradients, Inputs, Need, NeuronShape, Outputs, Shape
from coterie.errors import BackendError

START_S = 180.0
CALL_S = 60.0
END_S = 5.0
THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "POCL_MAX_PTHREAD_COUNT",
    "LP_NUM_THREADS",
)


class _Loaded:
    """Weights in a block. They stay until no forward needs them."""

    def __init__(self, host: "ChildProcessBackend", shape: Shape, number: int, block: str) -> None:
        self.shape = shape
        self.number = number
        self.block = block
        self.waiting = 0
        self._host = host
        self._released = False

    def release(self) -> None:
        self._released = True
        self.drop_if_over()

    def drop_if_over(self) -> None:
        """Give the block back once nobody needs it."""
        if self._released and not self.waiting and self.block:
            self._host.drop(self.number, self.block)
            self.block = ""


class _Saved:
    """A forward's inputs in a block, until its backward."""

    def __init__(self, host: "ChildProcessBackend", loaded: _Loaded, number: int, block: str) -> None:
        self.loaded = loaded
        self.number = number
        self.rows_tokens: tuple[int, ...] = ()
        self.added: dict[str, tuple[int, ...]] = {}
        self._host = host
        self._block = block
        loaded.waiting += 1

    def release(self) -> None:
        if self._block:
            self._host.drop(self.number, self._block)
            self._block = ""
            self.loaded.waiting -= 1
            self.loaded.drop_if_over()


class ChildProcessBackend:
    """Starts `name` of the catalog in a process, and calls it over a pipe and shared memory.

    A process that ends, does not answer within `call_s`, or answers what cannot be read is ended, and the call raises
    `BackendError`; so does every call after it.

    Args:
        name: Of the catalog.
        threads: Compute threads that it may take.
        call_s: How long one call may take; the first one of a share's size, which may compile, three times that.
        program: What is started instead of this package's own program.
    """

    def __init__(
        self, name: str, threads: int = 1, *, call_s: float = CALL_S, program: tuple[str, ...] | None = None
    ) -> None:
        self._name = name
        self._call_s = call_s
        self._blocks = Blocks()
        self._dropped: list[int] = []
        self._number = 0
        self._seen: set[tuple[object, ...]] = set()
        self._failure = ""
        self._overdue = False
        command = program or (sys.executable, "-m", "coterie.backends.child_program", name, str(threads))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter with our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **dict.fromkeys(THREAD_SETTINGS, str(threads))},
        )
        try:
            self._info = self._greeted()
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> BackendInfo:
        """What the process said."""
        return self._info

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def _greeted(self) -> BackendInfo:
        hello = self._reply("start", START_S)
        if hello.info is None:
            raise BackendError(hello.error or f"the process of {self._name} did not say where it computes")
        driver = f"{hello.info.driver}, in a process of its own"
        return msgspec.structs.replace(hello.info, driver=driver, weight_copies=1)  # in memory that both share

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> _Loaded:
        """See `Backend.load`; copied into shared memory, once."""
        check_shape(shape)
        check_weights(shape, weights)
        request = Request(
            call="load",
            number=self._next(),
            attention=shape if isinstance(shape, AttentionShape) else None,
            neurons=shape if isinstance(shape, NeuronShape) else None,
        )
        block, _ = self._call(request, dict(weights), {}, first=(shape,))
        return _Loaded(self, shape, request.number, block)

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, _Saved]:
        """See `Backend.forward`; inputs are copied into shared memory once, outputs out of it once."""
        assert isinstance(loaded, _Loaded)
        shape = loaded.shape
        check_inputs(shape, inputs)
        request = Request(
            call="forward",
            number=self._next(),
            loaded=loaded.number,
            keep_scale=getattr(inputs, "keep_scale", 1.0),
            inner=inner,
            keep=keep,
        )
        rows_tokens = inputs.x.shape[:2]
        width = shape.heads * shape.head_dim if isinstance(shape, AttentionShape) else shape.neurons
        room = {"y": (*rows_tokens, shape.output)} | ({"inner": (*rows_tokens, width)} if inner else {})
        block, arrays = self._call(request, inputs_to_arrays(inputs), room, first=(shape, rows_tokens, "forward"))
        saved = _Saved(self, loaded, request.number, block)
        saved.rows_tokens = rows_tokens
        saved.added = {f".{name}": array.shape for name, array in inputs.added.items()}
        if not keep:
            saved.release()
        return Outputs(y=arrays["y"], inner=arrays.get("inner")), saved

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """See `Backend.backward`."""
        assert isinstance(saved, _Saved)
        shape = saved.loaded.shape
        given: Arrays = {"gradient": gradient}
        if inner_gradient is not None:
            given["inner_gradient"] = inner_gradient
        room: dict[str, tuple[int, ...]] = {"x": (*saved.rows_tokens, shape.hidden)} if need.x else {}
        room |= weight_shapes(shape) if need.weights else {}
        room |= saved.added if need.added else {}
        request = Request(call="backward", number=saved.number, need=need)
        block, arrays = self._call(request, given, room, first=(shape, saved.rows_tokens, "backward"))
        self._blocks.give_back(block)
        saved.release()
        return arrays_to_gradients(arrays)

    def trim(self) -> None:
        """What the process keeps is its own matter, and not in this one's memory."""

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.poll() is None and not self._failure:
            with contextlib.suppress(BackendError):  # it is ended below all the same
                self._ask(Request(call="close"), END_S)
        self._failure = self._failure or f"the backend {self._name} is closed"
        self._end()

    def drop(self, number: int, block: str) -> None:
        """Let the process forget something with its next call, and use its block again."""
        if not self._failure:
            self._dropped.append(number)
            self._blocks.give_back(block)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _call(
        self, request: Request, given: Arrays, room: Mapping[str, tuple[int, ...]], *, first: tuple[object, ...]
    ) -> tuple[str, dict[str, Array]]:
        """Make a call with arrays; gives the block of those that were given, which stays taken, and those that came."""
        if self._failure:
            raise BackendError(self._failure)
        taken = [self._blocks.take(packed_bytes(given))]
        try:
            taken.append(self._blocks.take(room_bytes(room)))
            places = pack(given, self._blocks.memory(taken[0]))
            limit_s = self._call_s * (1 if first in self._seen else 3)
            request = msgspec.structs.replace(request, block=taken[0], places=places, answer=taken[1])
            arrays = self._taken_out(self._ask(request, limit_s), room, taken[1])
        except BackendError:
            if not self._failure:
                for block in taken:
                    self._blocks.give_back(block)
            raise
        self._seen.add(first)
        self._blocks.give_back(taken[1])
        return taken[0], arrays

    def _taken_out(self, reply: Reply, room: Mapping[str, tuple[int, ...]], block: str) -> dict[str, Array]:
        """Copies of a reply's arrays: the block is used again by the next call."""
        if reply.error:
            raise BackendError(reply.error)
        got = {name: place.shape for name, place in reply.places.items()}
        if got != dict(room):
            raise self._failed(f"gave {got} where {dict(room)} was asked for")
        memory = self._blocks.memory(block)
        try:
            found: dict[str, npt.NDArray[Any]] = {
                name: view(place, memory).copy() for name, place in reply.places.items()
            }
        except (TypeError, ValueError):  # NumPy: the place is outside the block
            raise self._failed("named places outside its block") from None
        return found

    def _ask(self, request: Request, limit_s: float) -> Reply:
        request = msgspec.structs.replace(request, attach=self._blocks.unopened(), drop=tuple(self._dropped))
        try:
            write_message(cast("BinaryIO", self._process.stdin), request)
        except (OSError, ValueError):
            raise self._failed(f"ended before {request.call}") from None
        self._dropped.clear()
        reply = self._reply(request.call, limit_s)
        self._blocks.opened()
        return reply

    def _reply(self, what: str, limit_s: float) -> Reply:
        watch = threading.Timer(limit_s, self._end_overdue)
        watch.start()
        try:
            body = read_bytes(cast("BinaryIO", self._process.stdout))
            if body is None:
                told = f"did not answer within {limit_s:g} s" if self._overdue else "ended"
                raise self._failed(f"{told} in {what}")
            return msgspec.msgpack.decode(body, type=Reply)
        except (ValueError, msgspec.DecodeError) as error:
            raise self._failed(f"answered what cannot be read in {what} ({error})") from None
        finally:
            watch.cancel()
            watch.join()

    def _end_overdue(self) -> None:
        """Of the watch: with the process its stream ends, which wakes whoever reads it."""
        self._overdue = True
        self._process.kill()

    def _failed(self, what: str) -> BackendError:
        """End the process, and say how it ended."""
        ending = self._how_it_ended() if self._wait(0.5) else ""
        self._process.kill()
        self._failure = f"the process of the backend {self._name} {what}{ending}"
        self._end()
        return BackendError(self._failure, hint="the run goes on without it")

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        try:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except ValueError:
            ended = f"signal {-code}"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f" ({ended}{': ' + lines[-1][:300] if lines else ''})"

    def _wait(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _end(self) -> None:
        """Nothing of it is left: no process, no stream, no shared memory."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not yet written to a process that is gone
                    stream.close()
        if not self._wait(END_S):
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._blocks.close()
