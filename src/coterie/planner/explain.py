"""A plan in words and figures that a terminal can show, and as rows for tables and JSON."""

from coterie.planner.plan import Plan, StageAssignment
from coterie.planner.problem import Problem
from coterie.planner.request import PlanRequest
from coterie.units import counted, format_bytes, format_rate, format_seconds, name_units

Row = dict[str, str | int | float | bool | None]


def plan_table(plan: Plan) -> list[Row]:
    """One row per stage, in plain numbers (bytes, seconds): for tables of any kind and for `--json`."""
    last = len(plan.stages) - 1
    return [
        {
            "stage": stage.stage,
            "worker": stage.worker,
            "device": stage.device_name,
            "first_unit": stage.first_unit,
            "stop_unit": stage.stop_unit,
            "layers": name_units(stage.first_unit, stage.stop_unit, plan.units),
            "in_flight": stage.in_flight,
            "recompute": stage.recompute,
            "allocator": stage.allocator,
            "peak_bytes": stage.memory.total,
            "peak_above_base_bytes": stage.memory.above_base,
            "limit_bytes": stage.memory_limit,
            "base_bytes": stage.memory.base,
            "weights_bytes": stage.memory.weights,
            "gradients_bytes": stage.memory.gradients,
            "optimizer_bytes": stage.memory.optimizer,
            "weight_versions_bytes": stage.memory.weight_versions,
            "activations_bytes": stage.memory.activations,
            "transient_bytes": stage.memory.transient,
            "buffers_bytes": stage.memory.buffers,
            "forward_s": stage.forward_s,
            "backward_s": stage.backward_s,
            "update_s": stage.update_s,
            "send_s": stage.send_s if stage.stage < last else None,
            "send_codec": stage.send_codec if stage.stage < last else None,
        }
        for stage in plan.stages
    ]


def explain(plan: Plan, request: PlanRequest) -> str:
    """Say what every stage does, costs and why; which devices are left out; what one device would do alone."""
    batch = f"{counted(plan.batch_rows, 'row')} in {counted(plan.micro_batches, 'micro-batch', 'micro-batches')}"
    title = (
        f"Plan {plan.version} for {request.model.name}: {counted(len(plan.stages), 'stage')}, "
        f"schedule {plan.schedule}, {batch}, for {_objective(plan)}"
    )
    alone = (
        f"One device alone, the whole batch at once: {format_seconds(plan.one_device_step_s)} a step, "
        f"{format_bytes(plan.one_device_peak)}{_who_has_that_memory(plan, request)}."
    )
    lines = [
        title,
        "",
        *_grid(_rows(plan, request)),
        "",
        *(f"  {stage.device_name}: {_what_takes_memory(stage)}" for stage in plan.stages),
        "",
        *_backends(plan, request),
        f"A step is predicted to take {format_seconds(plan.predicted_step_s)}; {_bottleneck(plan)}.",
        alone,
        *(f"Left out: {device.device_name}, {device.reason}." for device in plan.left_out),
        *(f"Note: {note}." for note in plan.notes),
    ]
    return "\n".join(lines)


def _objective(plan: Plan) -> str:
    return "the shortest step" if plan.objective == "time" else "the least memory on the fullest device"


def _rows(plan: Plan, request: PlanRequest) -> list[list[str]]:
    header = [
        "stage",
        "device",
        "layers",
        "parameters",
        "peak",
        "limit",
        "in flight",
        "forward",
        "backward",
        "link to next",
    ]
    rows = [header]
    problem = Problem(request, plan.micro_batches)
    for stage in plan.stages:
        layers = request.model.layers[stage.first_unit : stage.stop_unit]
        flags = " recompute" if stage.recompute else ""
        if stage.stop_unit <= problem.first_backward_unit and plan.schedule != "forward":
            flags = " forward only"
        rows.append(
            [
                str(stage.stage),
                stage.device_name,
                name_units(stage.first_unit, stage.stop_unit, plan.units) + flags,
                format_bytes(sum(layer.parameter_bytes for layer in layers)),
                format_bytes(stage.memory.total),
                format_bytes(stage.memory_limit),
                str(stage.in_flight),
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_s),
                _link(plan, problem, stage),
            ]
        )
    return rows


def _link(plan: Plan, problem: Problem, stage: StageAssignment) -> str:
    if stage.stage == len(plan.stages) - 1:
        return ""
    index = {device.worker: number for number, device in enumerate(problem.devices)}
    source, target = index[stage.worker], index[plan.stages[stage.stage + 1].worker]
    rate = format_rate(float(problem.bytes_per_s[source, target]))
    return f"{format_seconds(stage.send_s)} ({stage.send_codec}, {rate})"


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _what_takes_memory(stage: StageAssignment) -> str:
    memory = stage.memory
    parts = {
        "worker": memory.base,
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "weight versions": memory.weight_versions,
        "activations": memory.activations,
        "working memory": memory.transient,
        "buffers": memory.buffers,
    }
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"{format_bytes(memory.total)} = {shown} ({stage.allocator} allocator)"


def _backends(plan: Plan, request: PlanRequest) -> list[str]:
    """What devices that share layers among compute backends found out about them."""
    used = {stage.worker for stage in plan.stages}
    lines = [
        f"  {device.name}: {note}"
        for device in request.cluster.devices
        if device.worker in used
        for note in device.backend_notes
    ]
    return ["Compute backends:", *lines, ""] if lines else []


def _bottleneck(plan: Plan) -> str:
    """Which stage or link the others wait for."""
    busiest = max(plan.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    slowest_link = max(plan.stages, key=lambda stage: stage.send_s)
    compute_s = busiest.forward_s + busiest.backward_s
    if slowest_link.send_s > compute_s:
        return (
            f"the link after {slowest_link.device_name} sets the pace ({format_seconds(slowest_link.send_s)} each way)"
        )
    if len(plan.stages) == 1:
        return f"{busiest.device_name} computes {format_seconds(compute_s)} per micro-batch"
    return f"{busiest.device_name} sets the pace ({format_seconds(compute_s)} per micro-batch)"


def _who_has_that_memory(plan: Plan, request: PlanRequest) -> str:
    """Would the whole batch on one device fit anywhere?"""
    roomy = [device.name for device in request.cluster.devices if device.memory_bytes >= plan.one_device_peak]
    return f", which {', '.join(roomy)} would have" if roomy else ", which no device has"
