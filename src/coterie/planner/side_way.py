"""Side-tuning as a way: a forward-only backbone on one device or as a pipeline, and a server that trains beside it.

The devices run ahead of the server and upload in the background, so that collecting takes what the slowest of them
takes per micro-batch: a stage's forward, its sends (hidden states and taps share its link), or the server's step. The
server's seconds are its operations at the speed of its plain matrix product: `4 D R` a tap and token forward and twice
that backward, and the output layer's weights, two operations each, the same back, and once more where they are trained;
besides `STEP_OPERATIONS_PER_TAP`. In additive mode a prediction difference counts as one label.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from coterie.errors import DoesNotFitError
from coterie.ids import WorkerId
from coterie.planner.decide import make_plan
from coterie.planner.exposure import exposed_by_stages, exposed_to_server
from coterie.planner.plan import Plan, StageAssignment
from coterie.planner.problem import CODEC_SIZE, Problem
from coterie.planner.side_bytes import Backbone, cache_bytes, side_network_bytes, taps_bytes
from coterie.planner.side_memory import hidden_width, server_memory, server_shortage, with_unsent, without_output_layer
from coterie.planner.way import Span, Way, WayName, WaysRequest
from coterie.planner.way_ledger import INPUT_BYTES, LABEL_BYTES, Ledger, among
from coterie.units import format_bytes, name_units

_FLOAT32_BYTES = 4
STEP_OPERATIONS_PER_TAP = 64e6
"""What a step takes for each tap however few tokens there are (many small kernels, each called from Python), counted as
operations so that it scales with the device's speed: about 2 ms a tap where a plain product runs 32 GFLOP/s."""


def side_way(request: WaysRequest, name: WayName, workers: Sequence[WorkerId]) -> Way:
    """The way in which these devices hold the backbone and `request.server` trains."""
    if request.server in workers:
        return Way(name=name, reason="the owner of the data is the server; side-tuning needs a device beside it")
    is_pipeline = name == "pipeline + side-tuning"
    if is_pipeline and len(workers) < 2:
        return Way(name=name, reason="a pipeline needs two devices beside the server; there is one")
    run = _SideRun(request)
    if reason := run.why_server_is_too_small():
        return Way(name=name, reason=reason)
    asked = among(request.frozen, workers, least=2 if is_pipeline else 1)
    asked = msgspec.structs.replace(asked, model=run.on_devices, schedule="forward", keeps_micro_batch=True)
    try:
        plan = make_plan(asked)
    except DoesNotFitError as error:
        return Way(name=name, reason=error.message)
    spans = run.spans(plan, Problem(asked, plan.micro_batches))
    owner, server = request.owner, run.ledger.device(request.server).name
    return Way(
        name=name,
        spans=spans,
        devices=run.ledger.costs(),
        exposes=(
            *exposed_by_stages(plan.stages, owner, sees_labels=request.side.mode == "additive"),
            *(exposed_to_server(server, request.side, run.backbone.blocks) if request.server != owner else ()),
        ),
        cache_bytes=cache_bytes(request.data.epoch, run.backbone, request.side),
        device_passes=run.collected_passes,
        plan=plan,
    )


class _Amounts(NamedTuple):
    """Of one micro-batch on the devices."""

    positions: float
    server_s: float


class _SideRun:
    """One run's figures, whoever holds the backbone."""

    def __init__(self, request: WaysRequest) -> None:
        model = request.frozen.model
        self.request = request
        self.ledger = Ledger(request)
        self.output = model.layers[-1]
        self.backbone = Backbone(blocks=len(model.layers) - 2, width=hidden_width(model))
        model = with_unsent(model, request.side, request.data, request.frozen.batch_rows)
        # An additive server gets predictions, which the devices must make; else it holds the output layer alone.
        self.on_devices = model if request.side.mode == "additive" else without_output_layer(model)
        steps = request.data.steps
        self.collected_steps = min(steps, request.data.steps_per_epoch) if request.side.two_phases else steps
        self.collected_passes = self.collected_steps / request.data.steps_per_epoch

    @property
    def _server(self) -> WorkerId:
        return self.request.server

    @property
    def _trained_bytes(self) -> int:
        return self.request.data.task_bytes + side_network_bytes(self.backbone, self.request.side)

    def _sent_per_step(self) -> float:
        data = self.request.data
        return data.epoch.sent(self.request.side) / data.steps_per_epoch

    def step_s(self) -> float:
        """Seconds of one optimizer step on the server."""
        side, data = self.request.side, self.request.data
        taps = self.backbone.taps(side)
        network = 3 * taps * 4 * self.backbone.width * side.rank
        output = 2 * 2 * self.output.parameter_bytes + 2 * data.task_bytes
        read = data.epoch.selected / data.steps_per_epoch
        device = self.ledger.device(self._server)
        operations = self._sent_per_step() * network + read * output / _FLOAT32_BYTES + taps * STEP_OPERATIONS_PER_TAP
        return operations / device.flops_per_s + self._trained_bytes / device.update_bytes_per_s

    def peak_bytes(self) -> dict[str, int]:
        """The server's memory, by what takes it."""
        side, data = self.request.side, self.request.data
        copies = self.request.frozen.optimizer_state_copies
        return {
            "worker": self.ledger.device(self._server).base_bytes,
            **server_memory(self.output, self.backbone, side, data, optimizer_copies=copies),
            "cache": cache_bytes(data.epoch, self.backbone, side) if self.request.cache_in_memory else 0,
        }

    def why_server_is_too_small(self) -> str:
        """The server's shortage in numbers; empty if there is none."""
        device = self.ledger.device(self._server)
        quota = self.request.cache_quota_bytes
        cache = cache_bytes(self.request.data.epoch, self.backbone, self.request.side)
        if quota is not None and cache > quota:
            return f"the cache needs {format_bytes(cache)} on {device.name}, and its quota is {format_bytes(quota)}"
        return server_shortage(device.name, device.memory_bytes, self.peak_bytes())

    def _own_taps(self, stage: StageAssignment) -> int:
        """How many tapped blocks a stage holds; block i is unit i + 1 and layer i + 1 of the ladder."""
        first = max(stage.first_unit, self.request.side.first_layer, 1)
        return max(min(stage.stop_unit, self.backbone.blocks + 1) - first, 0)

    def spans(self, plan: Plan, problem: Problem) -> tuple[Span, ...]:
        """The run's parts in order; counts each device's share on the way."""
        setup_s = self._hand_out(plan)
        step_s = self.step_s()
        self.ledger.compute(self._server, step_s * self.request.data.steps)
        self._count_collecting(plan, problem)
        amounts = _Amounts(self._sent_per_step() / plan.micro_batches, step_s / plan.micro_batches)
        uploads_s = [self._upload_s(stage, amounts.positions) for stage in plan.stages]
        busiest = [max(stage.forward_s, stage.send_s + up) for stage, up in zip(plan.stages, uploads_s, strict=True)]
        beyond_the_first = (self.collected_steps - 1) * plan.micro_batches
        collect_s = plan.predicted_step_s + beyond_the_first * max(*busiest, amounts.server_s)
        collect_s += max(uploads_s) + step_s
        back_s = self.ledger.send(self._server, self.request.owner, self._trained_bytes)
        replayed = self.request.data.steps - self.collected_steps
        spans = (
            ("send weights", setup_s),
            ("collect", collect_s),
            ("replay", replayed * step_s),
            ("fetch the network", back_s),
        )
        return tuple(Span(name=name, seconds=seconds) for name, seconds in spans if seconds)

    def _upload_s(self, stage: StageAssignment, positions: float) -> float:
        """Seconds that a stage's taps of one micro-batch take."""
        return self._taps_bytes(stage, positions) / self.ledger.rate(stage.worker, self._server)

    def _taps_bytes(self, stage: StageAssignment, positions: float) -> int:
        return taps_bytes(round(positions), self._own_taps(stage), self.backbone.width, self.request.side.upload)

    def _hand_out(self, plan: Plan) -> float:
        owner, seconds = self.request.owner, 0.0
        for stage in plan.stages:
            words = f"{name_units(stage.first_unit, stage.stop_unit, self.backbone.blocks + 2)}, forward only"
            self.ledger.take_part(stage.worker, words, stage.memory.total)
            seconds += self.ledger.send(owner, stage.worker, stage.memory.weights)
        if owner not in {stage.worker for stage in plan.stages}:
            self.ledger.take_part(owner, "holds the data")
        self.ledger.take_part(self._server, "trains the side network", sum(self.peak_bytes().values()))
        return seconds + self.ledger.send(owner, self._server, self.output.parameter_bytes)

    def _count_collecting(self, plan: Plan, problem: Problem) -> None:
        """Over all passes of the devices."""
        data, owner, passes = self.request.data, self.request.owner, self.collected_passes
        micro_batches = self.collected_steps * plan.micro_batches
        for number, stage in enumerate(plan.stages):
            self.ledger.compute(stage.worker, micro_batches * stage.forward_s)
            self.ledger.send(owner, stage.worker, INPUT_BYTES * data.epoch.padded * passes)
            uploaded = self._taps_bytes(stage, data.epoch.sent(self.request.side)) * passes
            self.ledger.send(stage.worker, self._server, uploaded)
            if number + 1 < len(plan.stages):
                size = float(problem.sent_bytes[stage.stop_unit - 1]) * CODEC_SIZE[stage.send_codec]
                self.ledger.send(stage.worker, plan.stages[number + 1].worker, micro_batches * size)
        self.ledger.send(owner, self._server, LABEL_BYTES * (data.epoch.selected + data.rows) * passes)
