"""What `coterie doctor` says of battery, energy, temperature, memory pressure, the owner's work and sleep."""

import msgspec

from coterie.units import format_bytes


class Sense(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a worker may know of its device; `there`: it does."""

    topic: str
    there: bool
    found: str


def look_at_senses() -> tuple[Sense, ...]:
    """Ask every source once."""
    return (*_battery_and_temperature(), _energy(), _memory(), _activity(), _awake())


def _battery_and_temperature() -> tuple[Sense, Sense]:
    from coterie.clock import SystemClock  # noqa: PLC0415 - psutil may be what the doctor finds missing
    from coterie.measure.absent import Absent  # noqa: PLC0415 - as above
    from coterie.measure.battery import find_battery  # noqa: PLC0415 - as above
    from coterie.measure.temperature import find_temperature  # noqa: PLC0415 - as above

    battery = find_battery("auto", SystemClock())
    if isinstance(battery, Absent):
        charge = Sense(topic="battery", there=False, found=f"none: {battery.reason}")
        reading = None
    else:
        reading = battery.read()
        battery.close()
        said = "says nothing yet" if reading is None else f"{reading.charge:.0%}"
        plugged = (
            ""
            if reading is None or reading.on_power is None
            else f", plugged in: {'yes' if reading.on_power else 'no'}"
        )
        watts = "" if reading is None or reading.watts is None else f", {reading.watts:.1f} W"
        charge = Sense(topic="battery", there=True, found=f"{battery.name}: {said}{plugged}{watts}")
    celsius = None if reading is None else reading.celsius
    thermometer = find_temperature(None if celsius is None else lambda: celsius)
    if isinstance(thermometer, Absent):
        return charge, Sense(topic="temperature", there=False, found=f"not readable: {thermometer.reason}")
    return charge, Sense(topic="temperature", there=True, found=f"{thermometer.name}: {thermometer.read() or 0:.0f} °C")


def _energy() -> Sense:
    from coterie.measure.absent import Absent  # noqa: PLC0415 - as above
    from coterie.measure.power import find_rapl  # noqa: PLC0415 - as above

    rapl = find_rapl()
    if isinstance(rapl, Absent):
        return Sense(
            topic="energy",
            there=False,
            found=f"not measured by the processor ({rapl.reason}): by the battery while it is in use and tells watts, "
            "else assumed from `--watts`",
        )
    return Sense(topic="energy", there=True, found="measured by the processor's counters")


def _memory() -> Sense:
    from coterie.measure.pressure import SystemMemory  # noqa: PLC0415 - as above

    reading = SystemMemory(None).read()
    stalls = "the kernel counts no stalls" if reading.stalled is None else f"stalled {reading.stalled:.0%} of the time"
    return Sense(
        topic="memory pressure",
        there=True,
        found=f"a worker could take {format_bytes(reading.available_bytes)} more now; {stalls}",
    )


def _activity() -> Sense:
    from coterie.measure.activity import find_idle_time  # noqa: PLC0415 - as above

    idle = find_idle_time()
    seconds = None if idle is None else idle.idle_s()
    if idle is None or seconds is None:
        return Sense(
            topic="owner's work",
            there=False,
            found="nobody says when the device was last touched; `--yield` goes by what other programs compute",
        )
    return Sense(topic="owner's work", there=True, found=f"last touched {seconds:.0f} s ago ({idle.name})")


def _awake() -> Sense:
    from coterie.measure.absent import Absent  # noqa: PLC0415 - as above
    from coterie.worker.keep_awake import find_waker  # noqa: PLC0415 - as above

    waker = find_waker()
    if isinstance(waker, Absent):
        return Sense(topic="keeping awake", there=False, found=f"not possible: {waker.reason}")
    return Sense(topic="keeping awake", there=True, found=f"by {waker.name}")
