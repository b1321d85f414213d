"""Whether a backend still computes rightly in mid-run: one row of a share in torch too, now and then."""

import numpy as np

from coterie.backends.self_test import relative_error
from coterie.backends.shares import Array, Gradients, Need, Outputs
from coterie.backends.torch_backend import TorchBackend
from coterie.heads.dealing import row_of
from coterie.heads.part_job import PartJob

VERIFY_EVERY = 19
"""Every so many forwards of a backend, one row of its share is computed in torch too, and compared; later that row's
gradient. A prime: heads and neurons take turns, and an even number would always meet the same of them."""

VERIFIED = 1e-3
"""Relative difference up to which a backend is believed; those that work differ by some 1e-6."""


def is_finite(grads: Gradients) -> bool:
    """Whether all gradients are."""
    arrays = (*(() if grads.x is None else (grads.x,)), *grads.weights.values(), *grads.added.values())
    return all(has_only_numbers(array) for array in arrays)


def has_only_numbers(array: Array) -> bool:
    """Whether all entries are finite: by one product where it is, which reads them once and needs no memory."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.dot(flat, flat)
    # Large numbers have squares that are not finite.
    return bool(np.isfinite(product)) or bool(np.isfinite(array).all())


def wrong_row(torch: TorchBackend, job: PartJob, row: int | None, outputs: Outputs) -> str:
    """What is wrong with a row of a forward, or nothing; None: none is to be looked at."""
    if row is None:
        return ""
    right, _ = torch.forward(torch.load(job.shape, job.weights), row_of(job.inputs, row), keep=False)
    return _far_off(outputs.y[row : row + 1], right.y)


def wrong_gradient(
    torch: TorchBackend,
    job: PartJob,
    row: int | None,
    above: tuple[Array, Need, Array | None],
    grads: Gradients,
) -> str:
    """The same of a backward, by the gradient of that row's input, if anybody needs one.

    Args:
        torch: Computes it once more.
        job: The share.
        row: Of the micro-batch.
        above: The gradient of the outputs, what was needed, and the gradient of `Outputs.inner`.
        grads: What the backend gave.
    """
    gradient, need, inner = above
    if row is None or grads.x is None or not need.x:
        return ""
    own = slice(row, row + 1)
    _, saved = torch.forward(torch.load(job.shape, job.weights), row_of(job.inputs, row))
    inner = None if inner is None else np.ascontiguousarray(inner[own])
    right = torch.backward(saved, np.ascontiguousarray(gradient[own]), Need(weights=False), inner_gradient=inner)
    return _far_off(grads.x[own], right.x)


def _far_off(got: Array, right: Array | None) -> str:
    error = relative_error(got, right)
    return "" if error <= VERIFIED else f"it computed wrongly: {error:.1e} away from torch (at most {VERIFIED:.0e})"
