"""Random faults in one run, one after the other and sometimes together: does it end with the same weights?"""

import random
import time

import msgspec

from faults_setting import (
    LONGEST_S,
    POLL_S,
    Setting,
    final_loss,
    hosts,
    last_words,
    losses_of,
    strike,
    undisturbed,
    unequal,
    what_happened,
)
from testbed import Bed, Host
from testbed.faults import FAULTS, Fault

NAMES = ("phone", "laptop", "tablet", "desktop")
FEWEST_WELL = 2
"""Devices that nothing ails at any time: with fewer there would be no run left."""
FROZEN_S = 15.0
"""Here a device stands still for less than in the matrix, so that the run sees it again."""
SEED = 0
AGAIN_S = 2.0
STARTED_AGAIN = next(fault for fault in FAULTS if fault.name == "clean leave")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended; infinite differences if it did not."""

    rows: list[tuple[str, str, int, str]]
    failure: str = ""
    loss_difference: float = float("inf")
    unequal: float = float("inf")


class _Ailing(msgspec.Struct, kw_only=True):
    fault: Fault
    host: Host
    until_s: float


def random_faults(setting: Setting, count: int) -> Outcome:
    """Run `setting.steps` steps of a `flush` run with `count` faults at random moments."""
    whole = undisturbed(setting, "flush")
    draw = random.Random(SEED)
    last = setting.steps - setting.steps // 10
    moments = sorted(draw.sample(range(5, last), count))
    with setting.bed("random") as bed:
        run = bed.begin(setting.words("flush"), hosts(NAMES))
        try:
            struck = _strike_all(bed, moments, draw)
        except TimeoutError as error:
            return Outcome(rows=[], failure=str(error))
        rows = [
            (
                fault.name,
                host.name,
                step,
                _text(what_happened(run.events, at_s, host.name).next_step_s),
            )
            for fault, host, step, at_s in struck
        ]
        if run.exit_code:
            return Outcome(rows=rows, failure=f"the run ended with code {run.exit_code}: {last_words(run.log)}")
        losses, undisturbed_losses = losses_of(run.output), losses_of(whole)
        difference = abs(final_loss(losses) - final_loss(undisturbed_losses)) / final_loss(undisturbed_losses)
        missing = "" if len(losses) == setting.steps else f"{len(losses)} of {setting.steps} steps are recorded"
        return Outcome(rows=rows, failure=missing, loss_difference=difference, unequal=unequal(run.output, whole))


def _strike_all(bed: Bed, moments: list[int], draw: random.Random) -> list[tuple[Fault, Host, int, float]]:
    """Let faults happen as the run gets to each moment, and mend them, until the run ends."""
    run = bed.coordinator
    assert run is not None
    ailing: list[_Ailing] = []
    struck: list[tuple[Fault, Host, int, float]] = []
    begin_s = time.monotonic()
    while run.runs:
        now_s = time.monotonic()
        if now_s - begin_s > LONGEST_S:
            raise TimeoutError(f"the run does not go on: {last_words(run.log)}")
        for patient in [patient for patient in ailing if now_s > patient.until_s]:
            patient.fault.mend(bed, patient.host)
            ailing.remove(patient)
        for host in bed.hosts.values():
            # Started while the coordinator was dead, a worker finds nobody and ends: its owner tries again.
            if not host.runs and all(host is not one.host for one in ailing):
                ailing.append(_Ailing(fault=STARTED_AGAIN, host=host, until_s=now_s + AGAIN_S))
        if len(struck) < len(moments) and run.events.steps() >= moments[len(struck)]:
            well = [host for host in bed.hosts.values() if host.runs and all(host is not one.host for one in ailing)]
            if len(well) > FEWEST_WELL:
                fault, host = draw.choice(FAULTS), draw.choice(well)
                holders = run.events.stage_workers()
                if fault.name == "memory taken" and host.name not in holders:
                    continue  # there is no stage whose memory could be taken
                step = run.events.steps()
                struck.append((fault, host, step, strike(fault, bed, host)))
                lasts_s = min(fault.mend_after_s, FROZEN_S)
                ailing.append(_Ailing(fault=fault, host=host, until_s=time.monotonic() + lasts_s))
        time.sleep(POLL_S)
    return struck


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
