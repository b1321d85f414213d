"""How parameters move: optimizer, clipping, and the learning rate over the run."""

import math
from typing import Literal

import msgspec


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the optimizer; equal on every stage.

    Warm-up and decay are functions of the samples seen, not of a stage's update count, so that equal epochs see equal
    learning rates in every schedule (`stash` updates once per micro-batch; METHODS.md 1, [ours]).

    Attributes:
        warmup_samples: Rows over which the rate rises linearly from 0.
        total_samples: Rows of the whole run; where `linear` and `cosine` reach 0.
        max_grad_norm: Global-norm clipping threshold; 0 switches it off.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    max_grad_norm: float = 1.0
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_samples: int = 0
    total_samples: int = 0

    def learning_rate_at(self, samples_seen: int) -> float:
        """The rate for an update whose rows start at `samples_seen` of the run."""
        if samples_seen < self.warmup_samples:
            return self.learning_rate * samples_seen / self.warmup_samples
        if self.lr_schedule == "constant" or self.total_samples <= self.warmup_samples:
            return self.learning_rate
        done = (samples_seen - self.warmup_samples) / (self.total_samples - self.warmup_samples)
        done = min(max(done, 0.0), 1.0)
        if self.lr_schedule == "linear":
            return self.learning_rate * (1.0 - done)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))

    @property
    def state_copies(self) -> int:
        """Float32 copies of every trained parameter that the optimizer keeps."""
        if self.name == "adamw":
            return 2
        return 1 if self.momentum else 0
