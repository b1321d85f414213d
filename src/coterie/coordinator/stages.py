"""What stands: the stages of the plan in effect, the next one that takes its place, and where training goes on from."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import msgspec

from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.trained_state import TrainedState
from coterie.cluster.fault_messages import StandBy
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.commit_news import CommitNews
from coterie.coordinator.crew import Crew
from coterie.coordinator.departures import Departures
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.holders import Holders, units_of
from coterie.coordinator.job import Job
from coterie.coordinator.ledger import StepEntry
from coterie.coordinator.planning import next_request
from coterie.coordinator.replicas import Replica, ReplicaStore
from coterie.coordinator.replication import LOCAL_BYTES_PER_S, USUAL_BYTES_PER_S, replicate_every
from coterie.coordinator.session import Session
from coterie.coordinator.shards import trained_shapes
from coterie.coordinator.trainer import Trainer
from coterie.errors import CoterieError, DoesNotFitError, RecipeError
from coterie.ids import WorkerId
from coterie.measure.budget import memory_budget
from coterie.planner import make_plan
from coterie.planner.plan import Plan
from coterie.planner.rebalance import unit_bytes
from coterie.profiles.cluster_profile import ClusterProfile


class Stages:
    """The stages of one run, plan after plan, and where training can go on from.

    Args:
        first_step: Optimizer steps done when the run begins, which is where it goes on from before the first commit.
        state: The trained state then; None: the model as it is.
        save: Makes a checkpoint, with no step under way.

    Attributes:
        step: Optimizer steps done.
        sent_bytes: Of tensors, when the last plan took effect.
        kept_bytes: Of those that stages had already.
        trainer: Of the plan in effect, once it `stands`.
        on_commit: Told of each replica that has become whole.
        on_step: Told of each step that has ended, in order.
        stop_requested: The user wants to stop.
    """

    def __init__(  # noqa: PLR0913 - what a run is made of, most of it named at the call
        self,
        job: Job,
        session: Session,
        *,
        books: Bookkeeper,
        feeder: TrainingFeeder,
        cluster: ClusterProfile,
        plan: Plan,
        first_step: int,
        state: TrainedState | None,
    ) -> None:
        self._job = job
        self._session = session
        self._members = session.members
        self._clock = session.clock
        self._books = books
        self._feeder = feeder
        self._first_step = first_step
        self._state = state
        self._replicas = ReplicaStore(trained_shapes(job.anatomy), self._committed, steps_done=first_step)
        self._news = CommitNews()
        self._version = 0
        self._every = 0
        self.unit_bytes = unit_bytes(job.model_profile, job.optimizer.state_copies)
        self.holders = Holders(self.unit_bytes)
        self.crew = Crew(cluster)
        self.departures = Departures()
        self.step = first_step
        self.steps_of_plan = 0
        self.stand_s = 0.0
        self.sent_bytes = 0
        self.kept_bytes = 0
        self.stop_requested = False
        self.plan = plan
        self.stands = False
        self.trainer: Trainer
        self.on_commit: Callable[[Replica], None] = lambda _replica: None
        self.on_step: list[Callable[[int, StepEntry], None]] = []
        self.save: Callable[[], Awaitable[Checkpoint]]

    # ---- where training can go on from

    @property
    def committed(self) -> int:
        """The step from which training would go on if a worker were lost now."""
        return self._first_step if self._state is None else self._state.step

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is a place to go on from like any replica."""
        if checkpoint.step > self.committed:
            self._state = checkpoint

    def rewind(self) -> int:
        """Go back to the last commit; how many steps are done again for that."""
        again = self._books.rewind(self.committed)
        self.step = self.committed
        self._replicas.done(self.step)
        return again

    def _committed(self, replica: Replica) -> None:
        if self._state is None or replica.step >= self._state.step:
            self._state = replica
        if self.stands:
            self._news.post(self.trainer.tell, replica.step)
        self.on_commit(replica)

    async def _commit_now(self) -> None:
        """With no step under way: what is done is kept, so that nothing is done again."""
        if self.committed >= self.step:
            return
        if self._every:
            await self.trainer.save_state(self.step, lambda unit, frame: self._replicas.put(self.step, unit, frame))
        else:
            self.saved(await self.save())

    # ---- plans

    async def begin(self) -> None:
        """Let the first plan take effect; see `stand`."""
        await self.stand(self.plan, again=False)

    async def stand(self, plan: Plan, *, again: bool = True) -> None:
        """Let a plan take effect: stages are built, and training goes on from the last commit.

        Raises:
            DoesNotFitError: Those that are left cannot hold the model.
            CoterieError: A worker failed, left or fell silent meanwhile.
        """
        start_s = self._clock.now()
        while again and not self.usable.issuperset(stage.worker for stage in plan.stages):
            plan = await self.plan_now()  # somebody has gone since it was made
        plan = msgspec.structs.replace(plan, version=self.next_version)
        self._version = plan.version
        stages = units_of(plan)
        self._members.go_on_without(stages, plan.version)
        self._replicas.restart()
        self._every = self._replicate_every(plan)
        if again:
            await self._tell_spares(plan.version, stages, "the plan has no layers for it")
        handover = self.holders.hand_over(plan, self._every, owners=self._members.owner_workers, rates=self.crew.rates)
        ready = await self._session.hand_out(plan, self._state, handover=handover)
        with_disks = {worker for worker, member in self._members.by_id.items() if member.hello.keeps_shards}
        self.holders.stands(plan, handover, with_disks=with_disks)
        handed_out = self._session.handed_out
        self.sent_bytes = sum(one.sent_bytes for one in handed_out.values())
        self.kept_bytes = self.holders.kept_bytes(handover, handed_out)
        if again:
            self._books.planned(plan)
            self.crew.planned()
        self.crew.have_held(stages)
        self._books.stages_stand(ready)
        self._begin(plan)
        self.stand_s = self._clock.now() - start_s

    def _begin(self, plan: Plan) -> None:
        self.plan = plan
        self.steps_of_plan = 0
        trainer = Trainer(self._members, plan, self._feeder, self._step_done, self.step)
        trainer.on_replica = self._replicas.put
        trainer.stop_requested = self.stop_requested
        self.trainer, self.stands = trainer, True
        self._session.pausing.steer(trainer, self._members.wake, on_rested=self._books.training_begins)

    def _step_done(self, step: int, entry: StepEntry) -> None:
        self.step = step + 1
        self.steps_of_plan += 1
        self._books.step(step, entry)
        for listener in self.on_step:
            listener(step, entry)
        self._replicas.done(self.step)

    def _replicate_every(self, plan: Plan) -> int:
        free_bytes = memory_budget(None, device_type="cpu").bytes
        cluster = self._job.recipe.cluster
        return replicate_every(
            plan,
            self.unit_bytes,
            wanted=cluster.replicate_every,
            free_bytes=free_bytes,
            bytes_per_s=LOCAL_BYTES_PER_S if cluster.all_local else USUAL_BYTES_PER_S,
        )

    async def _tell_spares(self, version: int, staged: Collection[WorkerId], reason: str) -> None:
        spares = [member for worker, member in self._members.by_id.items() if worker not in staged]
        told = (member.send(StandBy(plan_version=version, reason=reason), plan_version=version) for member in spares)
        await asyncio.gather(*told, return_exceptions=True)  # one that is gone is noticed by its reader

    @property
    def next_version(self) -> int:
        """Of the next plan that takes effect."""
        return self._version + 1

    @property
    def usable(self) -> frozenset[WorkerId]:
        """Workers that a plan may use."""
        return (self.crew.workers & self._members.by_id.keys()) - self.departures.workers

    async def plan_now(self) -> Plan:
        """The best plan for whoever is in; those that are about to leave have a part in it only if it needs them.

        Raises:
            DoesNotFitError: They cannot hold the model.
            RecipeError: There are too few.
        """
        try:
            return await self.make_plan(self.usable)
        except (DoesNotFitError, RecipeError) as error:
            if not self.departures.due:
                raise
            self.keep_those_due(error)
        return await self.make_plan(self.usable)

    def keep_those_due(self, _error: CoterieError) -> None:
        """Nobody can take the layers of those that are about to leave: they stay for now."""
        self.departures.refuse()

    async def make_plan(self, workers: Collection[WorkerId]) -> Plan:
        """The best plan for some workers, as they are now.

        Raises:
            DoesNotFitError: They cannot hold the model.
            RecipeError: There are too few.
        """
        if not workers:
            raise DoesNotFitError("no worker is left")
        owners = self._members.owner_workers
        request = next_request(self._job, self.crew.cluster(workers), self.plan, owner_workers=owners)
        try:
            return await asyncio.to_thread(make_plan, request)
        except DoesNotFitError:
            if request.min_stages == 1:
                raise
        # Better on fewer devices than the recipe wants than not at all.
        return await asyncio.to_thread(make_plan, msgspec.structs.replace(request, min_stages=1))

    # ---- changes that can wait for the end of a step

    @property
    def is_flushing(self) -> bool:
        """Whether the pipeline is empty after every step."""
        return self.plan.schedule in ("flush", "gpipe")

    @property
    def is_broken_off(self) -> bool:
        """Whether the steps that are left wait for a change, or for word that there is none any more."""
        return self.stands and (self.trainer.break_requested or self.trainer.break_off)

    def break_off(self) -> None:
        """Something cannot wait: stop where no step is under way, or at once where that is too long to wait for."""
        if not self.stands:
            return  # whoever begins looks what is due before the first step
        if self.is_flushing or not self._every:
            self.trainer.break_requested = True
        else:
            self.trainer.break_off = True
        self._members.wake()

    async def move(self, plan: Plan) -> None:
        """Another plan takes effect, with nothing lost: what is done is committed first where no step is under way.

        Raises:
            CoterieError: A worker failed, left or fell silent meanwhile.
        """
        if not self.trainer.break_off:
            await self._commit_now()
        self.rewind()
        await self.stand(plan)

    def stop(self) -> None:
        """The user wants to stop, with a checkpoint."""
        self.stop_requested = self.trainer.stop_requested = True
        self._members.wake()
