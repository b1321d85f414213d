"""The steps of a run from boundary to boundary, whatever comes between."""

from coterie.checkpoint.reading import Checkpoint
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.evaluation import evaluate_split
from coterie.coordinator.job import Job
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.saving import Saver
from coterie.coordinator.segments import boundaries, cut_segments
from coterie.coordinator.session import Session
from coterie.coordinator.supervisor import Supervisor
from coterie.coordinator.trainer import BrokenOffError
from coterie.coordinator.watch import Watch
from coterie.errors import CoterieError, InterruptedRunError, NonFiniteLossError


class Course:
    """All steps, with checkpoints and evaluations where they fall.

    What is interrupted by a loss or a change is done again from where training can go on.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run, put together once
        self,
        job: Job,
        session: Session,
        observer: RunObserver,
        *,
        books: Bookkeeper,
        supervisor: Supervisor,
        watch: Watch,
        saver: Saver,
    ) -> None:
        self._job = job
        self._session = session
        self._observer = observer
        self._books = books
        self._supervisor = supervisor
        self._watch = watch
        self._saver = saver
        self._checkpoint: Checkpoint | None = None
        self._evaluated: set[tuple[str, int]] = set()
        supervisor.save = self._save

    async def run(self, resume_from: Checkpoint | None) -> Checkpoint:
        """Let the first plan take effect and run all steps; the last checkpoint.

        Raises:
            InterruptedRunError: A stop was requested; a checkpoint was kept.
            CoterieError: What cannot be borne.
        """
        job, first_step = self._job, self._supervisor.step
        if resume_from is not None and self._saver.has(resume_from):
            self._checkpoint = resume_from
        points = boundaries(
            first_step,
            job.total_steps,
            steps_per_epoch=job.steps_per_epoch,
            checkpoint_every=job.recipe.run.checkpoint_every,
        )
        try:
            await self._supervisor.begin()
        except CoterieError as error:
            await self._supervisor.recover(self._supervisor.losses(error))
        self._session.stop.on_first = self._ask_to_stop
        for point in points or (job.total_steps,):  # resumed after the last step: only what comes after it is left
            while not await self._reach(point):
                pass
        self._session.pausing.refuse("its last step is done")
        assert self._checkpoint is not None
        return self._checkpoint

    async def _reach(self, point: int) -> bool:
        """Get as far as a boundary, and do what is due there; False if something came between."""
        supervisor = self._supervisor
        try:
            while self._watch.is_due:
                await self._watch.settle()
            if supervisor.step < point:
                self._books.training_begins()
                await supervisor.trainer.run(cut_segments(supervisor.plan.schedule, supervisor.step, point))
                if supervisor.step < point and not supervisor.stop_requested:
                    return False
            await self._at_boundary()
        except BrokenOffError:
            return False
        except CoterieError as error:
            await supervisor.recover(supervisor.losses(error))
            return False
        supervisor.went_on()
        return True

    async def _at_boundary(self) -> None:
        """No step is under way: save, end if that is wished, measure quality."""
        job, step = self._job, self._supervisor.step
        if self._checkpoint is None or self._checkpoint.step < step:
            await self._save()
        if self._supervisor.stop_requested and step < job.total_steps:
            raise InterruptedRunError(
                f"the run was stopped after step {step} of {job.total_steps}; a checkpoint was kept",
                hint="continue with --resume",
            )
        if step % job.steps_per_epoch == 0 or step == job.total_steps:
            if job.recipe.run.evaluate_every_epoch:
                await self._evaluate("dev", step)
            if step == job.total_steps:
                await self._evaluate("test", step)

    async def _save(self) -> Checkpoint:
        self._checkpoint = await self._saver.save(self._supervisor.trainer, self._supervisor.step)
        self._supervisor.saved(self._checkpoint)
        return self._checkpoint

    async def _evaluate(self, split: str, step: int) -> None:
        if split not in self._job.splits or (split, step) in self._evaluated:
            return
        try:
            record = await evaluate_split(self._supervisor.trainer, self._job, split, step, self._session.clock)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"after step {step} the loss on the {split} data is not finite", hint=error.hint
            ) from error
        self._evaluated.add((split, step))
        self._books.evaluation(record)

    def _ask_to_stop(self) -> bool:
        supervisor = self._supervisor
        when = ""
        if not supervisor.is_flushing:
            when = " at the next checkpoint or the end of the epoch, where the pipeline is empty"
        supervisor.stop()
        self._observer.notice(f"stopping{when}: a checkpoint is made first (ask again to stop at once)")
        return True
