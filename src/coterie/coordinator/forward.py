"""Predictions of a whole split: in this process alone, or forward through a pipeline of workers."""

import functools
import inspect
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from coterie.clock import Clock, SystemClock
from coterie.coordinator.evaluation import predict_split
from coterie.coordinator.feeders import EvaluationFeeder
from coterie.coordinator.generation import Generated, PipelineGeneration, generate_here
from coterie.coordinator.job import Job, vocabulary_size
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.one_device import as_tensors
from coterie.coordinator.session import Session
from coterie.coordinator.trainer import Trainer
from coterie.errors import NonFiniteLossError
from coterie.models.whole import load_whole_model
from coterie.planner.plan import Plan
from coterie.sidetuning.inference import SideBackbone
from coterie.tasks.examples import PredictedArray


class Predicted(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a model says about every row of a split.

    Attributes:
        rows: The task's predictions by row index, each (T,) or (), T including padding; none if only text is wanted.
        loss_sum: Over all labels of the split; 0 without labels.
        seconds: From the first micro-batch to the last answer.
        plan: The plan, if it was a pipeline.
    """

    rows: dict[int, PredictedArray]
    loss_sum: float
    seconds: float
    plan: Plan | None = None
    generated: Generated = {}


def predict_here(job: Job, split: str, observer: RunObserver, clock: Clock | None = None) -> Predicted:
    """Run a split through the whole, uncut model in this process, and continue its prompts if the job has any.

    Raises:
        ModelError: The weights cannot be read.
    """
    clock = clock or SystemClock()
    start_s = clock.now()
    predicted, loss_sum = _logits_here(job, split, observer) if job.wants_logits else ({}, 0.0)
    generated: Generated = {}
    if job.prompts is not None:
        progress = functools.partial(observer.advanced, "answered")
        generated = generate_here(job, job.prompts, job.recipe.train.batch_rows, progress)
    return Predicted(rows=predicted, loss_sum=loss_sum, seconds=clock.now() - start_s, generated=generated)


def _logits_here(job: Job, split: str, observer: RunObserver) -> tuple[dict[int, PredictedArray], float]:
    logits_of = _model_here(job)
    feeder = EvaluationFeeder(job, split, micro_batches=1)
    predicted: dict[int, PredictedArray] = {}
    loss_sum = 0.0
    with torch.inference_mode():
        for step in range(feeder.steps):
            (fed,) = feeder.micro_batches(step)
            batch = as_tensors(step, 0, fed)
            assert batch.labels is not None
            logits = logits_of(batch.inputs)
            loss_sum += float(job.task.loss_sum(logits, batch.labels))
            predicted.update(zip(feeder.rows(step), job.task.predictions(logits).numpy(), strict=True))
            observer.advanced("predicted", len(predicted), len(job.splits[split].rows))
    return predicted, loss_sum


def _model_here(job: Job) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The whole model, with its side network if it has one: from a batch's inputs [B, T] to its logits."""
    model = load_whole_model(job.spec, job.weights).eval()
    if job.side is not None:
        return SideBackbone(model, job.spec, job.weights, job.side).logits
    known = inspect.signature(model.forward).parameters

    def logits(inputs: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = model(**{name: tensor for name, tensor in inputs.items() if name in known}).logits
        return found

    return logits


class ForwardRun:
    """One split through a pipeline of whichever workers join; `session` is what may be ended from outside."""

    def __init__(self, job: Job, split: str, observer: RunObserver, *, clock: Clock | None = None) -> None:
        self._job = job
        self._split = split
        self._observer = observer
        self.session = Session(job, observer, clock=clock)

    async def execute(self) -> Predicted:
        """Run it.

        Raises:
            CoterieError: What ended the run.
        """
        return await self.session.run(self._predict)

    async def _predict(self) -> Predicted:
        session, clock = self.session, self.session.clock
        await session.gather()
        plan, explanation = await session.plan()
        feeder = EvaluationFeeder(self._job, self._split, plan.micro_batches)
        self._observer.planned(plan, explanation, feeder.steps)
        trainer = Trainer(session.members, plan, feeder, lambda _step, _entry: None)
        await session.hand_out(plan, None)
        start_s = clock.now()
        rows, loss_sum = await self._logits(trainer) if self._job.wants_logits else ({}, 0.0)
        generated: Generated = {}
        if self._job.prompts is not None:
            vocabulary = vocabulary_size(self._job.anatomy)
            generation = PipelineGeneration(session.members, plan, self._job.prompts, vocabulary=vocabulary)
            generated = await generation.run(functools.partial(self._observer.advanced, "answered"))
        return Predicted(rows=rows, loss_sum=loss_sum, seconds=clock.now() - start_s, plan=plan, generated=generated)

    async def _logits(self, trainer: Trainer) -> tuple[dict[int, PredictedArray], float]:
        progress = functools.partial(self._observer.advanced, "predicted")
        try:
            return await predict_split(trainer, self._job, self._split, progress)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"the loss on the {self._split} data is not finite",
                hint="the model's weights are damaged: train it again",
            ) from error
