"""A stage in a side-tuning run: forward only, its activations on their way while it computes the next batch."""

import time

from torch import Tensor

from coterie.clock import SystemClock
from coterie.cluster.side_messages import TRAIN, StageForwarded
from coterie.errors import ProtocolError
from coterie.jobs.side_spec import SideSpec
from coterie.measure.process_memory import peak_rss_bytes
from coterie.models.stage import StageModule
from coterie.pipeline.compute import computing
from coterie.pipeline.throttle import Throttle
from coterie.sidetuning.additive import prediction_differences
from coterie.sidetuning.taps import TappedStage
from coterie.worker.side_ports import SideItem, SidePorts


class SideForward:
    """One stage of the frozen backbone with its taps; all calls come from its compute thread.

    Sending does not hold it up until the outbox of the link to the server is full (see `Outbox`).
    """

    def __init__(
        self, stage: StageModule, side: SideSpec, ports: SidePorts, *, name: str, throttle: Throttle | None = None
    ) -> None:
        self._stage = stage
        self._side = side
        self._ports = ports
        self._name = name
        self._throttle = throttle
        self._tapped = TappedStage(stage, side.first_layer)
        self._clock = SystemClock()

    def run(self, first_step: int, steps: int) -> None:
        """Take and forward so many micro-batches, each a step of its own."""
        for step in range(first_step, first_step + steps):
            self._run_one(step)

    def _run_one(self, step: int) -> None:
        clock = self._clock
        start_s = clock.now()
        item = self._ports.take_forward(step)
        hidden = None if self._stage.is_first else self._ports.take_hidden(step, 0)
        begin_s, begin_cpu_s = clock.now(), time.thread_time()
        with computing(self._name):
            device = self._stage.device
            inputs = {name: tensor.to(device) for name, tensor in item.inputs.items()}
            output, taps = self._tapped.forward(inputs, None if hidden is None else hidden.to(device), item.selection)
            taps = {layer: tensor.to("cpu") for layer, tensor in taps.items()}
            output = output.to("cpu")
        cpu_s = time.thread_time() - begin_cpu_s
        if self._throttle is not None:
            self._throttle.settle(wall_s=clock.now() - begin_s, cpu_s=cpu_s, now=clock.now)
        forward_s = clock.now() - begin_s
        taps_bytes, wire_bytes = self._send(step, item, output, taps)
        self._ports.forwarded(
            StageForwarded(
                step=step,
                forward_s=forward_s,
                cpu_s=cpu_s,
                wait_s=begin_s - start_s,
                peak_bytes=peak_rss_bytes(),
                taps_bytes=taps_bytes,
                wire_bytes=wire_bytes,
                sent_next_bytes=self._ports.sent_next_bytes,
            )
        )

    def _send(self, step: int, item: SideItem, output: Tensor, taps: dict[int, Tensor]) -> tuple[int, int]:
        """Hidden states on, activations to the server; bytes of activations, and of their whole frame."""
        if not self._ports.is_last_stage:
            self._ports.put_hidden(step, 0, output)
        elif self._side.mode == "additive":
            return self._send_differences(step, item, output, taps)
        return self._ports.put_taps(step, item.split, taps) if taps else (0, 0)

    def _send_differences(self, step: int, item: SideItem, logits: Tensor, taps: dict[int, Tensor]) -> tuple[int, int]:
        """In additive mode the last stage alone sees labels: the server gets how far the backbone is from them."""
        if item.labels is None:
            raise ProtocolError(f"micro-batch {step} came without the labels that differences are taken from")
        own = item.selection.loss_logits(logits)
        if item.split != TRAIN:
            self._ports.put_base_logits(step, own)
        differences = prediction_differences(own, item.selection.loss_labels(item.labels))
        return self._ports.put_taps(step, item.split, taps, differences)
