"""Names that must not be mixed up, each a type of its own."""

from typing import NewType

RunId = NewType("RunId", str)
"""One training run, across resumes."""

WorkerId = NewType("WorkerId", str)
"""One worker process on one device, unique within a run; the coordinator gives it out."""

COORDINATOR = WorkerId("coordinator")
"""The address of the coordinator in a frame's `source` or `target`."""
