"""All compute backends of a device at work at once: each in its thread, results in a fixed order, failures bypassed."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import thread_time
from typing import Self, TypeVar

import msgspec
import numpy as np

from coterie.backends.backend import Backend, BackendInfo, Loaded, Saved
from coterie.backends.child_process import ChildProcessBackend
from coterie.backends.shares import Array, Gradients, Need, Outputs
from coterie.backends.torch_backend import PROCESSOR, TorchBackend
from coterie.clock import Clock, SystemClock
from coterie.errors import BackendError, CoterieError
from coterie.heads.backend_threads import BackendThreads
from coterie.heads.dealing import joined, part_inner
from coterie.heads.lead import JobTime, Lead
from coterie.heads.part_job import PartJob, inputs_of, shapes_of, weights_of
from coterie.heads.verifying import VERIFY_EVERY, has_only_numbers, is_finite, wrong_gradient, wrong_row
from coterie.logs import get_logger

_T = TypeVar("_T")
_R = TypeVar("_R")
_LOG = get_logger(__name__)


class PartSaved:
    """What a job keeps for its backward, and which row of it is to be verified, if any."""

    def __init__(self, job: PartJob, backend: str, saved: list[Saved]) -> None:
        self.job = job
        self.backend = backend
        self.saved = saved
        self.row: int | None = None

    def release(self) -> None:
        """No backward will come."""
        for one in self.saved:
            one.release()
        self.saved = []


class Usage(msgspec.Struct, kw_only=True):
    """What a backend did so far.

    Attributes:
        busy_s: Seconds in its thread.
        jobs: Forwards and backwards.
    """

    busy_s: float = 0.0
    jobs: int = 0


class BackendPool:
    """Backends of a device, each in a thread of its own from now until `close`; torch on the processor in the caller's.

    A job whose backend fails, or gives numbers that are not finite where torch's are, is repeated in torch at once, and
    the backend gets no more of them. A backend that is wrong but finite is noticed by the verification of every
    `VERIFY_EVERY`th forward and of its backward, and left out too; `on_wrong` can have the whole step done again, since
    what it gave to other layers has gone into it.

    Args:
        backends: All of them; torch on the processor repeats what others fail in, and need not be one of them.
        on_bypass: Told a backend's name and the reason when it is left out, from the thread that uses the pool.

    Attributes:
        on_wrong: Told of a wrong but finite result, when all of a forward or backward have come; may raise.
        usage: What each backend did so far.
        bypassed: Those that are used no more, with the reason.
        hosted: Those that run in processes of their own.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        on_bypass: Callable[[str, str], None] = lambda _name, _reason: None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._backends = {backend.info.name: backend for backend in backends}
        self._infos = tuple(backend.info for backend in backends)
        self._threads = BackendThreads(self._backends)
        self._loaded: dict[str, dict[Hashable, tuple[Hashable, list[Loaded]]]] = {name: {} for name in self._backends}
        self._dropped: dict[str, deque[PartSaved]] = {name: deque() for name in self._backends}
        self._torch = TorchBackend()
        self._on_bypass = on_bypass
        self._clock = clock or SystemClock()
        self._forwards = dict.fromkeys(self._backends, 0)
        self.usage = {name: Usage() for name in self._backends}
        self.hosted = frozenset(one.info.name for one in backends if isinstance(one, ChildProcessBackend))
        self._lead = Lead(self._infos, self.hosted)
        self._times: dict[str, JobTime] = {}
        self.bypassed: dict[str, str] = {}
        self.on_wrong: Callable[[str, str], None] = lambda _name, _reason: None
        self._wrong: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def infos(self) -> tuple[BackendInfo, ...]:
        """The backends, in the order in which shares are dealt out."""
        return self._infos

    @property
    def lead_cpu_s(self) -> float:
        """CPU seconds of the slowest backend in each forward and backward so far, added up (`heads.lead`)."""
        return self._lead.cpu_s

    def call(self, name: str, work: Callable[[Backend], _T]) -> _T:
        """Call `work` with a backend, in its thread, and wait."""
        return self._threads.submit(name, work, self._backends[name]).result()

    def call_together(self, works: Mapping[str, Callable[[Backend], _T]]) -> dict[str, _T]:
        """Call each backend's work, all in their threads at once, and wait; an error when all have ended."""
        calls = [
            (name, partial(self._threads.submit, name, work, self._backends[name])) for name, work in works.items()
        ]
        futures = self._threads.all_of(calls)
        return {name: future.result() for name, future in zip(works, futures, strict=True) if future is not None}

    def beside(self, work: Callable[[], _T]) -> "Future[_T]":
        """Begin other work in a backend's thread, while all are idle: another might not start under a memory limit."""
        return self._threads.beside(work)

    def run_forward(self, jobs: Sequence[PartJob]) -> list[tuple[Outputs, PartSaved]]:
        """Run all jobs at once; results in their order."""
        self._begin()
        waiting = self._submit_all([job.backend for job in jobs], self._forward, jobs, _is_finite_forward)
        try:
            results = [self._forward_result(job, future) for job, future in zip(jobs, waiting, strict=True)]
        except BaseException:  # no failure of a backend, but an error that ends the step: the others' parts go with it
            done = [future for future in waiting if future is not None and future.exception() is None]
            self.drop([future.result()[0][1] for future in done])
            raise
        self._tell_wrong([part for _, part in results])
        return results

    def run_backward(
        self, parts: Sequence[PartSaved], gradient: Array, need: Need, inner_gradients: Sequence[Array | None]
    ) -> list[Gradients]:
        """The backward of each part at once; gradients in the parts' order. Releases them.

        Args:
            parts: Of one `run_forward`.
            gradient: That of the layer's output [B,T,E], the same for all.
            need: Which gradients to give.
            inner_gradients: That of each part's `Outputs.inner`.
        """
        calls = [(part, gradient, need, inner) for part, inner in zip(parts, inner_gradients, strict=True)]
        self._begin()
        waiting = self._submit_all([part.backend for part in parts], self._backward, calls, is_finite)
        results = [self._backward_result(call, future) for call, future in zip(calls, waiting, strict=True)]
        self._tell_wrong()
        return results

    def _tell_wrong(self, parts: Sequence[PartSaved] = ()) -> None:
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            try:
                self.on_wrong(*wrong)
            except CoterieError:
                self.drop(parts)  # nobody will ask for their backward
                raise

    def drop(self, parts: Sequence[PartSaved]) -> None:
        """No backward will come for these. Each is released in its backend's thread, at that backend's next job.

        May be called from anywhere, by a finalizer too: it waits for nothing.
        """
        for part in parts:
            if part.backend != _REPEATED:
                self._dropped[part.backend].append(part)

    def unload(self) -> None:
        """Release all weights, and memory that backends keep: what is computed next are other shares."""
        for name in self._backends:
            self._threads.submit(name, self._unload, name).result()

    def close(self) -> None:
        """End all backends. Idempotent."""
        while self._backends:
            name, backend = self._backends.popitem()
            self._threads.submit(name, self._end, name, backend).result()
            self._threads.end(name)

    def _end(self, name: str, backend: Backend) -> None:
        self._release_dropped(name)
        self._release_loaded(name)
        backend.close()

    def _unload(self, name: str) -> None:
        self._release_dropped(name)
        self._release_loaded(name)
        try:
            self._backends[name].trim()
        except BackendError as error:
            _LOG.warning("%s keeps its memory: %s", name, error.message)

    def _release_loaded(self, name: str) -> None:
        for _, loaded in self._loaded[name].values():
            for one in loaded:
                one.release()
        self._loaded[name].clear()

    def _release_dropped(self, name: str) -> None:
        dropped = self._dropped[name]
        while dropped:
            dropped.popleft().release()

    def _submit_all(
        self,
        names: Sequence[str],
        work: Callable[[Backend, _T], _R],
        arguments: Sequence[_T],
        finite: Callable[[_R], bool],
    ) -> "list[Future[tuple[_R, bool]] | None]":
        """The work of all backends, done; in their order."""
        each = zip(names, arguments, strict=True)
        calls = [(name, partial(self._submit, name, work, argument, finite)) for name, argument in each]
        futures = self._threads.all_of(calls)
        self._lead.end(self._times)
        return futures

    def _submit(
        self, name: str, work: Callable[[Backend, _T], _R], argument: _T, finite: Callable[[_R], bool]
    ) -> "Future[tuple[_R, bool]] | None":
        """The work in a backend's thread, with whether its result is finite; None if it has been left out."""
        backend = self._backends.get(name)
        if backend is None or name in self.bypassed:
            return None

        def timed() -> tuple[_R, bool]:
            start_s, start_cpu_s = self._clock.now(), thread_time()
            try:
                self._release_dropped(name)
                result = work(backend, argument)
                return result, finite(result)  # here, where the others need not wait for it
            finally:
                busy_s = self._clock.now() - start_s
                self._times[name] = JobTime(wall_s=busy_s, cpu_s=thread_time() - start_cpu_s)
                self.usage[name].busy_s += busy_s
                self.usage[name].jobs += 1

        return self._threads.submit(name, timed)

    def _begin(self) -> None:
        self._times = {}
        self._lead.begin()

    def _forward_result(
        self, job: PartJob, future: "Future[tuple[tuple[Outputs, PartSaved], bool]] | None"
    ) -> tuple[Outputs, PartSaved]:
        if future is None:
            return self._forward_in_torch(job)
        try:
            (outputs, part), finite = future.result()
        except BackendError as error:
            self._bypass(job.backend, f"it failed: {error.message}")
            return self._forward_in_torch(job)
        part.row = self._row_to_verify(job)
        wrong = wrong_row(self._torch, job, part.row, outputs) if finite else "it gave numbers that are not finite"
        if not wrong:
            return outputs, part
        self.drop([part])  # memory on a backend is released in its own thread
        right, saved = self._forward_in_torch(job)
        if np.isfinite(right.y).all():
            self._bypass(job.backend, wrong)
            self._wrong = (job.backend, wrong) if finite else self._wrong
        return right, saved

    def _backward_result(
        self, call: tuple[PartSaved, Array, Need, Array | None], future: "Future[tuple[Gradients, bool]] | None"
    ) -> Gradients:
        part = call[0]
        reason, finite = "", False
        if future is not None:
            try:
                grads, finite = future.result()
            except BackendError as error:
                reason = f"it failed: {error.message}"
            else:
                reason = (
                    wrong_gradient(self._torch, part.job, part.row, call[1:], grads)
                    if finite
                    else "a gradient of it is not finite"
                )
                if not reason:
                    return grads
        if part.backend == _REPEATED:
            return self._backward(self._torch, call)
        # Whoever has failed has lost what it kept: once more from the inputs.
        _, again = self._forward_in_torch(part.job)
        grads = self._backward(self._torch, (again, *call[1:]))
        if reason and is_finite(grads):
            self._bypass(part.backend, reason)
            self._wrong = (part.backend, reason) if finite else self._wrong
        return grads

    def _row_to_verify(self, job: PartJob) -> int | None:
        self._forwards[job.backend] += 1
        turn, rest = divmod(self._forwards[job.backend], VERIFY_EVERY)
        return None if rest or job.backend == PROCESSOR else turn % len(job.inputs.x)

    def _bypass(self, name: str, reason: str) -> None:
        if name not in self.bypassed:
            self.bypassed[name] = reason
            _LOG.warning("the backend %s is left out from now on: %s", name, reason)
            self._on_bypass(name, reason)

    def _forward_in_torch(self, job: PartJob) -> tuple[Outputs, PartSaved]:
        loaded = self._torch.load(job.shape, job.weights)
        outputs, saved = self._torch.forward(loaded, job.inputs, inner=job.inner, keep=job.keep)
        return outputs, PartSaved(msgspec.structs.replace(job, strategy="fused"), _REPEATED, [saved])

    def _forward(self, backend: Backend, job: PartJob) -> tuple[Outputs, PartSaved]:
        loaded = self._load(backend, job)
        results = [
            backend.forward(one, inputs, inner=job.inner, keep=job.keep)
            for one, inputs in zip(loaded, inputs_of(job), strict=True)
        ]
        outputs = results[0][0]
        if len(results) > 1:
            y = np.add.reduce([one.y for one, _ in results])
            inner = (
                np.concatenate([one.inner for one, _ in results if one.inner is not None], -1) if job.inner else None
            )
            outputs = Outputs(y=y, inner=inner)
        return outputs, PartSaved(job, job.backend, [saved for _, saved in results])

    def _load(self, backend: Backend, job: PartJob) -> list[Loaded]:
        """The job's weights on its backend: those that are there, if they have not changed."""
        kept = self._loaded[job.backend]
        slot = (job.slot, job.strategy)
        version, loaded = kept.get(slot, (None, []))
        if loaded and version == job.version and loaded[0].shape == shapes_of(job)[0]:
            return loaded
        for one in loaded:
            one.release()
        loaded = [backend.load(shape, weights) for shape, weights in zip(shapes_of(job), weights_of(job), strict=True)]
        kept[slot] = (job.version, loaded)
        return loaded

    @staticmethod
    def _backward(backend: Backend, call: tuple[PartSaved, Array, Need, Array | None]) -> Gradients:
        part, gradient, need, inner = call
        saved, part.saved = part.saved, []
        if len(saved) == 1:
            return backend.backward(saved[0], gradient, need, inner_gradient=inner)
        shape = part.job.shape
        found = []
        for index, one in enumerate(saved):
            own = None if inner is None else part_inner(shape, inner, range(index, index + 1))
            found.append(backend.backward(one, gradient, need, inner_gradient=own))
        xs = [grads.x for grads in found if grads.x is not None]
        return Gradients(
            x=np.add.reduce(xs) if xs else None,
            weights=joined([grads.weights for grads in found]),
            added=joined([grads.added for grads in found]),
        )


_REPEATED = ""
"""In place of a backend's name: computed by the pool's own torch."""


def _is_finite_forward(result: tuple[Outputs, PartSaved]) -> bool:
    return has_only_numbers(result[0].y)
