"""Attention between the projections on processors with OpenCL, a few rows of scores at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.backends.engine import Buffer, Heads
from coterie.backends.opencl_forms import Form, steps_up

_WORDS = np.dtype(
    [
        (name, np.int32)
        for name in ("heads", "groups", "tokens", "dims", "has_bias", "bias_row", "bias_head", "bias_token", "has_keep")
    ]
    + [(name, np.float32) for name in ("scale", "keep_scale")]
)

Start = Callable[..., None]


class OpenCLMixer:
    """See `engine.Mixer`. The kernels keep operands in the order that they read them in, in local memory.

    Args:
        form: Of the tiles.
        start: Starts a kernel: its name, its sizes, those of a group, its arguments.
        words: Puts numbers where kernels read them.
        local: Makes an argument of so many bytes of local memory.
        local_bytes: How much there is; on processors it is as large as a cache.
        nothing: In place of a buffer that there is none of.
    """

    def __init__(
        self,
        form: Form,
        start: Start,
        words: Callable[[npt.NDArray[Any]], Any],
        *,
        local: Callable[[int], Any],
        local_bytes: int,
        nothing: Buffer,
    ) -> None:
        self._form = form
        self._start = start
        self._words = words
        self._local = local
        self._local_bytes = local_bytes
        self._nothing = nothing

    def takes(self, heads: Heads) -> bool:
        """Whether what backward has at a time fits into local memory."""
        return max(self._forward_bytes(heads), self._backward_bytes(heads)) <= self._local_bytes

    def forward(self, heads: Heads, bias: Buffer | None, strides: tuple[int, int, int], inner: Buffer) -> None:
        """See `Mixer.forward`."""
        self._start(
            "mix_heads",
            (heads.heads, heads.rows),
            (1, 1),
            self._words_of(heads, bias, strides),
            *(one.handle for one in (heads.q, heads.k, heads.v, bias or self._nothing, heads.keep or self._nothing)),
            heads.probabilities.handle,
            inner.handle,
            self._local(self._forward_bytes(heads)),
        )

    def backward(self, heads: Heads, d_inner: Buffer, gradients: Mapping[str, Buffer]) -> None:
        """See `Mixer.backward`."""
        given = (heads.q, heads.k, heads.v, heads.keep or self._nothing, heads.probabilities, d_inner)
        self._start(
            "mix_heads_gradient",
            (heads.groups, heads.rows),
            (1, 1),
            self._words_of(heads),
            *(one.handle for one in (*given, gradients["q"], gradients["k"], gradients["v"])),
            self._local(self._backward_bytes(heads)),
        )

    def _words_of(self, heads: Heads, bias: Buffer | None = None, strides: tuple[int, int, int] = (0, 0, 0)) -> Any:
        words = np.zeros(1, _WORDS)
        sizes = (heads.heads, heads.groups, heads.tokens, heads.head_dim)
        words[0] = (*sizes, bias is not None, *strides, heads.keep is not None, heads.scale, heads.keep_scale)
        return self._words(words)

    def _panels(self, heads: Heads) -> tuple[int, int]:
        """Floats of [T,d] as panels of tokens, and as panels of dims."""
        columns, t, d = self._form.columns, heads.tokens, heads.head_dim
        return steps_up(t, columns) * columns * d, steps_up(d, columns) * columns * t

    def _forward_bytes(self, heads: Heads) -> int:
        keys, values = self._panels(heads)
        return 4 * (keys + values + self._form.rows * heads.tokens)

    def _backward_bytes(self, heads: Heads) -> int:
        values, keys = self._panels(heads)
        return 4 * (values + 3 * keys + 2 * self._form.score_rows * heads.tokens)
