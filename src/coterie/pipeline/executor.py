"""Runs one stage's actions, whatever the schedule: wait for the input, compute, send."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from coterie.clock import Clock, SystemClock
from coterie.errors import NonFiniteLossError, UnsupportedModelError
from coterie.models import RandomKey, StageModule
from coterie.pipeline.compute import computing, is_out_of_memory
from coterie.pipeline.executor_settings import BackendUse, ExecutorSettings, OutputTask, StateTaker
from coterie.pipeline.gradients import clip_in_place, sum_in_unit_order, unit_squared_norms
from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.optimizer import StageOptimizer
from coterie.pipeline.ports import StagePorts
from coterie.pipeline.reports import MicroBatchReport
from coterie.pipeline.step_tally import StepTally
from coterie.pipeline.throttle import Throttle
from coterie.pipeline.weight_stash import WeightStash
from coterie.schedules.actions import Action, ActionKind, Schedule, ScheduleKind

_T = TypeVar("_T")


class _InFlight:
    """A micro-batch between its forward and its backward."""

    __slots__ = ("hidden", "is_passed_on", "is_received", "loss_tokens", "root", "samples_seen")

    def __init__(self, loss_tokens: int, samples_seen: int) -> None:
        self.loss_tokens = loss_tokens
        self.samples_seen = samples_seen
        self.is_received = False
        self.is_passed_on = False
        self.hidden: Tensor | None = None
        self.root: Tensor | GradientEdge | None = None
        """Where backward starts: the loss, or the output's place in the graph (the output itself is given away)."""


class StageExecutor:
    """One stage: its weights, its optimizer, and the actions of any schedule on them.

    The loss of a micro-batch is a sum over its loss tokens, divided by those of the step (`stash`: by its own, since
    there each micro-batch is a mini-batch with its own update). What has no loss tokens is not computed at all: such
    a micro-batch adds nothing, such a step moves neither weights nor moments.
    """

    def __init__(  # noqa: PLR0913 - what a stage is made of, the last three named at the call
        self,
        stage: StageModule,
        optimizer: StageOptimizer,
        task: OutputTask,
        ports: StagePorts,
        settings: ExecutorSettings,
        *,
        throttle: Throttle | None = None,
        backends: BackendUse | None = None,
        taker: StateTaker | None = None,
    ) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._task = task
        self._ports = ports
        self._settings = settings
        self.recompute = settings.recompute
        """May be set from another thread at any time, and holds from the next forward on: what is in flight already is
        finished as it was begun, and no number depends on it."""
        self.block: int | None = None
        """The number of what is computed at this moment without a break; None while the stage waits."""
        self._blocks = 0
        self._throttle = throttle
        self._backends = backends
        self._taker = taker
        self._clock: Clock = SystemClock()
        self._stash = WeightStash(stage)
        self._device = next((parameter.device for parameter in stage.parameters().values()), torch.device("cpu"))
        self._has_backward = bool(stage.trainable()) or settings.sends_gradient
        self._kind: ScheduleKind = "flush"
        self._first_step = 0
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._tallies: dict[int, StepTally] = {}

    def run_segment(self, schedule: Schedule, stage_index: int, first_step: int) -> None:
        """Run all actions of one stage; the pipeline is empty before and after.

        Args:
            schedule: The order of all stages; step 0 of it is step `first_step` of the run.
            stage_index: Which stage of it this is.
            first_step: Optimizer steps of the run before this segment.

        Raises:
            UnsupportedModelError: A trained tied matrix lies on two stages and the schedule has no flush.
            NonFiniteLossError: A loss or the gradient norm is NaN or infinite; that step has not been applied here.
            OutOfMemoryError: The device ran out of memory.
        """
        if schedule.kind in {"stash", "2bw"} and self._stage.tied_name is not None:
            raise UnsupportedModelError(
                f"the {schedule.kind} schedule cannot train {self._stage.tied_name}, tied over two stages",
                hint="freeze the embeddings, train with LoRA, or use the flush schedule",
            )
        actions = schedule.actions[stage_index]
        step_ends = {action.step: index for index, action in enumerate(actions)}
        last_updates = {action.step: index for index, action in enumerate(actions) if action.kind == "U"}
        self._kind = schedule.kind
        self._first_step = first_step
        self._set_dropout(on=schedule.kind != "forward")
        self._stash.open_segment(actions)
        try:
            for index, action in enumerate(actions):
                self._run_action(action, index)
                if last_updates.get(action.step) == index:
                    self._hand_out_state(first_step + action.step + 1)
                if step_ends[action.step] == index:
                    step = first_step + action.step
                    self._end_step(self._tallies.pop(action.step), step)
        except BaseException:
            self._in_flight.clear()
            self._tallies.clear()
            self._stash.abandon()
            raise
        assert not self._in_flight
        self._stash.install_current()

    def _hand_out_state(self, steps_done: int) -> None:
        if self._taker is not None:
            with computing(self._settings.name):
                self._taker.after_step(steps_done, self._stash.newest, self._optimizer.state())

    def _end_step(self, tally: StepTally, step: int) -> None:
        if self._backends is not None:
            tally.backend_busy_s, tally.backends_left_out = self._backends.since_last()
        self._ports.step_done(tally.report(step))
        if self._backends is not None:
            with computing(self._settings.name):
                self._backends.step_ended(is_idle=not self._in_flight)

    def _set_dropout(self, *, on: bool) -> None:
        if on:
            self._stage.train()
        else:
            self._stage.eval()

    def _run_action(self, action: Action, index: int) -> None:
        tally = self._tallies.setdefault(action.step, StepTally())
        match action.kind:
            case "F":
                self._forward(action, tally)
            case "B":
                self._backward(action, tally)
            case "U":
                self._update(action, index, tally)
        tally.note_versions(self._stash)
        self._stash.release(index)

    def _forward(self, action: Action, tally: StepTally) -> None:
        step = self._first_step + action.step
        batch = self._wait(tally, self._ports.take_batch, step, action.micro_batch)
        assert (batch.step, batch.micro_batch) == (step, action.micro_batch)
        per_micro_batch = self._kind == "stash"
        record = _InFlight(
            batch.micro_batch_loss_tokens if per_micro_batch else batch.step_loss_tokens, batch.samples_seen
        )
        if self._kind != "forward":
            self._in_flight[action.step, action.micro_batch] = record
        if batch.rows == 0 or (self._kind != "forward" and batch.micro_batch_loss_tokens == 0):
            if self._stage.is_last:
                self._report_loss(batch, 0.0)
            return
        hidden = None
        if not self._stage.is_first:
            hidden = self._wait(tally, self._ports.take_hidden, step, action.micro_batch)
            record.is_received = True
        if self._stage.is_last:
            self._forward_to_loss(action, batch, hidden, record, tally)
        else:
            with self._busy("F", tally):
                output = self._run_stage(action, batch, hidden, record)
                if output.requires_grad:
                    record.root = get_gradient_edge(output)
                output = output.detach().to("cpu")
            record.is_passed_on = True
            self._ports.put_hidden(step, action.micro_batch, output)

    def _forward_to_loss(
        self, action: Action, batch: MicroBatch, hidden: Tensor | None, record: _InFlight, tally: StepTally
    ) -> None:
        value = 0.0
        predictions = None
        with self._busy("F", tally):
            logits = self._run_stage(action, batch, hidden, record)
            if self._kind == "forward":
                predictions = self._task.predictions(logits).to("cpu")
            if batch.labels is not None:
                with torch.set_grad_enabled(logits.requires_grad):
                    loss = self._task.loss_sum(logits, batch.labels.to(self._device))
                value = loss.item()
                record.root = loss if loss.requires_grad else None
            del logits
        if not math.isfinite(value):
            raise NonFiniteLossError(
                f"the loss of step {batch.step + 1}, micro-batch {batch.micro_batch + 1} is {value}",
                hint="lower the learning rate or clip gradients (max_grad_norm); if there is a checkpoint, it is kept",
                step=batch.step,
                micro_batch=batch.micro_batch,
            )
        if predictions is not None:
            self._ports.put_predictions(batch.step, batch.micro_batch, predictions)
        if batch.labels is not None:
            self._report_loss(batch, value)

    def _run_stage(self, action: Action, batch: MicroBatch, hidden: Tensor | None, record: _InFlight) -> Tensor:
        """Hidden states [B, T, D], or logits on the last stage, with the graph only where a backward will follow."""
        keeps_graph = self._has_backward and self._kind != "forward"
        self._stash.install(action.weight_version)
        if hidden is not None:
            hidden = hidden.to(self._device)
            if keeps_graph and self._settings.sends_gradient:
                record.hidden = hidden.requires_grad_()
        inputs = {name: tensor.to(self._device) for name, tensor in batch.inputs.items()}
        key = RandomKey(self._settings.seed, batch.step, batch.micro_batch)
        with torch.set_grad_enabled(keeps_graph):
            if not keeps_graph or self.recompute:
                return self._stage.forward(inputs, hidden, key, recompute=keeps_graph)
            return self._forward_in_scarce_memory(inputs, hidden, key)

    def _forward_in_scarce_memory(self, inputs: dict[str, Tensor], hidden: Tensor | None, key: RandomKey) -> Tensor:
        """A forward that keeps everything, or if memory runs out in it, again with recomputation, and so from now on.

        Nothing of the first attempt remains: its randomness is a function of `key`, and nothing was sent.
        """
        try:
            return self._stage.forward(inputs, hidden, key)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.recompute = True
        gc.collect()
        return self._stage.forward(inputs, hidden, key, recompute=True)

    def _backward(self, action: Action, tally: StepTally) -> None:
        record = self._in_flight.pop((action.step, action.micro_batch))
        if self._kind == "stash" or action.micro_batch == 0:
            tally.update_tokens = record.loss_tokens
            tally.update_samples = record.samples_seen
        step = self._first_step + action.step
        gradient = None
        if record.is_passed_on:
            take = self._ports.take_gradient if self._has_backward else self._ports.take_done
            gradient = self._wait(tally, take, step, action.micro_batch)
        below = None if record.root is None else self._gradient_below(action, record, gradient, tally)
        if below is not None:
            self._ports.put_gradient(step, action.micro_batch, below)
        elif record.is_received and not self._settings.sends_gradient:
            self._ports.put_done(step, action.micro_batch)

    def _gradient_below(
        self, action: Action, record: _InFlight, gradient: Tensor | None, tally: StepTally
    ) -> Tensor | None:
        """Run a backward; the gradient [B, T, D] of the hidden states that came in, where one goes down."""
        root, hidden = record.root, record.hidden
        assert root is not None
        record.root = record.hidden = None
        with self._busy("B", tally):
            self._stash.install(action.weight_version)
            self._stash.collect_on(action.weight_version)
            if gradient is None:
                gradient = torch.ones((), device=self._device) / record.loss_tokens
            torch.autograd.backward(root, gradient.to(self._device))
            del root, gradient
            if hidden is None:
                return None
            assert hidden.grad is not None
            return hidden.grad.to("cpu")

    def _update(self, action: Action, index: int, tally: StepTally) -> None:
        if tally.update_tokens == 0:
            self._stash.repeat_version(action.weight_version)
            return
        step = self._first_step + action.step
        spec = self._optimizer.spec
        self._exchange_tied(step, tally)
        gradients = self._stash.gradients()
        counted_elsewhere = None if self._stage.is_first else self._stage.tied_name
        with self._busy("U", tally):
            own = unit_squared_norms(gradients, self._stage.unit_of, counted_elsewhere=counted_elsewhere)
        tally.grad_norm_is_global = self._kind != "stash" and spec.max_grad_norm > 0
        if tally.grad_norm_is_global:
            squared = self._wait(tally, self._ports.total_squared_norm, step, own)
        else:
            squared = sum_in_unit_order(own)
        if not math.isfinite(squared):
            raise NonFiniteLossError(
                f"the gradient norm of step {step + 1}, micro-batch {action.micro_batch + 1} is "
                f"{math.sqrt(abs(squared))}",
                hint="lower the learning rate; if there is a checkpoint, it is kept",
                step=step,
            )
        tally.learning_rate = spec.learning_rate_at(tally.update_samples)
        if self._taker is not None:
            self._wait(tally, self._taker.before_update)
        with self._busy("U", tally):
            parameters = self._stash.next_version(action.weight_version, index)
            tally.grad_norm = clip_in_place(gradients.values(), squared, spec.max_grad_norm)
            self._optimizer.apply(parameters, gradients, tally.learning_rate)
            self._stash.drop_gradients()
        tally.updates += 1

    def _exchange_tied(self, step: int, tally: StepTally) -> None:
        name = self._stage.tied_name
        if name is None:
            return
        gradient = self._stash.gradients().get(name)
        if gradient is None:
            gradient = torch.zeros_like(self._stage.trainable()[name])
        total = self._wait(tally, self._ports.exchange_tied, step, gradient.to("cpu"))
        self._stash.set_gradient(name, total.to(self._device))

    def _report_loss(self, batch: MicroBatch, value: float) -> None:
        self._ports.micro_batch_done(
            MicroBatchReport(
                step=batch.step,
                micro_batch=batch.micro_batch,
                loss_sum=value,
                loss_tokens=batch.micro_batch_loss_tokens,
            )
        )

    def _wait(self, tally: StepTally, call: Callable[..., _T], *arguments: object) -> _T:
        start_s = self._clock.now()
        result = call(*arguments)
        tally.wait_s += self._clock.now() - start_s
        return result

    @contextmanager
    def _busy(self, kind: ActionKind, tally: StepTally) -> Iterator[None]:
        """Compute under the lock, then let a throttled device's time pass before anything is sent."""
        with computing(self._settings.name):
            self._blocks += 1
            self.block = self._blocks
            start_s, start_cpu_s = self._clock.now(), self._cpu_s()
            try:
                yield
            finally:
                self.block = None
            cpu_s = self._cpu_s() - start_cpu_s
        if self._throttle is not None:
            wall_s = self._clock.now() - start_s
            self._throttle.settle(wall_s=wall_s, cpu_s=cpu_s, now=self._clock.now)
        tally.busy_s[kind] += self._clock.now() - start_s
        tally.cpu_s += cpu_s

    def _cpu_s(self) -> float:
        """CPU seconds of this thread, and of the backends that it waited for."""
        return time.thread_time() + (self._backends.cpu_s() if self._backends is not None else 0.0)
