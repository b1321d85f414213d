"""A battery that follows a formula or a file: for tests, emulated devices, and showing what would happen.

`80%,-2%/min` falls from 80 % by two a minute; `30%,-1%/s,6W,38C` also says what is drawn and how warm it is;
`40%,plugged` stays. `file:PATH` reads such a text anew each time, so that a test may change it in mid-run; a rate in it
counts from when the file was written.
"""

import re
from pathlib import Path

import msgspec

from coterie.clock import Clock
from coterie.errors import UsageError

SIMULATED = "simulated:"
FROM_FILE = "file:"

_PERCENT = re.compile(r"^(\d+(?:\.\d+)?)%$")
_RATE = re.compile(r"^([+-]?\d+(?:\.\d+)?)%/(s|min|h)$")
_WATTS = re.compile(r"^(\d+(?:\.\d+)?)W$")
_CELSIUS = re.compile(r"^(-?\d+(?:\.\d+)?)C$")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class SimulatedState(msgspec.Struct, frozen=True, kw_only=True):
    """A battery in numbers; see `BatteryReading`."""

    charge: float
    per_s: float = 0.0
    on_power: bool = False
    watts: float | None = None
    celsius: float | None = None


class SimulatedBattery:
    """Follows a text from the moment it is made.

    Args:
        text: The formula, or `file:PATH`.
        clock: Tells how long ago that was.

    Raises:
        UsageError: The text is no formula.
    """

    def __init__(self, text: str, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now()
        self._file: Path | None = None
        self._state: SimulatedState | None = None
        if text.startswith(FROM_FILE):
            self._file = Path(text.removeprefix(FROM_FILE))
        else:
            self._state = parse_battery(text)

    def state(self) -> SimulatedState | None:
        """The battery now; None while its file is absent or being written."""
        if self._file is not None:
            try:
                return _after(parse_battery(self._file.read_text()), self._clock.wall() - self._file.stat().st_mtime)
            except (OSError, UsageError):
                return None
        assert self._state is not None
        return _after(self._state, self._clock.now() - self._start_s)


def parse_battery(text: str) -> SimulatedState:
    """The battery that a text describes.

    Raises:
        UsageError: It describes none.
    """
    charge, *rest = (part.strip() for part in text.strip().split(","))
    start = _PERCENT.match(charge)
    if start is None or float(start[1]) > 100:
        raise _mistake(text, f"{charge!r} is no charge")
    state = SimulatedState(charge=float(start[1]) / 100)
    for part in rest:
        if (rate := _RATE.match(part)) is not None:
            state = msgspec.structs.replace(state, per_s=float(rate[1]) / 100 / _SECONDS[rate[2]])
        elif (watts := _WATTS.match(part)) is not None:
            state = msgspec.structs.replace(state, watts=float(watts[1]))
        elif (celsius := _CELSIUS.match(part)) is not None:
            state = msgspec.structs.replace(state, celsius=float(celsius[1]))
        elif part == "plugged":
            state = msgspec.structs.replace(state, on_power=True)
        else:
            raise _mistake(text, f"{part!r} is no rate, power or temperature")
    return state


def _after(state: SimulatedState, seconds: float) -> SimulatedState:
    charge = state.charge + state.per_s * max(seconds, 0.0)
    return msgspec.structs.replace(state, charge=min(max(charge, 0.0), 1.0))


def _mistake(text: str, what: str) -> UsageError:
    return UsageError(
        f"the simulated battery {text.strip()!r} cannot be read: {what}",
        hint="write simulated:80%,-2%/min, with 6W, 38C or plugged where wanted, or simulated:file:PATH",
    )
