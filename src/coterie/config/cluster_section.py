"""The recipe's section on workers: which take part, how they meet, and what happens when one is lost."""

from typing import Annotated

import msgspec
from msgspec import Meta

from coterie.jobs.roles import WorkerRole
from coterie.profiles.cluster_profile import DeviceType
from coterie.units import parse_bytes

PositiveInt = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]


class LocalWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker process on this machine. Limits emulate a smaller or slower device."""

    name: Annotated[Text | None, Meta(description="What to call it. Default: `local-1`, `local-2` …")] = None
    memory: Annotated[
        Text | None, Meta(description="Memory the process may use, such as `600MiB`; enforced where the system can.")
    ] = None
    speed: Annotated[
        float, Meta(gt=0, le=1, description="Part of a CPU core's speed; below 1 the worker is slowed.")
    ] = 1.0
    threads: Annotated[int, Meta(ge=1, description="Compute threads.")] = 1
    device: Annotated[DeviceType, Meta(description="Where it computes.")] = "cpu"
    backends: Annotated[
        str,
        Meta(
            min_length=1,
            description="Compute backends that share each layer's attention heads and feed-forward neurons: `auto` for "
            "all of the device, or names with `+` between them, such as `torch+opencl`. With `torch` alone nothing is "
            "shared.",
        ),
    ] = "torch"
    role: Annotated[
        WorkerRole,
        Meta(
            description="`device`: runs layers of the model. `server`: the one that trains the side network of "
            '`mode = "side"`.'
        ),
    ] = "device"

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes, or None for what the machine has."""
        return None if self.memory is None else parse_bytes(self.memory)


class ClusterSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which workers take part and how they meet."""

    workers: Annotated[
        PositiveInt | None,
        Meta(
            description="Start when this many workers have joined, local ones included. Default: the local ones, "
            "or one worker on this machine."
        ),
    ] = None
    local_workers: Annotated[
        tuple[LocalWorker, ...],
        Meta(
            description="Workers that are started on this machine, each with `name`, `memory`, `speed`, `threads`, "
            "`device`, `backends` and `role`, none of them required. As a flag, once per worker: "
            "`--local-worker memory=800MiB,speed=0.5`.",
            extra={"flag": "local-worker"},
        ),
    ] = ()
    host: Annotated[
        Text | None,
        Meta(
            description="Address to listen on. Default: this machine only if all workers are local, "
            "every interface otherwise."
        ),
    ] = None
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes any free one.")] = 0
    measure_again: Annotated[
        bool,
        Meta(
            description="Measure every device anew instead of using the speeds that its worker has kept from earlier."
        ),
    ] = False
    token_uses: Annotated[
        PositiveInt | None,
        Meta(
            description="How many new devices may join by one link. Default: as many as the run starts with, and as "
            "many again while it trains. A device that was in comes back without a use."
        ),
    ] = None
    token_minutes: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Minutes for which new devices may join by the link. Default: until the run ends."),
    ] = None
    standing_link: Annotated[
        bool,
        Meta(
            description="Let devices that were in an earlier run with this setting join by themselves, under the link "
            "that they have: for workers that run as services. One such run at a time."
        ),
    ] = False
    announce: Annotated[
        bool,
        Meta(
            description="Announce the run in the local network (mDNS), so that `coterie worker` finds it without a "
            'link; the token must be typed in. Needs `pip install "coterie[discovery]"`.'
        ),
    ] = False
    join_timeout_s: Annotated[float, Meta(gt=0, description="Seconds to wait for the workers to join.")] = 600.0
    heartbeat_s: Annotated[float, Meta(gt=0, description="Seconds between a worker's signs of life.")] = 1.0
    heartbeat_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Silence in seconds after which a worker counts as lost. A process that is killed is noticed "
            "at once; this is for machines that freeze and networks that fail.",
        ),
    ] = 15.0
    rejoin_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which workers that lose the coordinator try to come back, and for which the "
            "coordinator waits for one when those that are left cannot hold the model, in side-tuning for any that is "
            "lost.",
        ),
    ] = 600.0
    replicate_every: Annotated[
        int,
        Meta(
            ge=0,
            description="Optimizer steps between copies of what is trained, from which a run goes on when a device is "
            "lost. 0: every step where little is trained (LoRA), else as often as costs at most 3 % of the time.",
        ),
    ] = 0
    rebalance: Annotated[
        bool,
        Meta(
            description="Move layers in mid-run when devices turn out faster or slower than measured, or when one "
            "joins, and the gain over the remaining steps exceeds the cost."
        ),
    ] = True

    @property
    def has_workers(self) -> bool:
        """Whether the recipe names any: a run in which nothing is trained stays in its own process otherwise."""
        return self.workers is not None or bool(self.local_workers)

    @property
    def all_local(self) -> bool:
        """Whether no worker is expected from another machine."""
        return self.workers is None or self.workers <= len(self.local_workers)

    @property
    def effective_local_workers(self) -> tuple[LocalWorker, ...]:
        """The workers to start here: those asked for, or one without limits if nothing at all was said."""
        if self.workers is None and not self.local_workers:
            return (LocalWorker(),)
        return self.local_workers

    @property
    def workers_expected(self) -> int:
        """How many workers a run starts with."""
        return self.workers if self.workers is not None else len(self.effective_local_workers)

    @property
    def listen_host(self) -> str:
        """The address to bind."""
        if self.host is not None:
            return self.host
        return "127.0.0.1" if self.all_local else "0.0.0.0"  # noqa: S104 - other machines join; TLS and a token guard it
