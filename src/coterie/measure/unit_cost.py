"""What one forward and backward of a stage costs in bytes and FLOPs, counted while it runs on fake or real tensors.

On fake tensors nothing is computed and no memory is needed, but torch picks the same kernels as on a real CPU. That is
why the meta device is not used for this: there, attention without dropout would be counted by another kernel, which
saves the whole attention matrix.
"""

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from coterie.measure.live_bytes import LiveBytes, SavedBytes
from coterie.models import RandomKey, StageModule
from coterie.tasks.cross_entropy import cross_entropy_sum

_FLOAT32_BYTES = 4
_KEY = RandomKey(seed=0, step=0, micro_batch=0)
_FORWARD_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - how torch names kernels
_BACKWARD_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - the same


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, one micro-batch.

    Attributes:
        saved: Bytes that autograd keeps, without parameters and without `inputs`.
        inputs: Bytes of the token ids and the mask.
        output: Bytes of what the stage returns, as float32: hidden states, or the loss.
        transient: Most bytes alive at once in forward or backward beyond parameters, gradients, the stage's input, what
            is kept, and the output's gradient, where gradients are added to existing ones.
        fresh_transient: The same where there are no gradients yet; each counts in full from the start.
    """

    saved: int
    inputs: int
    output: int
    transient: int
    fresh_transient: int


def example_inputs(rows: int, tokens: int) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward, [B, T]: ids that every vocabulary has, and a mask.

    One token is padding, as somewhere in every real batch: models leave out the mask where there is none.
    """
    ids = torch.arange(rows * tokens).remainder(7).reshape(rows, tokens)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    if tokens > 1:
        mask[0, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(logits: Tensor) -> Tensor:
    """A stand-in for any task's loss over logits [B, T, C] or [B, C]: the cross-entropy that tasks take."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return cross_entropy_sum(logits, labels)


def run_forward(stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
    """The stage's output [B, T, D]; for the last stage the loss, a scalar."""
    output = stage.forward(inputs, hidden, _KEY)
    return loss_of(output) if stage.is_last else output


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Run the backward of a stage whose output depends on something trained; `gradient` is the output's, [B, T, D]."""
    if output.requires_grad:
        torch.autograd.backward(output, gradient)


def count_stage(stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor | None) -> StageCost:
    """Run the stage forward and backward twice, without existing gradients and with them, and count.

    Args:
        stage: On the CPU, its tensors real or, in a fake tensor mode, fake.
        inputs: See `example_inputs`.
        hidden: Input [B, T, D], with `requires_grad` where its gradient goes down; None for the first stage.
    """
    trained = stage.trainable().values()
    for parameter in trained:
        parameter.grad = None
    fresh = _count_once(stage, inputs, hidden)
    accumulating = fresh
    if any(parameter.grad is not None for parameter in trained):
        accumulating = _count_once(stage, inputs, hidden)
    return StageCost(
        saved=fresh.saved,
        inputs=sum(tensor.nbytes for tensor in inputs.values()),
        output=fresh.output,
        transient=accumulating.transient,
        fresh_transient=fresh.transient,
    )


def saved_bytes(stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor | None) -> int:
    """What autograd keeps of one forward, in bytes, without parameters and `inputs`."""
    saved = SavedBytes(_existing(stage, inputs))
    with saved.hooks():
        output = run_forward(stage, inputs, _received(hidden))
    del output
    return saved.total_bytes


def count_flops(stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor | None) -> tuple[int, int]:
    """Multiply-adds x 2 of the matrix products and attention kernels of one forward, and of its backward."""
    counter = FlopCounterMode(
        display=False, custom_mapping={_FORWARD_KERNEL: _attention_flops, _BACKWARD_KERNEL: _attention_backward_flops}
    )
    with counter:
        output = run_forward(stage, inputs, _received(hidden))
        forward_flops = counter.get_total_flops()
        run_backward(output, torch.ones_like(output))
    return forward_flops, counter.get_total_flops() - forward_flops


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one forward and backward, as in `StageCost`."""

    saved: int
    output: int
    transient: int


def _count_once(stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor | None) -> _Run:
    trained = list(stage.trainable().values())
    missing_gradients = sum(parameter.nbytes for parameter in trained if parameter.grad is None)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    existing = _existing(stage, inputs)
    received = _received(hidden)
    saved = SavedBytes(existing)
    with LiveBytes() as live:
        live.ignore([*existing, *gradients] if received is None else [*existing, *gradients, received])
        with saved.hooks():
            output = run_forward(stage, inputs, received)
        kept = saved.total_bytes
        saved.forget()
        forward_transient = live.peak_bytes - live.now_bytes
        gradient = torch.ones_like(output)
        before = live.mark()
        run_backward(output, gradient)
        backward_transient = live.peak_bytes - before - missing_gradients
    return _Run(
        saved=kept,
        output=output.numel() * _FLOAT32_BYTES,
        transient=max(forward_transient, backward_transient, 0),
    )


def _existing(stage: StageModule, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers(), *inputs.values()]


def _received(hidden: Tensor | None) -> Tensor | None:
    """A leaf of the graph, as the executor makes it of what arrives."""
    return None if hidden is None else hidden.detach().requires_grad_(hidden.requires_grad)


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """FLOPs of torch's CPU attention kernel, which its own counter does not know."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call] # torch leaves it untyped


def _attention_backward_flops(
    gradient: tuple[int, ...],
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *_: object,
    **__: object,
) -> int:
    """The same for its backward."""
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call] # as above
