"""The words of a schedule: actions, and the schedule as one tuple of them per stage."""

from typing import Literal

import msgspec

ScheduleKind = Literal["flush", "gpipe", "stash", "2bw", "forward"]
ActionKind = Literal["F", "B", "U"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a stage does.

    Attributes:
        kind: `F` forward, `B` backward, `U` optimizer update.
        step: Optimizer step within the segment, from 0 (a step is one mini-batch of `micro_batches` micro-batches).
        micro_batch: Micro-batch within the step, from 0. For `U`: the last micro-batch whose gradient it applies.
        weight_version: Versions are counted per stage from 0 at the segment's start, one more with each update. For
            `F`: the version it computes with (the newest, except under `2bw`, where it may be the one before). For `B`:
            the version its forward used. For `U`: the version it makes.
    """

    kind: ActionKind
    step: int
    micro_batch: int
    weight_version: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What every stage does over one segment: `steps` optimizer steps between two points where the pipeline is empty.

    `actions[s]` is stage s's order. `flush` and `gpipe` are empty after every step anyway; `stash` and `2bw` keep the
    pipeline full over the whole segment.
    """

    kind: ScheduleKind
    stages: int
    micro_batches: int
    steps: int
    actions: tuple[tuple[Action, ...], ...]
