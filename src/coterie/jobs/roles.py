"""What a worker is in a run."""

from typing import Literal

WorkerRole = Literal["device", "server"]
"""A `device` runs layers of the model; the `server` of a side-tuning run trains the network beside it."""
