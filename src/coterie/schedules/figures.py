"""What a schedule costs in memory and in staleness, read off its actions."""

from coterie.schedules.actions import Schedule


def peak_in_flight(schedule: Schedule, stage: int) -> int:
    """Most micro-batches that `stage` has forwarded and not yet backwarded; 0 under `forward`, which keeps nothing."""
    if schedule.kind == "forward":
        return 0
    now = peak = 0
    for action in schedule.actions[stage]:
        now += {"F": 1, "B": -1, "U": 0}[action.kind]
        peak = max(peak, now)
    return peak


def last_uses(schedule: Schedule, stage: int) -> dict[int, int]:
    """For each weight version of `stage`: the index of the last action that computes with it.

    A version that has been superseded may be dropped after that action. Versions that no forward uses are absent.
    """
    return {
        action.weight_version: index
        for index, action in enumerate(schedule.actions[stage])
        if action.kind in {"F", "B"}
    }


def weight_versions(schedule: Schedule, stage: int) -> int:
    """Most versions of the trained weights that `stage` must hold at once, the newest included."""
    uses = last_uses(schedule, stage)
    superseded = {
        action.weight_version - 1: index for index, action in enumerate(schedule.actions[stage]) if action.kind == "U"
    }
    changes = [0] * (len(schedule.actions[stage]) + 1)
    for version, index in superseded.items():
        if uses.get(version, -1) > index:
            changes[index] += 1
            changes[uses[version]] -= 1
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak + 1


def staleness(schedule: Schedule, stage: int) -> int:
    """Updates that come between the weights a gradient was taken at and the weights it is applied to, in steady state.

    0 for `flush` and `gpipe`, 1 for `2bw`, `S - s - 1` for `stash` at the default depth.
    """
    worst = 0
    oldest: int | None = None
    for action in schedule.actions[stage]:
        if action.kind == "B":
            oldest = action.weight_version if oldest is None else min(oldest, action.weight_version)
        elif action.kind == "U" and oldest is not None:
            worst = max(worst, action.weight_version - 1 - oldest)
            oldest = None
    return worst
