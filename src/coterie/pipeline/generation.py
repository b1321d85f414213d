"""Runs one stage of a generation: take what comes next, run the own blocks on it, hand on hidden states or tokens.

Which group is next is not known before, since a group ends when its rows do. So the coordinator numbers what it asks
for, in one order for all stages, and each stage does that in order; while one group is on its way through the later
stages, the earlier ones work on the next.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coterie.clock import Clock, SystemClock
from coterie.errors import ProtocolError
from coterie.jobs.generation_spec import GenerationSpec
from coterie.models.generation import GenerationStage, RowGroup
from coterie.pipeline.compute import computing
from coterie.pipeline.generation_ports import GenerationItem, GenerationPorts
from coterie.pipeline.sampling import next_tokens
from coterie.pipeline.throttle import Throttle


class _Group:
    """A group on this stage, and how many tokens it has been continued by."""

    __slots__ = ("kept", "position", "rows")

    def __init__(self, kept: RowGroup, rows: Sequence[int]) -> None:
        self.kept = kept
        self.rows = rows
        self.position = 0

    def continues_with(self, item: GenerationItem) -> bool:
        """Whether an item is the next one of this group."""
        return item.ids is not None and len(item.ids) == len(self.rows) and item.position == self.position + 1


class GenerationExecutor:
    """One stage and the groups of rows that are under way."""

    def __init__(
        self,
        stage: GenerationStage,
        ports: GenerationPorts,
        spec: GenerationSpec,
        *,
        name: str = "this stage",
        throttle: Throttle | None = None,
    ) -> None:
        self._stage = stage
        self._ports = ports
        self._spec = spec
        self._name = name
        self._throttle = throttle
        self._clock: Clock = SystemClock()
        self._groups: dict[int, _Group] = {}

    def run(self, first_step: int) -> None:
        """Do what is asked until there is nothing more; nothing is kept afterwards.

        Raises:
            OutOfMemoryError: The device ran out of memory.
            NonFiniteLossError: A logit is not a number.
        """
        try:
            for step in itertools.count(first_step):
                item = self._ports.take_item(step)
                for group in item.ended:
                    self._groups.pop(group, None)
                if item.is_last:
                    return
                self._do(step, item)
        finally:
            self._groups.clear()

    def _do(self, step: int, item: GenerationItem) -> None:
        stage = self._stage
        hidden = None if stage.stage.is_first else self._ports.take_hidden(step, 0)
        with self._busy():
            group = self._group(item)
            output = stage.forward(group.kept, hidden)
            if stage.stage.is_last:
                output = next_tokens(output, self._spec, rows=group.rows, position=item.position)
            else:
                output = output.to("cpu")
        if stage.stage.is_last:
            self._ports.put_predictions(step, 0, output)
        else:
            self._ports.put_hidden(step, 0, output)

    def _group(self, item: GenerationItem) -> _Group:
        ids, stage = item.ids, self._stage
        assert ids is not None
        if int(ids.min()) < 0 or (stage.vocabulary is not None and int(ids.max()) >= stage.vocabulary):
            raise ProtocolError(f"group {item.group} came to {self._name} with tokens outside the vocabulary")
        if item.position == 0:
            kept = stage.begin(ids, item.mask, self._spec.max_new_tokens)
            self._groups[item.group] = _Group(kept, item.rows)
            return self._groups[item.group]
        group = self._groups.get(item.group)
        if group is None or not group.continues_with(item) or item.position >= self._spec.max_new_tokens:
            raise ProtocolError(f"group {item.group} was to be continued, which {self._name} does not have like that")
        group.kept.append(ids[:, 0].to(stage.stage.device))
        group.position = item.position
        return group

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Compute under the lock, then let a throttled device's time pass before anything is sent."""
        with computing(self._name):
            start_s, start_cpu_s = self._clock.now(), time.thread_time()
            yield
            cpu_s = time.thread_time() - start_cpu_s
        if self._throttle is not None:
            wall_s = self._clock.now() - start_s
            self._throttle.settle(wall_s=wall_s, cpu_s=cpu_s, now=self._clock.now)
