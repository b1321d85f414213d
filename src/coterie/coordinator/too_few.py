"""What is said when fewer workers have come in time than a run was to begin with."""

from collections.abc import Collection, Mapping

from coterie.coordinator.member import Member
from coterie.errors import JoinRefusedError
from coterie.jobs.roles import WorkerRole
from coterie.units import counted


def too_few(
    joined: Collection[Member], count: int, timeout_s: float, seats: Mapping[WorkerRole, int] | None
) -> JoinRefusedError:
    """The error: how many came of how many, and what to start where.

    Args:
        joined: Who came.
        count: How many were to come.
        timeout_s: How long they were waited for.
        seats: How many workers of each role there is room for; None if all are alike.
    """
    text = f"{len(joined)} of {counted(count, 'worker')} joined within {timeout_s:.0f} s"
    if seats is not None and not any(member.hello.role == "server" for member in joined) and seats.get("server", 0):
        return JoinRefusedError(
            f"{text}; the server is not among them",
            hint="start `coterie worker LINK --role server` on the server: without --role a worker is a device",
        )
    return JoinRefusedError(text, hint="start `coterie worker LINK` on the missing devices, or lower cluster.workers")
