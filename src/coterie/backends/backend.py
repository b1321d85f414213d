"""The protocol that every compute backend follows."""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from coterie.backends.shares import Array, Gradients, Inputs, Need, Outputs, Shape


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a backend really runs, as its driver says; never what was asked for.

    Attributes:
        name: Its name here, such as `torch`, `opencl` or `opencl:1` for a second device.
        device: The device's name by the driver.
        kind: What sort of device that is.
        driver: Library and driver with their versions.
        threads: Compute threads it takes of the processor; 0 if it takes none, or if nobody knows.
        weight_copies: How often it holds a share's weights in this process's memory, beside the arrays it is given.
    """

    name: str
    device: str
    kind: Literal["cpu", "gpu", "accelerator"]
    driver: str
    threads: int = 0
    weight_copies: int = 0


class Loaded(Protocol):
    """A share's weights on a backend."""

    @property
    def shape(self) -> Shape:
        """The share."""
        ...

    def release(self) -> None:
        """Give its memory back; a forward or backward that still needs it keeps it until then. Idempotent."""
        ...


class Saved(Protocol):
    """What one forward keeps for its backward. Several may be alive at once, of several versions of the weights."""

    def release(self) -> None:
        """Give its memory back: no backward will come. Idempotent; a backward does it by itself."""
        ...


class Backend(Protocol):
    """Computes shares. Used from one thread only, its own (`heads.pool`), from making it to `close`.

    Every method may raise `errors.BackendError`; the backend is then left out for the rest of the run.
    """

    @property
    def info(self) -> BackendInfo:
        """Where it runs."""
        ...

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> Loaded:
        """Take a share's weights. They are copied, or read in place until `release`: nobody changes them before.

        Args:
            shape: What they are the weights of.
            weights: By the names that the shape's docstring lists, float32, contiguous.
        """
        ...

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, Saved]:
        """Compute a share's part of the layer's output.

        Args:
            loaded: The weights, as they were loaded here.
            inputs: One micro-batch; the arrays are not changed until the backward has read them.
            inner: Whether `Outputs.inner` is wanted.
            keep: Whether a backward will come; without it `Saved` may be empty.
        """
        ...

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """Compute gradients from that of the share's output [B,T,E]; releases `saved`.

        Args:
            saved: Of the forward.
            gradient: That of `Outputs.y`.
            need: Which gradients to give.
            inner_gradient: That of `Outputs.inner`, added to what comes through the second product.
        """
        ...

    def trim(self) -> None:
        """Give back memory that is only kept for the next call."""
        ...

    def close(self) -> None:
        """End it and give back all it holds."""
        ...
