"""What a side-tuning run needs of whom: its devices' plan, a forward-only pipeline, and the server's memory."""

import msgspec

from coterie.cluster.side_messages import ServerReady
from coterie.coordinator.job import Job
from coterie.coordinator.member import Member
from coterie.coordinator.planning import plan_request
from coterie.coordinator.run_data import run_data
from coterie.errors import DoesNotFitError
from coterie.planner import explain, make_plan
from coterie.planner.plan import Plan
from coterie.planner.side_bytes import Backbone, cached_token_bytes
from coterie.planner.side_memory import (
    hidden_width,
    named,
    server_memory,
    server_shortage,
    with_unsent,
    without_output_layer,
)
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.units import format_bytes


class ServerForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's process will take at most.

    Attributes:
        parts: Bytes by what takes them.
        mapped_bytes: Of a cache on disk, what the system lets stand in memory as long as nobody needs the room.
        limit_bytes: What it may use.
    """

    name: str
    parts: dict[str, int]
    mapped_bytes: int
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values()) + self.mapped_bytes

    def describe(self) -> str:
        """For people."""
        mapped = f", cache on disk {format_bytes(self.mapped_bytes)}, if there is room" if self.mapped_bytes else ""
        return (
            f"Server {self.name}: {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)} = "
            f"{named(self.parts)}{mapped}"
        )


def forecast_server(job: Job, server: Member, ready: ServerReady, cached_tokens: int) -> ServerForecast:
    """Predict a server's peak.

    Args:
        job: The run's.
        server: Who it is.
        ready: What it said of its process and cache.
        cached_tokens: How many the cache is to hold in the end.

    Raises:
        DoesNotFitError: The server may not use so much.
    """
    side, layers = job.recipe.side.spec, job.model_profile.layers
    backbone = Backbone(blocks=len(layers) - 2, width=hidden_width(job.model_profile))
    copies = job.optimizer.state_copies
    parts = {
        "worker": ready.idle_bytes,
        **server_memory(layers[-1], backbone, side, run_data(job), optimizer_copies=copies),
    }
    cache = cached_tokens * cached_token_bytes(backbone.taps(side), backbone.width, side.upload)
    if ready.in_memory:
        parts["cache"] = cache
    hello = server.hello
    if shortage := server_shortage(hello.name, hello.memory_bytes, parts):
        raise DoesNotFitError(
            shortage,
            hint="give the server more memory, or send less: fewer rows of a step (batch_rows), the token selector, a "
            "later first_layer; keep the cache on its disk",
        )
    mapped = 0 if ready.in_memory else min(cache, hello.memory_bytes - sum(parts.values()))
    return ServerForecast(name=hello.name, parts=parts, mapped_bytes=mapped, limit_bytes=hello.memory_bytes)


def make_side_plan(
    job: Job, cluster: ClusterProfile, server: ServerForecast, *, micro_batches: int | None = None
) -> tuple[Plan, str]:
    """Plan the devices. In additive mode they hold the output layer, too: differences are taken there.

    Raises:
        DoesNotFitError: No plan fits.
    """
    model = with_unsent(job.model_profile, job.recipe.side.spec, run_data(job), job.recipe.train.batch_rows)
    names = {device.worker for device in cluster.devices}
    links = tuple(link for link in cluster.links if {link.source, link.target} <= names)
    request = plan_request(
        job.recipe,
        model if job.recipe.side.additive else without_output_layer(model),
        msgspec.structs.replace(cluster, links=links),
        micro_batches=micro_batches,
        forward_only=True,
    )
    request = msgspec.structs.replace(request, keeps_micro_batch=True)
    plan = msgspec.structs.replace(make_plan(request), units=len(job.model_profile.layers))
    return plan, f"{explain(plan, request)}\n{server.describe()}"
