"""What one backend is asked for: its share of one layer and micro-batch."""

from collections.abc import Hashable, Mapping

import msgspec

from coterie.backends.shares import Array, Inputs, Shape
from coterie.heads.dealing import computed_as, part_inputs, part_weights
from coterie.profiles.backend_profile import Strategy


class PartJob(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One backend's share of one layer and micro-batch.

    Attributes:
        backend: Who is to compute it.
        shape: The share.
        weights: Its weights; not changed before the backward has been run.
        slot: The same for the same share of the same layer: a backend keeps one version of it.
        version: Changes when the weights do.
        inputs: Its inputs.
        strategy: All at once, or KV group by KV group.
        inner: Whether `Outputs.inner` is wanted.
        keep: Whether a backward will come.
    """

    backend: str
    shape: Shape
    weights: Mapping[str, Array]
    slot: Hashable
    version: Hashable
    inputs: Inputs
    strategy: Strategy = "fused"
    inner: bool = False
    keep: bool = True


def shapes_of(job: PartJob) -> list[Shape]:
    """What its backend computes one after the other."""
    return computed_as(job.shape, job.strategy)


def weights_of(job: PartJob) -> list[Mapping[str, Array]]:
    """The weights of each."""
    each = range(len(shapes_of(job)))
    return [part_weights(job.shape, job.weights, each[i : i + 1]) for i in each] if len(each) > 1 else [job.weights]


def inputs_of(job: PartJob) -> list[Inputs]:
    """The inputs of each."""
    each = range(len(shapes_of(job)))
    return [part_inputs(job.shape, job.inputs, each[i : i + 1]) for i in each] if len(each) > 1 else [job.inputs]
