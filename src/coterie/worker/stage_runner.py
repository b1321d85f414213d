"""The compute thread of a worker: builds its stage, runs segments, hands out state. One thing at a time, in order."""

import queue
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from coterie.cluster.messages import (
    OPTIMIZER,
    PARAMETER,
    STATE,
    Assign,
    Generate,
    RunSegment,
    SaveState,
    StateSent,
    control,
)
from coterie.errors import CoterieError, OutOfMemoryError
from coterie.ids import COORDINATOR, WorkerId
from coterie.logs import get_logger
from coterie.measure.allocator import use_tight_allocator
from coterie.measure.process_memory import is_out_of_memory, reset_peak
from coterie.models.stage import StageModule, build_stage
from coterie.models.weights import MappingWeights
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings
from coterie.pipeline.optimizer import StageOptimizer
from coterie.pipeline.throttle import Throttle, finish_of
from coterie.schedules import make_schedule
from coterie.tasks.catalog import get_task
from coterie.units import MIB, format_bytes
from coterie.worker.last_words import explained, without_frames
from coterie.worker.network_ports import NetworkPorts
from coterie.worker.outbox import Outbox
from coterie.worker.replica_sender import ReplicaSender
from coterie.worker.settings import WorkerSettings
from coterie.worker.sharing import DeviceSharing, StageSharing
from coterie.worker.side_ports import SidePorts
from coterie.worker.side_stage import SideForward
from coterie.worker.stall import Block
from coterie.worker.superseded import SupersededError
from coterie.worker.trained_copies import TrainedCopies
from coterie.worker.trained_state import by_unit, unit_frame

log = get_logger(__name__)

Job = RunSegment | Generate | SaveState | None

THREAD_ROOM_BYTES = 4 * MIB
"""A thread's stack, and what it needs before its first line."""


class StageRunner:
    """Runs one assigned stage in a thread of its own.

    Args:
        on_failure: Called once, from the compute thread, with what ended it.
    """

    def __init__(
        self,
        worker: WorkerId,
        assign: Assign,
        settings: WorkerSettings,
        outbox_to: Callable[[WorkerId], Outbox],
        on_failure: Callable[[CoterieError], None],
    ) -> None:
        self._worker = worker
        self._assign = assign
        self._settings = settings
        self._outbox_to = outbox_to
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._stage: StageModule | None = None
        self._optimizer: StageOptimizer | None = None
        self._executor: StageExecutor | None = None
        self._side: SideForward | None = None
        self._ports: NetworkPorts | None = None
        self._throttle = Throttle(settings.full_speed, finish=finish_of(settings.device_type))
        self._depth = assign.plan.stages[assign.stage].in_flight
        self.sharing: DeviceSharing | None = None
        """The device's compute backends, if they are to share the stage's layers."""
        self._shared: StageSharing | None = None
        self.replica_outboxes: Mapping[WorkerId, Outbox] = {}
        """Where replicas of the trained state go; empty: none are made."""
        self.copies = TrainedCopies(None)
        """Where this worker keeps its own."""

    def build(self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], ports: NetworkPorts) -> None:
        """Build the stage from the tensors of its units; runs in a helper thread.

        Args:
            tensors: Those that came for it: `param/…`, `optim/…`.
            held: Frozen ones that were here before, by their plain names; they are used as they are.
            ports: Its way to everything outside.

        Raises:
            CoterieError: The tensors are not those of the stage, or memory ran out.
        """
        place = self._assign.plan.stages[self._assign.stage]
        if place.allocator == "tight":
            use_tight_allocator()
        parameters = {name.removeprefix(PARAMETER): tensor for name, tensor in tensors.items() if _is(name, PARAMETER)}
        parameters |= held
        try:
            stage = build_stage(
                self._assign.spec,
                place.first_unit,
                place.stop_unit,
                MappingWeights(parameters),
                device=self._settings.device_type,
            )
            optimizer = StageOptimizer(self._assign.optimizer)
            state = _optimizer_state(tensors)
            if state:
                optimizer.load_state(state, stage.trainable(), hand_over=True)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise self.out_of_memory(error) from error
            raise
        self._stage, self._optimizer, self._ports = stage, optimizer, ports
        self._shared = None if self.sharing is None else self.sharing.begin(stage)
        self._executor = StageExecutor(
            stage,
            optimizer,
            get_task(self._assign.task),
            ports,
            ExecutorSettings(
                seed=self._assign.spec.seed,
                sends_gradient=self._assign.gradient_below,
                recompute=place.recompute,
                name=f"stage {self._assign.stage}",
            ),
            throttle=self._throttle,
            backends=self._shared,
            taker=self._taker(stage),
        )
        if self._assign.side is not None:
            assert isinstance(ports, SidePorts)
            name = f"stage {self._assign.stage}"
            self._side = SideForward(stage, self._assign.side.side, ports, name=name, throttle=self._throttle)
        reset_peak()
        self._start()

    def _start(self) -> None:
        """Start the compute thread; `Thread.start` would wait for ever for one that cannot allocate its first objects.

        Raises:
            OutOfMemoryError: There is no room for a thread.
        """
        try:
            bytearray(THREAD_ROOM_BYTES)
        except MemoryError as error:
            raise self.out_of_memory(error) from error
        self._thread.start()

    def _taker(self, stage: StageModule) -> ReplicaSender | None:
        if not self.replica_outboxes:
            return None
        return ReplicaSender(stage, self._assign, self._worker, self.replica_outboxes, copies=self.copies)

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """The error with the numbers of this device."""
        place = self._assign.plan.stages[self._assign.stage]
        return OutOfMemoryError(
            f"memory ran out on stage {self._assign.stage} ({place.device_name}): limit "
            f"{format_bytes(place.memory_limit)}, predicted peak {format_bytes(place.memory.total)} ({error})",
            hint='give the device more memory, use more micro-batches, recompute = "on", or lora',
        )

    @property
    def is_running(self) -> bool:
        """Whether the stage is built, and its thread has not ended."""
        return self._thread.is_alive()

    @property
    def block(self) -> Block | None:
        """What its thread computes at this moment; None while it waits."""
        block = None if self._executor is None else self._executor.block
        return None if block is None else (self._assign.plan.version, block)

    @property
    def recomputes(self) -> bool:
        """Whether it does so now: by plan, because it was told to, or because memory ran out in a forward."""
        return self._executor is not None and self._executor.recompute

    def adapt(self, *, recompute: bool, in_flight: int) -> None:
        """Recompute from the next micro-batch on, or not; hold so many in flight from the next segment on."""
        if self._executor is not None:
            self._executor.recompute = recompute
        self._depth = in_flight

    def set_speed(self, speed: float) -> None:
        """Compute at this share of a core's speed from the next action on."""
        self._throttle.speed = speed

    def submit(self, job: RunSegment | Generate | SaveState) -> None:
        """Queue a job behind those before it."""
        self._jobs.put(job)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The tensors of the stage that training never changes, by name."""
        return {} if self._stage is None else self._stage.frozen()

    def end(self, patience_s: float) -> bool:
        """Let the thread end after what it does now, and wait for that; whether it has ended."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(patience_s)
        if self._thread.is_alive():
            return False
        if self._shared is not None:
            self._shared.end()
        return True

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                match job:
                    case SaveState():
                        self._send_state(job)
                    case Generate():
                        self._generate(job)
                    case RunSegment():
                        self._run_segment(job)
        except SupersededError as error:
            without_frames(error)  # mailbox and outboxes keep it
            log.info("stage %d is given up", self._assign.stage)
        except CoterieError as error:
            ended = self.out_of_memory(error) if isinstance(error, OutOfMemoryError) else error
            self._on_failure(without_frames(ended))
        except Exception as error:
            ended = self.out_of_memory(error) if is_out_of_memory(error) else explained(error)
            self._on_failure(without_frames(ended))

    def _run_segment(self, job: RunSegment) -> None:
        if self._side is not None:
            self._side.run(job.first_step, job.steps)
            return
        assert self._executor is not None
        depths = [stage.in_flight for stage in self._assign.plan.stages]
        depths[self._assign.stage] = self._depth
        schedule = make_schedule(
            job.schedule,
            stages=len(self._assign.plan.stages),
            micro_batches=job.micro_batches,
            steps=job.steps,
            in_flight=None if job.schedule == "forward" else tuple(depths),
        )
        self._executor.run_segment(schedule, self._assign.stage, job.first_step)

    def _generate(self, job: Generate) -> None:
        # Loaded only here: it brings transformers' caches, and few workers ever write text.
        from coterie.models.generation import GenerationStage  # noqa: PLC0415 - see above
        from coterie.pipeline.generation import GenerationExecutor  # noqa: PLC0415 - see above

        assert self._stage is not None
        assert self._ports is not None
        executor = GenerationExecutor(
            GenerationStage(self._stage),
            self._ports,
            job.spec,
            name=f"stage {self._assign.stage}",
            throttle=self._throttle,
        )
        executor.run(job.first_step)

    def _send_state(self, job: SaveState) -> None:
        """Send each trained unit's parameters and optimizer state, one frame a unit: one unit's copy at a time."""
        assert self._stage is not None
        assert self._optimizer is not None
        outbox = self._outbox_to(COORDINATOR)
        units = by_unit(self._stage, self._stage.trainable(), self._optimizer.state())
        for unit, tensors in units.items():
            outbox.post(unit_frame(STATE, (self._worker, COORDINATOR), self._assign, (job.step, unit), tensors))
        outbox.post(control(StateSent(step=job.step), source=self._worker, plan_version=self._assign.plan.version))
        if self.replica_outboxes:
            self.copies.keep_own(job.step, units, are_live=True)
        # The buffers are the parameters themselves: they must be out before the next update changes them.
        outbox.wait_until_sent()


def _is(name: str, prefix: str) -> bool:
    return name.startswith(prefix)


def _optimizer_state(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, field = key.removeprefix(OPTIMIZER).rpartition("/")
            state.setdefault(name, {})[field] = tensor
    return state
