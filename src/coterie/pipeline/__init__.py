"""Runs one stage of a schedule: take the next action, wait for its input, compute, send.

Processing order: `micro_batch` (what comes in) -> `executor` (runs the actions) -> `weight_stash` (which weights) ->
`optimizer` and `gradients` (how they move) -> `reports` (what comes out). `ports` is the seam to the links;
`memory_ports` connects stages inside one process; `single_device` is the plain reference that a pipeline must equal.
"""
