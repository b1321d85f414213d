"""The server of a side-tuning run: keeps activations, trains the side network on them, predicts from it."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from coterie.clock import SystemClock
from coterie.cluster.message import Message
from coterie.cluster.messages import (
    PARAMETER,
    PREDICTIONS,
    STATE,
    MicroBatchDone,
    RunSegment,
    SaveState,
    StateSent,
    StepDone,
    UnitBody,
    control,
    pack,
    unpack,
)
from coterie.cluster.side_messages import (
    COUNTS_TENSOR,
    ORDER,
    PLAN_VERSION,
    PREDICTIONS_TENSOR,
    SAMPLES_TENSOR,
    AssignServer,
    BatchStored,
    EvaluateSide,
    GoAlone,
    OrderBody,
    ServerReady,
    SideEvaluated,
)
from coterie.errors import CoterieError, ProtocolError
from coterie.ids import COORDINATOR, WorkerId
from coterie.measure.budget import memory_budget
from coterie.measure.device_profile import idle_bytes
from coterie.measure.process_memory import peak_rss_bytes, reset_peak
from coterie.models.weights import MappingWeights
from coterie.pipeline.compute import computing
from coterie.pipeline.throttle import Throttle, finish_of
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.cache_layout import NO_QUOTA_BYTES, CacheLayout
from coterie.sidetuning.side_model import SideModel, build_side_model
from coterie.sidetuning.trainer import SideTrainer
from coterie.tasks.catalog import get_task
from coterie.tensors.codecs import decode, encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.worker.last_words import explained
from coterie.worker.outbox import Outbox
from coterie.worker.settings import WorkerSettings
from coterie.worker.side_folders import cache_folder
from coterie.worker.side_intake import Intake
from coterie.worker.side_state import SideState

Job = RunSegment | EvaluateSide | SaveState | GoAlone

_ROWS_AT_ONCE = 32
_WIDE_OUTPUT = 4096
"""With more logits a token than this (a vocabulary), rows are predicted one by one."""


class _EndedError(Exception):
    """The thread is to end."""


class SideServer:
    """Trains in a thread of its own; whatever arrives meanwhile waits until it next needs something.

    Jobs are done in order. A step waits until all its rows are there, so that collecting and replaying are the same.

    Args:
        on_failure: Called once, from the thread, with what ended it.
        on_alone: Called once, from the thread, when everything is done that the coordinator left it with.
    """

    def __init__(
        self,
        worker: WorkerId,
        assign: AssignServer,
        settings: WorkerSettings,
        outbox: Outbox,
        *,
        on_failure: Callable[[CoterieError], None],
        on_alone: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._assign = assign
        self._settings = settings
        self._outbox = outbox
        self._on_failure = on_failure
        self._on_alone = on_alone
        self._arrived: queue.SimpleQueue[Job | Frame | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._order: dict[int, tuple[Sequence[int], int]] = {}
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._clock = SystemClock()
        self._task = get_task(assign.task)
        self._throttle = Throttle(settings.full_speed, finish=finish_of(settings.device_type))
        self._is_ending = False
        self._saved_steps = 0
        self.is_alone = False
        """Nobody listens any more: nothing is reported."""

    def set_speed(self, speed: float) -> None:
        """Compute at this share of a core's speed from the next step on."""
        self._throttle.speed = speed

    def build(self, tensors: Mapping[str, Tensor]) -> Frame:
        """Make the side network and open the cache; runs in a helper thread. What the coordinator is told then.

        Raises:
            CoterieError: The weights are not those of the output layer, or the cache is for something else.
        """
        assign, folder = self._assign, self._settings.cache_folder
        parameters = {name.removeprefix(PARAMETER): tensor for name, tensor in tensors.items()}
        with computing("the server"):
            model = build_side_model(
                assign.spec, assign.side, MappingWeights(parameters), device=self._settings.device_type
            )
        # Measured now: what building imports stays. What it built is counted elsewhere.
        self._idle_bytes = idle_bytes("cpu") - (model.held_bytes if self._settings.device_type == "cpu" else 0)
        self._trainer = SideTrainer(model, self._task, assign.optimizer)
        keeps = assign.cache == "disk" and folder is not None
        self._state = SideState(folder, assign.run) if keeps and folder is not None else None
        saved = self._state.read() if self._state is not None else None
        if saved is not None:
            self._trainer.load_state(saved)
        self._saved_steps = self._trainer.steps
        layout = CacheLayout(
            layers=assign.layers, width=assign.width, dtype=assign.side.upload, key=dict(assign.cache_key)
        )
        place = cache_folder(folder, layout) if keeps and folder is not None and assign.side.two_phases else None
        self._cache = ActivationCache.open(place, layout, assign.quota_bytes or self._usual_quota(place))
        try:
            self._intake = Intake(assign, self._cache)
            self._cache.require_room(self._intake.lacking_tokens, beside_bytes=self._state_bytes(model))
        except CoterieError:
            self._cache.close()
            raise
        reset_peak()
        self._thread.start()
        return self._ready()

    def _state_bytes(self, model: SideModel) -> int:
        """What the state takes on the disk: a new one is written beside the one before."""
        if self._state is None:
            return 0
        parameters = sum(parameter.nbytes for parameter in model.parameters().values())
        written = 1 if self._saved_steps else 2
        return written * parameters * (1 + self._assign.optimizer.state_copies)

    def _usual_quota(self, place: Path | None) -> int:
        """In memory, half of what the worker may use; on a disk, whatever there is room for."""
        if place is not None:
            return NO_QUOTA_BYTES
        settings = self._settings
        return memory_budget(settings.memory_bytes, device_type="cpu").bytes // 2

    def _ready(self) -> Frame:
        message = ServerReady(
            step=self._trainer.steps,
            cache_bytes=self._intake.cache_bytes,
            idle_bytes=self._idle_bytes,
            in_memory=self._cache.is_in_memory,
        )
        parts = [encode(self._intake.held(split), split, "raw") for split in self._assign.rows]
        header = FrameHeader(
            kind=control(message).header.kind,
            source=self._worker,
            target=COORDINATOR,
            body=pack(message),
            tensors=tuple(spec for spec, _ in parts),
        )
        return Frame(header, tuple(buffer for _, buffer in parts))

    def submit(self, job: Job) -> None:
        """Queue a job behind those before it."""
        self._arrived.put(job)

    def take(self, frame: Frame) -> None:
        """Queue activations, labels, or an epoch's order."""
        self._arrived.put(frame)

    def end(self, patience_s: float) -> None:
        """Let the thread end after the step that it does now, its state saved, and wait for that."""
        self._is_ending = True
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            self._work()
        except _EndedError:
            pass
        except CoterieError as error:
            self._on_failure(error)
        except Exception as error:
            self._on_failure(explained(error))

    def _work(self) -> None:
        try:
            while True:
                while not self._jobs:
                    self._take_one()
                match job := self._jobs.popleft():
                    case RunSegment():
                        self._train(job)
                    case EvaluateSide():
                        self._evaluate(job)
                    case SaveState():
                        self._send_state(job)
                    case GoAlone():
                        self._save()
                        self._on_alone()
        finally:
            self._save_last()
            self._cache.close()

    def _take_one(self) -> None:
        """Wait for the next thing that arrives."""
        if self._is_ending:
            raise _EndedError
        item = self._arrived.get()
        if item is None:
            raise _EndedError
        if not isinstance(item, Frame):
            self._jobs.append(item)
        elif item.header.kind == ORDER:
            self._learn_order(item)
        elif self._intake.take(item):
            stored = BatchStored(step=item.header.step, cache_bytes=self._intake.cache_bytes)
            self._tell(stored)

    def _learn_order(self, frame: Frame) -> None:
        body = unpack(frame.header.body)
        specs = frame.header.tensors
        tensors = {spec.name: decode(spec, data) for spec, data in zip(specs, frame.buffers, strict=True)}
        if not isinstance(body, OrderBody) or set(tensors) != {"rows", "stops", "seen"}:
            raise ProtocolError("the order of an epoch came without its rows")
        rows, start = tensors["rows"].tolist(), 0
        for index, (stop, seen) in enumerate(zip(tensors["stops"].tolist(), tensors["seen"].tolist(), strict=True)):
            self._order[body.first_step + index] = (rows[start:stop], seen)
            start = stop

    def _train(self, job: RunSegment) -> None:
        for step in range(job.first_step, job.first_step + job.steps):
            start_s = self._clock.now()
            while step not in self._order or not self._intake.has_rows(step, self._order[step][0]):
                self._take_one()
            if self._is_ending:
                raise _EndedError
            if step != self._trainer.steps:
                raise ProtocolError(f"step {step} was asked for after {self._trainer.steps} steps")
            rows, seen = self._order.pop(step)
            begin_s, begin_cpu_s = self._clock.now(), time.process_time()
            with computing("the server"):
                done = self._trainer.step(self._intake.of_step(step, rows), seen)
            cpu_s = time.process_time() - begin_cpu_s
            self._throttle.settle(wall_s=self._clock.now() - begin_s, cpu_s=cpu_s, now=self._clock.now)
            self._tell(MicroBatchDone(step=step, micro_batch=0, loss_sum=done.loss_sum, loss_tokens=done.loss_tokens))
            self._tell(
                StepDone(
                    step=step,
                    forward_s=self._clock.now() - begin_s,
                    backward_s=0.0,
                    update_s=0.0,
                    wait_s=begin_s - start_s,
                    cpu_s=cpu_s,
                    grad_norm=done.grad_norm,
                    grad_norm_is_global=True,
                    learning_rate=done.learning_rate,
                    updates=int(done.loss_tokens > 0),
                    weight_versions=1,
                    stashed_bytes=0,
                    peak_bytes=peak_rss_bytes(),
                    sent_next_bytes=0,
                    sent_previous_bytes=0,
                )
            )
            self._save_if_due(step + 1)

    def _save_if_due(self, steps: int) -> None:
        every = self._assign.save_every
        if steps % self._assign.steps_per_epoch == 0 or (every and steps % every == 0):
            self._save()

    def _save_last(self) -> None:
        """Before the thread ends: steps since the last state need not be done again."""
        self._save()

    def _save(self) -> None:
        """Put the state onto the disk, if it is kept there and has changed."""
        if self._state is not None and self._saved_steps != self._trainer.steps:
            self._state.save(self._trainer.state())
            self._saved_steps = self._trainer.steps

    def _evaluate(self, job: EvaluateSide) -> None:
        while not self._intake.is_whole(job.split):
            self._take_one()
        rows = range(self._assign.rows[job.split])
        at_once = 1 if self._trainer.model.output_width > _WIDE_OUTPUT else _ROWS_AT_ONCE
        loss_sum = 0.0
        for start in range(0, len(rows), at_once):
            if self._is_ending:
                raise _EndedError
            loss_sum += self._predict(job.split, rows[start : start + at_once])
        self._tell(SideEvaluated(split=job.split, loss_sum=loss_sum))

    def _predict(self, split: str, rows: Sequence[int]) -> float:
        """Send the predictions of some rows, or in additive mode what is added to the backbone's; their loss sum."""
        batch = self._intake.read(split, rows)
        loss_sum = 0.0
        with computing("the server"), torch.inference_mode():
            if self._assign.side.mode == "additive":
                predicted = self._trainer.model.additions(batch)
            else:
                logits = self._trainer.model.logits(batch)
                predicted = self._task.predictions(logits)
                assert batch.labels is not None
                loss_sum = float(self._task.loss_sum(logits, batch.labels.to(logits.device)))
        tensors = {
            SAMPLES_TENSOR: torch.tensor(rows, dtype=torch.int64),
            COUNTS_TENSOR: batch.loss_counts,
            PREDICTIONS_TENSOR: predicted.cpu(),
        }
        self._send(PREDICTIONS, rows[0], tensors, b"")
        return loss_sum

    def _send_state(self, job: SaveState) -> None:
        """The trained parameters; the optimizer's state stays here."""
        tensors = {PARAMETER + name: p.detach().cpu() for name, p in self._trainer.model.parameters().items()}
        self._send(STATE, job.step, tensors, pack(UnitBody(unit=0)))
        self._tell(StateSent(step=job.step))
        self._outbox.wait_until_sent()  # the buffers are the parameters themselves

    def _send(self, kind: str, step: int, tensors: Mapping[str, Tensor], body: bytes) -> None:
        parts = [encode(tensor, name, "raw") for name, tensor in tensors.items()]
        header = FrameHeader(
            kind=kind,
            source=self._worker,
            target=COORDINATOR,
            run=self._assign.run,
            plan_version=PLAN_VERSION,
            step=step,
            body=body,
            tensors=tuple(spec for spec, _ in parts),
        )
        self._outbox.post(Frame(header, tuple(buffer for _, buffer in parts)))

    def _tell(self, message: Message) -> None:
        if not self.is_alone:
            self._outbox.post(control(message, source=self._worker))
