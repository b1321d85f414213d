"""What the server of a side-tuning run is given, and what it gives back."""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from coterie.cluster.side_messages import BLOCK_ROWS, PLAN_VERSION, TRAIN, AssignServer, ServerReady
from coterie.coordinator.job import Job, rows_digest
from coterie.coordinator.member import Member
from coterie.coordinator.members import Members
from coterie.coordinator.shards import ShardSource, send_unit
from coterie.coordinator.side_feeding import sent_tokens
from coterie.coordinator.side_record import SideTerms
from coterie.errors import ActivationCacheError, ProtocolError
from coterie.models import config_of
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_network import PREFIX, SideNetwork
from coterie.tensors.codecs import decode

Held = Mapping[str, frozenset[int]]
"""Rows of each split that the server has."""


async def assign_server(
    job: Job, members: Members, server: Member, selector: TokenSelector, evaluated: tuple[str, ...]
) -> tuple[ServerReady, Held]:
    """Give it its task and the output layer; what it has of an earlier run.

    Args:
        job: The run's.
        members: Of the run.
        server: Which of them it is.
        selector: Says which tokens are sent.
        evaluated: Splits that it is to hold beside the training data.

    Raises:
        ActivationCacheError: It is to go on alone, and has no folder for what it trains.
        CoterieError: It failed, or said something else.
    """
    side = job.recipe.side
    splits = (TRAIN, *evaluated)
    layers = job.anatomy.unit_count - 2
    await server.send(
        AssignServer(
            run=job.run,
            spec=job.spec,
            side=side.spec,
            optimizer=job.optimizer,
            task=job.task.name,
            width=_width(job),
            layers=tuple(range(side.first_layer, layers + 1)),
            rows={split: len(job.splits[split].rows) for split in splits},
            digests={split: _block_digests(job, split) for split in splits},
            tokens=cached_tokens(job, selector, evaluated),
            cache_key=_cache_key(job, selector),
            cache=side.cache,
            quota_bytes=side.quota_bytes or 0,
            save_every=job.recipe.run.checkpoint_every,
            steps_per_epoch=job.steps_per_epoch,
        )
    )
    await send_unit(server, layers + 1, ShardSource(job.spec, job.weights, None), job.run, PLAN_VERSION)
    event = await members.next_event()
    if event.member is not server or not isinstance(event.message, ServerReady):
        raise ProtocolError(f"{event.member.hello.name} sent {event.frame.header.kind} before the server stood")
    specs = event.frame.header.tensors
    tensors = {spec.name: decode(spec, data) for spec, data in zip(specs, event.frame.buffers, strict=True)}
    if set(tensors) != set(splits):
        raise ProtocolError(f"{server.hello.name} said of which rows it has for {', '.join(tensors) or 'nothing'}")
    if side.leave_after_collect and event.message.in_memory:
        raise ActivationCacheError(
            f"{server.hello.name} keeps its cache in memory: nothing would stay of what it trains once this command "
            "has ended (leave_after_collect)",
            hint="start it with `coterie worker LINK --role server --cache-folder FOLDER`, or leave "
            "leave_after_collect out",
        )
    return event.message, {split: frozenset(tensors[split].tolist()) for split in splits}


def cached_tokens(job: Job, selector: TokenSelector, evaluated: tuple[str, ...]) -> int:
    """How many tokens the server's cache is to hold in the end."""
    tokens = sum(sent_tokens(job, selector, split) for split in evaluated)
    if job.recipe.side.two_phases:
        part = min(job.total_steps / job.steps_per_epoch, 1.0)
        tokens += round(part * sent_tokens(job, selector, TRAIN))
    return tokens


def check_trained(job: Job, parameters: Mapping[str, Tensor]) -> None:
    """Is this what was to be trained?

    Raises:
        ProtocolError: A parameter is missing, unknown, or of another shape.
    """
    anatomy = job.anatomy
    network = SideNetwork(anatomy.unit_count - 2, _width(job), job.recipe.side.spec, job.spec.seed)
    wanted = {PREFIX + name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    wanted |= {name: anatomy.shapes[name] for name in anatomy.trainable_names}
    got = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if got != wanted:
        names = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
        raise ProtocolError(f"the server sent another side network than was asked for: {', '.join(names)[:200]}")


def side_terms(job: Job) -> SideTerms:
    """What the numbers of a run depend on."""
    return SideTerms(
        model=job.spec,
        side=job.recipe.side.spec,
        optimizer=job.optimizer,
        task=job.task.name,
        prompt=job.recipe.data.prompt or "",
        batch_rows=job.recipe.train.batch_rows,
        group_by_length=job.recipe.train.group_by_length,
        data_digest=job.data_digest,
        base_digest=job.base_digest,
    )


def _cache_key(job: Job, selector: TokenSelector) -> dict[str, str]:
    """What activations depend on beside the rows: runs for which all of it is equal share a cache."""
    side, spec = job.recipe.side.spec, job.spec
    key = {
        "weights": job.base_digest,
        "model": hashlib.sha256(f"{spec.auto_class} {spec.config_json}".encode()).hexdigest(),
        "frozen weights as": spec.frozen_dtype,
        "tokens sent": selector.reads if side.selects_tokens else f"all, {selector.reads} read",
        "labels": side.mode,
    }
    if side.mode == "additive":
        key["seed of the output layer"] = str(spec.seed)
    return key


def _block_digests(job: Job, split: str) -> tuple[str, ...]:
    """One for every `BLOCK_ROWS` rows. The split and the place are part of it: equal blocks are kept apart."""
    rows = job.splits[split].rows
    starts = range(0, len(rows), BLOCK_ROWS)
    return tuple(f"{split} {start} {rows_digest(rows[start : start + BLOCK_ROWS])[:32]}" for start in starts)


def _width(job: Job) -> int:
    """D of the backbone."""
    width: int = config_of(job.spec).get_text_config().hidden_size
    return width
