"""What people are told of measurements: how long they take, and that earlier ones are used. Needs no torch."""

from coterie.profiles.cluster_profile import DeviceProfile
from coterie.units import counted

TAKES = "about 10-30 s unless it was measured for these shapes before"
"""What measuring a device costs, for people."""


def kept_note(name: str, profile: DeviceProfile, age_s: float) -> str:
    """That a device was not measured now, in a line."""
    when = f"{_age(age_s)} ago" if profile.measured_at_s else "before"
    return f"{name}: measured {when}, kept; --measure-again takes it anew"


def _age(seconds: float) -> str:
    """A time span in its largest unit: people need no more of it."""
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= unit_s:
            return counted(int(seconds // unit_s), unit)
    return counted(max(int(seconds), 1), "second")
