"""What this device knows of itself, put together from its sources: read on the network thread within a millisecond."""

from coterie.clock import Clock
from coterie.cluster.fault_messages import Vitals
from coterie.measure.absent import Absent
from coterie.measure.activity import Activity, ActivityReading, find_idle_time
from coterie.measure.battery import BatteryReading, find_battery
from coterie.measure.power import BatteryCounter, EnergyCounter, EnergyMeter, ModelCounter, find_rapl
from coterie.measure.pressure import MemoryReading, SystemMemory
from coterie.measure.simulated_battery import SIMULATED
from coterie.measure.temperature import find_temperature
from coterie.profiles.power import PowerModel
from coterie.worker.conditions import Seen
from coterie.worker.settings import WorkerSettings


class OwnVitals:
    """All sources of one device, for as long as its worker's process lives.

    Args:
        settings: The owner's.
        clock: Tells over which time energy and work are counted.

    Raises:
        UsageError: The simulated battery that the owner asks for is none.
    """

    def __init__(self, settings: WorkerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._battery = find_battery(settings.battery, clock)
        self._temperature = find_temperature(None if isinstance(self._battery, Absent) else self._battery_celsius)
        self._memory = SystemMemory(settings.memory_bytes, settings.device_type, settings.memory_file)
        self._activity = Activity(find_idle_time(), clock=clock) if settings.terms.yields_to is not None else None
        self._charge: BatteryReading | None = None
        self._meter = EnergyMeter(self._counters(), clock.now())
        self.latest: Vitals | None = None
        """As of the last `read`."""

    def _counters(self) -> tuple[EnergyCounter, ...]:
        """The processor's own first, then the battery's, then what its owner stated."""
        rapl = find_rapl()
        stated = self._settings.watts
        model = PowerModel() if stated is None else PowerModel(compute_w=stated)
        return (
            *(() if isinstance(rapl, Absent) else (rapl,)),
            BatteryCounter(lambda: self._charge, "simulated" if self._is_simulated else "battery"),
            ModelCounter(model, self._settings.threads),
        )

    @property
    def _is_simulated(self) -> bool:
        return self._settings.battery.startswith(SIMULATED)

    def _battery_celsius(self) -> float | None:
        return None if self._charge is None else self._charge.celsius

    def read(self) -> tuple[Seen, MemoryReading]:
        """Look at everything now."""
        charge = self._charge = None if isinstance(self._battery, Absent) else self._battery.read()
        energy = self._meter.read(self._clock.now())
        celsius = None if isinstance(self._temperature, Absent) else self._temperature.read()
        memory = self._memory.read()
        activity = ActivityReading(others_cores=0.0) if self._activity is None else self._activity.read()
        self.latest = Vitals(
            battery=None if charge is None else charge.charge,
            on_power=None if charge is None else charge.on_power,
            watts=energy.watts,
            joules=energy.joules,
            watts_source=energy.source,
            celsius=celsius,
            available_bytes=memory.available_bytes,
            reserve=self._settings.terms.min_battery,
            only_on_power=self._settings.terms.only_on_power,
        )
        seen = Seen(
            battery=self.latest.battery,
            on_power=self.latest.on_power,
            celsius=celsius,
            others_cores=activity.others_cores,
            idle_s=activity.idle_s,
        )
        return seen, memory

    def close(self) -> None:
        """End what reads in the background. Idempotent."""
        if not isinstance(self._battery, Absent):
            self._battery.close()
