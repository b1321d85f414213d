"""Looks after the device while its worker is in a run: memory, the owner's terms, the owner's work."""

from typing import Protocol

import msgspec

from coterie.clock import Clock
from coterie.cluster.fault_messages import Leaving, Vitals
from coterie.cluster.message import Message
from coterie.cluster.messages import Assign, Goodbye
from coterie.logs import get_logger
from coterie.measure.budget import MemoryBudget
from coterie.measure.process_memory import peak_rss_bytes
from coterie.units import format_bytes
from coterie.worker.conditions import OwnerState, Verdict, broken_term, consider, describe
from coterie.worker.keep_awake import KeepAwake
from coterie.worker.memory_watch import Rung, WatchState, decide, noticed, rungs_of
from coterie.worker.own_device import OwnDevice
from coterie.worker.vitals import OwnVitals

log = get_logger(__name__)

LOOK_S = 0.5
"""Between two looks: memory can go within seconds, and a look takes about a millisecond."""

PATIENCE_S = 120.0
"""A device that asks to leave waits so long for its layers to be moved; then it goes, whatever becomes of the run."""


class Running(Protocol):
    """The stage that runs now, as far as it can be changed while it does."""

    assign: Assign

    @property
    def recomputes(self) -> bool:
        """Whether it does so now; also by itself, after memory has run out in a forward."""
        ...

    def adapt(self, *, recompute: bool, in_flight: int) -> None:
        """Recompute from the next micro-batch on or not; hold so many in flight from the next step on."""
        ...

    def set_speed(self, speed: float) -> None:
        """Compute at this share of a core's speed from the next action on."""
        ...


class DeviceWatch:
    """Decides at every `look` and acts on the stage; what concerns the coordinator is returned."""

    def __init__(self, device: OwnDevice, vitals: OwnVitals, awake: KeepAwake, clock: Clock) -> None:
        self._device = device
        self._vitals = vitals
        self._awake = awake
        self._clock = clock
        self._terms = device.settings.terms
        self._owner = OwnerState()
        self._verdict = Verdict(share=self._terms.share)
        self._memory = WatchState()
        self._rungs: tuple[Rung, ...] = ()
        self._excess_bytes = 0
        self._watched: Running | None = None
        self._asked_at_s: float | None = None

    @property
    def vitals(self) -> Vitals | None:
        """How the device is, as of the last look."""
        return self._vitals.latest

    @property
    def speed(self) -> float:
        """Share of a core's speed that the worker may take now."""
        return self._device.settings.speed * self._verdict.share

    def close(self) -> None:
        """Let the machine sleep, and end what reads in the background. Idempotent."""
        self._awake.release()
        self._vitals.close()

    def forbids(self) -> str:
        """The owner's term that does not hold now; empty if the worker may begin."""
        seen, _ = self._vitals.read()
        return broken_term(self._terms, seen)

    def joined(self) -> None:
        """A stay with a coordinator begins, which has heard nothing yet."""
        self._asked_at_s = None
        self._memory = WatchState()
        self._watched = None

    def look(self, running: Running | None, *, computes: bool) -> tuple[Message, ...]:
        """Look at the device, act on what runs, and say what the coordinator must know.

        Args:
            running: The stage that is built; None: there is none.
            computes: Others rely on this worker, so that the machine must stay awake.

        Returns:
            `Leaving` and `MemoryLow` messages; or a `Goodbye`, after which the worker is to end: nobody relies on it,
            or it has waited for long enough.
        """
        now_s = self._clock.now()
        seen, memory = self._vitals.read()
        self._owner, verdict = consider(self._owner, self._terms, seen, now_s)
        if text := describe(verdict, self._verdict):
            self._device.say(text)
        self._verdict = verdict
        if running is not self._watched:
            self._begin(running)
        if running is not None:
            running.set_speed(self.speed)
        if computes:
            self._awake.hold()
        else:
            self._awake.release()
        limit = MemoryBudget(bytes=memory.limit_bytes, why=memory.why)
        return (
            *self._about_memory(running, limit, now_s),
            *self._about_leaving(verdict.leave, now_s, computes=computes),
        )

    def _begin(self, running: Running | None) -> None:
        self._watched = running
        self._memory = msgspec.structs.replace(self._memory, rung=0, roomy_since_s=None)
        self._excess_bytes = 0
        self._rungs = ()
        if running is not None:
            self._rungs = rungs_of(running.assign, self._device.model, self._device.shared_memory)

    def _about_memory(self, running: Running | None, limit: MemoryBudget, now_s: float) -> tuple[Message, ...]:
        before = self._memory.rung
        if running is not None:
            self._memory = noticed(self._memory, self._rungs, recomputes=running.recomputes)
        if self._rungs and before == 0:
            self._excess_bytes = max(peak_rss_bytes() - self._rungs[0].bytes, 0)
        self._memory, told = decide(self._memory, self._rungs, limit, now_s, excess_bytes=self._excess_bytes)
        if running is not None and self._memory.rung != before:
            rung = self._rungs[self._memory.rung]
            running.adapt(recompute=rung.recompute, in_flight=rung.in_flight)
            self._device.say(_change(rung, limit, lower=self._memory.rung > before))
        if told is None:
            return ()
        self._device.say(f"the coordinator is told that this worker may use {format_bytes(limit.bytes)}: {limit.why}")
        return (told,)

    def _about_leaving(self, reason: str, now_s: float, *, computes: bool) -> tuple[Message, ...]:
        if self._asked_at_s is None:
            if not reason:
                return ()
            self._asked_at_s = now_s
            self._device.say(f"leaving: {reason}")
            return (Leaving(reason=reason) if computes else Goodbye(reason=reason),)
        if now_s - self._asked_at_s < PATIENCE_S:
            return ()
        return (
            Goodbye(reason=f"its layers were not moved within {PATIENCE_S:.0f} s: {reason or 'it asked to leave'}"),
        )


def _change(rung: Rung, limit: MemoryBudget, *, lower: bool) -> str:
    what = "recomputes" if rung.recompute else "recomputes no more"
    why = "memory is scarce" if lower else "there is room again"
    return f"{why} ({limit.why}): the stage {what}, with {rung.in_flight} in flight (about {format_bytes(rung.bytes)})"
