"""The version of what coordinator and workers say to each other."""

from typing import Final

WIRE_VERSION: Final = 4
"""Raised with every change of `coterie.cluster.messages` that an older peer would misread."""
