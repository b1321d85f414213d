"""What a stage tells about its work: once per micro-batch (last stage) and once per optimizer step (every stage)."""

import msgspec


class MicroBatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of one micro-batch, from the last stage. `loss_sum / loss_tokens` is its mean; both are 0 if it has none."""

    step: int
    micro_batch: int
    loss_sum: float
    loss_tokens: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on one stage.

    Attributes:
        step: Optimizer step of the run.
        forward_s, backward_s, update_s: Busy seconds by kind of action, throttling included, waiting excluded.
        wait_s: Seconds spent waiting for inputs, for the other stages' norms and for room in an output queue.
        cpu_s: CPU seconds of the compute thread in the busy time, and of the backends that it waited for.
        grad_norm: Global norm before clipping where `grad_norm_is_global`, else the norm of this stage's gradient
            (`stash` always; other schedules when clipping is off). The last update's, if the step had several.
        learning_rate: Of the last update.
        updates: Updates applied: 1, or one per micro-batch in `stash`; fewer where all labels were masked.
        weight_versions: Most versions of the trainable parameters alive at once in this step.
        stashed_bytes: Most bytes of versions beside the current one in this step.
        backend_busy_s: Where layers are shared among compute backends: busy seconds of each since the step before.
        backends_left_out: Backends that failed since the step before and are used no more, with the reason.
    """

    step: int
    forward_s: float
    backward_s: float
    update_s: float
    wait_s: float
    cpu_s: float
    grad_norm: float
    grad_norm_is_global: bool
    learning_rate: float
    updates: int
    weight_versions: int
    stashed_bytes: int
    backend_busy_s: dict[str, float] = {}
    backends_left_out: dict[str, str] = {}
