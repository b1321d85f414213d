"""Text generated for every row of a split: in this process alone, or by a pipeline of workers, group by group."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from coterie.cluster.messages import BATCH, PREDICTIONS, Generate, GenerationBody, StepDone, pack
from coterie.coordinator.feeding import Audience, audiences, without_ids
from coterie.coordinator.job import Job
from coterie.coordinator.member import Member
from coterie.coordinator.members import Members
from coterie.coordinator.prompt_groups import PromptGroup, Prompts
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR
from coterie.models.frozen_weights import PackedWeights
from coterie.models.stage import build_stage
from coterie.planner.plan import Plan
from coterie.tasks.examples import IntArray
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame, FrameHeader, TensorSpec

GENERATION_STEPS = 1 << 41
"""What is asked of the stages is numbered from here on, beyond training's steps and evaluation's micro-batches."""

Generated = dict[int, tuple[int, ...]]
"""By row the tokens that were generated, a stop included."""

Progress = Callable[[int, int], None]
"""Is told how many rows of how many are done."""


def generate_here(job: Job, prompts: Prompts, rows: int, progress: Progress) -> Generated:
    """Continue all prompts in this process, with the whole model, in groups of `rows`.

    Raises:
        ModelError: The weights cannot be read.
        NonFiniteLossError: A logit is not a number.
    """
    from coterie.models.generation import GenerationStage  # noqa: PLC0415 - loads transformers
    from coterie.pipeline.sampling import next_tokens  # noqa: PLC0415 - beside it
    from coterie.sidetuning.inference import attach_side_network  # noqa: PLC0415 - as above

    weights = PackedWeights(job.weights, job.spec)
    whole = build_stage(job.spec, 0, job.anatomy.unit_count, weights)
    if job.side is not None:
        attach_side_network(whole.module, job.side)
    stage = GenerationStage(whole)
    found: Generated = {}
    for group in prompts.groups(rows):
        ids, mask = (None if array is None else torch.from_numpy(array) for array in group.start())
        assert ids is not None
        kept = stage.begin(ids, mask, prompts.spec.max_new_tokens)
        while True:
            logits = stage.forward(kept, None)
            group.take(next_tokens(logits, prompts.spec, rows=group.rows, position=group.position).numpy())
            if group.is_done:
                break
            kept.append(torch.from_numpy(group.newest[:, 0].copy()))
        found |= _of(group)
        progress(len(found), len(prompts.ids))
    return found


class PipelineGeneration:
    """Generation over the stages of a plan, which stand already.

    As many groups are under way as the plan has micro-batches, so that every stage has one to work on while the tokens
    of another are on their way back.
    """

    def __init__(self, members: Members, plan: Plan, prompts: Prompts, *, vocabulary: int) -> None:
        """`vocabulary`: how many tokens the model knows."""
        self._vocabulary = vocabulary
        self._members = members
        self._plan = plan
        self._prompts = prompts
        self._stages: tuple[Member, ...] = tuple(members.by_id[stage.worker] for stage in plan.stages)
        self._audiences = audiences(plan, [member.is_owner for member in self._stages])
        self._step = GENERATION_STEPS
        self._ended: list[int] = []

    async def run(self, progress: Progress) -> Generated:
        """Continue all prompts.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        message = Generate(spec=self._prompts.spec, first_step=self._step)
        await asyncio.gather(*(member.send(message) for member in self._stages))
        waiting = deque(self._prompts.groups(rows_of_a_group(self._plan, len(self._prompts.ids))))
        under_way: dict[int, PromptGroup] = {}
        found: Generated = {}
        while waiting or under_way:
            while waiting and len(under_way) < self._plan.micro_batches:
                group = waiting.popleft()
                under_way[await self._ask(group)] = group
            step, tokens = await self._next_tokens()
            if step not in under_way or tokens.shape != (len(under_way[step].rows),):
                raise ProtocolError(
                    f"tokens of shape {tokens.shape} came for step {step}, which does not wait for them"
                )
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary:
                raise ProtocolError(f"a generated token is none of the model's {self._vocabulary}")
            group = under_way.pop(step)
            group.take(tokens)
            if group.is_done:
                self._ended.append(group.number)
                found |= _of(group)
                progress(len(found), len(self._prompts.ids))
            else:
                under_way[await self._ask(group)] = group
        await self._send(GenerationBody(group=0, position=0, ended=tuple(self._ended), is_last=True), {})
        return found

    async def _ask(self, group: PromptGroup) -> int:
        """Let the stages continue a group by one token; the number under which its tokens will come."""
        arrays: dict[str, IntArray] = {"input_ids": group.newest}
        rows: tuple[int, ...] = ()
        if group.position == 0:
            rows = group.rows
            arrays["input_ids"], mask = group.start()
            arrays |= {} if mask is None else {"mask": mask}
        ended, self._ended = tuple(self._ended), []
        return await self._send(
            GenerationBody(group=group.number, position=group.position, rows=rows, ended=ended), arrays
        )

    async def _send(self, body: GenerationBody, arrays: Mapping[str, IntArray]) -> int:
        step, self._step = self._step, self._step + 1
        await asyncio.gather(
            *(
                member.send_frame(self._frame(audience, step, body, arrays))
                for member, audience in zip(self._stages, self._audiences, strict=True)
            )
        )
        return step

    def _frame(self, target: Audience, step: int, body: GenerationBody, arrays: Mapping[str, IntArray]) -> Frame:
        # A copy for each: a link may hold on to its buffer after the group has moved on.
        seen = arrays if target.sees_ids else without_ids(arrays)
        copies = {name: array.copy() for name, array in seen.items()}
        header = FrameHeader(
            kind=BATCH,
            source=COORDINATOR,
            target=target.worker,
            run=self._members.run,
            plan_version=self._plan.version,
            step=step,
            body=pack(body),
            tensors=tuple(
                TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, nbytes=array.nbytes)
                for name, array in copies.items()
            ),
        )
        return Frame(header, tuple(array.data.cast("B") for array in copies.values()))

    async def _next_tokens(self) -> tuple[int, IntArray]:
        while True:
            event = await self._members.next_event()
            if isinstance(event.message, StepDone):
                continue  # of an evaluation that has just ended: its losses are in, so nobody waits for this
            header = event.frame.header
            if header.kind != PREDICTIONS or len(event.frame.buffers) != 1:
                raise ProtocolError(f"{event.member.hello.name} sent {header.kind} where generated tokens were due")
            tokens: IntArray = decode(header.tensors[0], event.frame.buffers[0]).numpy()
            if tokens.dtype != np.int64:
                raise ProtocolError(f"{event.member.hello.name} sent tokens as {tokens.dtype}")
            return header.step, tokens


def rows_of_a_group(plan: Plan, rows: int) -> int:
    """Rows that a plan continues together: as many as it was made for, fewer if there would not be enough groups."""
    planned = -(-plan.batch_rows // plan.micro_batches)
    return max(min(planned, -(-rows // plan.micro_batches)), 1)


def _of(group: PromptGroup) -> Generated:
    pairs: Sequence[tuple[int, list[int]]] = list(zip(group.rows, group.generated, strict=True))
    return {row: tuple(tokens) for row, tokens in pairs}
