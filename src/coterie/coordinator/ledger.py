"""What has been reported of every optimizer step: losses by the last stage, work by all."""

from coterie.cluster.messages import MicroBatchDone, StepDone
from coterie.ids import WorkerId


class StepEntry:
    """One step, filled as reports arrive."""

    def __init__(self) -> None:
        self.loss_sums: dict[int, float] = {}
        self.loss_tokens: dict[int, int] = {}
        self.done: dict[WorkerId, StepDone] = {}

    @property
    def loss(self) -> float:
        """Mean loss over the step's loss tokens, summed in micro-batch order; 0 if all labels are masked."""
        tokens = sum(self.loss_tokens.values())
        return sum(self.loss_sums[index] for index in sorted(self.loss_sums)) / tokens if tokens else 0.0


class Ledger:
    """Steps under way. Reports of a step may arrive in any order between workers, in order from each."""

    def __init__(self, workers: tuple[WorkerId, ...], first_step: int = 0) -> None:
        self._workers = workers
        self._entries: dict[int, StepEntry] = {}
        self._next = first_step

    def micro_batch_done(self, message: MicroBatchDone) -> None:
        """Note a micro-batch's loss; one of a step that is over, said twice, changes nothing."""
        if message.step < self._next:
            return
        entry = self._entries.setdefault(message.step, StepEntry())
        entry.loss_sums[message.micro_batch] = message.loss_sum
        entry.loss_tokens[message.micro_batch] = message.loss_tokens

    def step_done(self, worker: WorkerId, message: StepDone) -> StepEntry | None:
        """Note that a worker has ended a step; the whole entry, once, when all have."""
        if message.step < self._next or worker not in self._workers:
            return None
        entry = self._entries.setdefault(message.step, StepEntry())
        entry.done[worker] = message
        if len(entry.done) < len(self._workers):
            return None
        self._next = message.step + 1
        return self._entries.pop(message.step)
