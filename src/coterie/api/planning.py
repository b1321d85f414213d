"""Plans without training: over devices that join, or the facts for devices that are only described."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from coterie.config.recipe import ClusterSection, LocalWorker, Recipe
from coterie.coordinator.job import Job, prepare_job
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.plan_facts import PlanFacts, keep_facts
from coterie.coordinator.run_data import run_data
from coterie.coordinator.session import Session
from coterie.coordinator.side_spec import backbone_spec
from coterie.ids import RunId
from coterie.local import LocalFront
from coterie.planner.plan import Plan
from coterie.profiles.cluster_profile import ClusterProfile

_T = TypeVar("_T")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its explanation, and how many optimizer steps the run would have."""

    plan: Plan
    explanation: str
    steps: int


def plan_run(recipe: Recipe, observer: RunObserver) -> Planned:
    """Let the recipe's workers join, measure them, plan, and let them go again.

    Raises:
        DoesNotFitError: No plan fits.
        CoterieError: Model, data or recipe are not usable, or a worker was lost.
    """
    job = _job(recipe, observer)
    plan, explanation = _with_workers(job, observer, lambda session: session.plan())
    return Planned(plan=plan, explanation=explanation, steps=job.total_steps)


def measure_facts(recipe: Recipe, observer: RunObserver) -> PlanFacts:
    """Count the model and measure this machine, by one worker with one thread; kept for the next command.

    Raises:
        CoterieError: Model, data or recipe are not usable.
    """
    alone = ClusterSection(
        local_workers=(LocalWorker(name="this machine"),), measure_again=recipe.cluster.measure_again
    )
    job = _job(msgspec.structs.replace(recipe, cluster=alone), observer)
    data = run_data(job)
    if recipe.train.mode == "side":
        job = _of_the_backbone(job)
    cluster: ClusterProfile = _with_workers(job, observer, lambda session: session.measure())
    facts = PlanFacts(model=job.model_profile, device=cluster.devices[0], data=data)
    keep_facts(recipe, facts)
    return facts


def _job(recipe: Recipe, observer: RunObserver) -> Job:
    job = prepare_job(recipe, RunId("plan"), observer.notice)
    for note in job.notes:
        observer.notice(note)
    return job


def _of_the_backbone(job: Job) -> Job:
    """What a device of a side-tuning run computes: it needs no server to be measured."""
    train = msgspec.structs.replace(job.recipe.train, mode="pipeline")
    recipe = msgspec.structs.replace(job.recipe, train=train)
    return msgspec.structs.replace(job, recipe=recipe, spec=backbone_spec(job.spec))


def _with_workers(job: Job, observer: RunObserver, work: Callable[[Session], Awaitable[_T]]) -> _T:
    """Do `work` while the recipe's workers are in."""
    with LocalFront(job.recipe.cluster, observer) as front:
        session = Session(job, front)
        front.end_with = session.end_with
        front.own_link = session.own_link

        async def gather_and_work() -> _T:
            await session.gather()
            return await work(session)

        return asyncio.run(session.run(gather_and_work))
