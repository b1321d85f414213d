"""When nothing fits: by how much each device falls short of the nearest plan, and which settings would fit."""

from collections.abc import Iterator

import msgspec

from coterie.errors import DoesNotFitError
from coterie.planner.choose import micro_batch_counts
from coterie.planner.problem import Problem
from coterie.planner.reach import MemoryReach
from coterie.planner.request import PlanRequest
from coterie.planner.search import Candidate, TimeSearch, fastest_of
from coterie.planner.tables import Tables, memory_limits
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile
from coterie.units import MIB, counted, format_bytes, name_units

ADAPTER_SHARE = 100
"""LoRA of rank 8 trains about a hundredth of a block's parameters or less."""


def does_not_fit(request: PlanRequest) -> DoesNotFitError:
    """The error that says what is missing: MiB per device, and the settings with which a plan exists."""
    nearest = _nearest(request)
    sentences = [f"{request.model.name} does not fit on the {counted(len(request.cluster.devices), 'device')}"]
    if nearest is None:
        sentences.append("no pipeline is allowed by these settings")
    else:
        sentences += list(_short_devices(nearest))
    remedies = list(_remedies(request))
    hint = (
        "; or ".join(remedies)
        if remedies
        else "add a device or memory: none of the settings tried is enough, nor all together"
    )
    return DoesNotFitError(": ".join([sentences[0], "; ".join(sentences[1:])]), hint=hint)


def fits(request: PlanRequest) -> bool:
    """Is there any plan, at any permitted micro-batch count?"""
    return any(_fits_at(request, count) for count in micro_batch_counts(request))


def _fits_at(request: PlanRequest, micro_batches: int) -> bool:
    problem = Problem(request, micro_batches)
    reach = MemoryReach(Tables(problem), "shallower")
    return reach.most >= reach.least and reach.fits(memory_limits(problem))


def _nearest(request: PlanRequest) -> Candidate | None:
    """The plan that would fit if every device had the least possible addition of memory."""
    choices = []
    for count in micro_batch_counts(request):
        tables = Tables(Problem(request, count))
        addition = MemoryReach(tables, "shallower").least_addition(memory_limits(tables.problem))
        if addition is not None:
            choices.append((addition, tables))
    if not choices:
        return None
    least = min(addition for addition, _ in choices)
    searches = [
        TimeSearch(tables, "shallower", memory_limits(tables.problem) + least)
        for addition, tables in choices
        if addition == least
    ]
    return fastest_of(searches)


def _short_devices(nearest: Candidate) -> Iterator[str]:
    problem = nearest.problem
    used = {stage.device: stage for stage in nearest.stages}
    for number, device in enumerate(problem.devices):
        if number not in used:
            yield f"{device.name} ({format_bytes(device.memory_bytes)}) would not help"
            continue
        stage = used[number]
        needed = problem.memory(stage).total
        units = name_units(stage.first_unit, stage.stop_unit, problem.units)
        if needed > device.memory_bytes:
            short = (needed - device.memory_bytes) / MIB
            yield (
                f"{device.name} has {format_bytes(device.memory_bytes)} and needs {format_bytes(needed)} for {units}, "
                f"{short:.0f} MiB short"
            )
        else:
            yield f"{device.name} holds {units}, with {format_bytes(device.memory_bytes - needed)} to spare"


def _remedies(request: PlanRequest) -> Iterator[str]:
    """Changes that would each be enough; all of them together if none is."""
    changes = list(_changes(request))
    enough = [words for words, changed in changes if fits(changed)]
    yield from enough
    if enough:
        return
    combined = request
    words_used = []
    for words, _ in changes:
        changed = dict(_changes(combined)).get(words)
        if changed is not None:
            combined = changed
            words_used.append(words)
        if fits(combined):
            yield "all of: " + ", ".join(words_used)
            return


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Changes worth trying, the mildest first."""
    replace = msgspec.structs.replace
    if not request.allow_recompute and request.schedule != "forward":
        yield "allow recomputation", replace(request, allow_recompute=True)
    if request.allocator == "default":
        yield "use the tight allocator", replace(request, allocator="auto")
    yield from _smaller_pieces(request)
    if request.schedule in {"stash", "2bw"}:
        yield "the flush schedule", replace(request, schedule="flush")
    if request.model.layers[0].trainable_bytes and request.schedule != "forward":
        yield "freeze the embeddings", replace(request, model=_with_frozen_embeddings(request.model))
    if any(layer.trainable_bytes > layer.parameter_bytes // 10 for layer in request.model.layers):
        yield "train LoRA adapters instead of all weights", replace(request, model=_with_adapters(request.model))
    if request.owner_workers:
        yield "let any device hold the first and the last layer", replace(request, owner_workers=())


def _smaller_pieces(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """More micro-batches, or fewer rows: the first that is enough, else the most extreme."""
    replace = msgspec.structs.replace
    if request.micro_batches is not None:
        divisors = micro_batch_counts(replace(request, micro_batches=None))
        more = [count for count in divisors if count > request.micro_batches]
        enough = [count for count in more if _fits_at(request, count)]
        for count in enough[:1] or more[-1:]:
            yield f"split the batch into {count} micro-batches", replace(request, micro_batches=count)
    halves = [request.batch_rows >> shift for shift in range(1, request.batch_rows.bit_length())]
    enough = [rows for rows in halves if fits(replace(request, batch_rows=rows))]
    for rows in enough[:1] or halves[-1:]:
        yield f"a batch of {counted(rows, 'row')}", replace(request, batch_rows=rows)


def _with_frozen_embeddings(model: ModelProfile) -> ModelProfile:
    first, last = model.layers[0], model.layers[-1]
    layers = [_trained(first, 0), *model.layers[1:]]
    if model.tied and len(layers) > 1:
        layers[-1] = _trained(last, max(last.trainable_bytes - model.tied_bytes, 0))
    return _without_backward_below(msgspec.structs.replace(model, layers=tuple(layers)))


def _without_backward_below(model: ModelProfile) -> ModelProfile:
    """What is trained has changed: the units below all of it keep nothing for a backward any more."""
    lowest = model.first_backward_unit
    nothing = AffineBytes()
    below = [
        msgspec.structs.replace(layer, saved=nothing, backward_flops_per_row=0.0) for layer in model.layers[:lowest]
    ]
    return msgspec.structs.replace(model, layers=(*below, *model.layers[lowest:]))


def _with_adapters(model: ModelProfile) -> ModelProfile:
    layers = tuple(
        _trained(layer, min(layer.trainable_bytes, layer.parameter_bytes // ADAPTER_SHARE)) for layer in model.layers
    )
    return msgspec.structs.replace(model, layers=layers)


def _trained(layer: LayerProfile, trainable_bytes: int) -> LayerProfile:
    return msgspec.structs.replace(
        layer,
        trainable_bytes=trainable_bytes,
        largest_trainable_bytes=min(layer.largest_trainable_bytes, trainable_bytes),
    )
