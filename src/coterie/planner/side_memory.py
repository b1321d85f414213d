"""Memory that side-tuning takes beside a forward-only stage's: of the server, and of activations that wait to be sent.

The server's peak lies in the backward of a step. What autograd keeps of the side network is counted from its rungs (of
each token: the mixed state, its norm and the sum, D each, and two vectors of rank R), and the copies of the logits that
softmax and its backward hold at once were measured; `tests/numerics/sidetuning/test_side_memory.py` compares both with
what a step really holds.
"""

from collections.abc import Mapping

import msgspec

from coterie.jobs.side_spec import SideSpec, UploadDtype
from coterie.planner.memory import LINK_COPIES, RUNTIME_BYTES
from coterie.planner.side_bytes import Backbone, side_parameters, taps_bytes
from coterie.planner.way import RunData
from coterie.profiles.model_profile import LayerProfile, ModelProfile
from coterie.units import format_bytes

PIECE_ELEMENTS = 1 << 25
"""Activations or logits that the server's trainer works on at a time: 128 MiB in float32."""

_FLOAT32_BYTES = 4
_RUNG_VECTORS, _RUNG_RANKS = 3, 2
"""Of width D and of rank R, kept of each rung for its backward, beside the activations themselves."""
_WORKING_VECTORS = 5
"""Of width D, while one rung's backward runs."""
_LOGIT_COPIES = 3
"""At the peak: the logarithms of what softmax gives, and the gradients of both sides of it."""
_UNSENT_MICRO_BATCHES = 3
"""Encoded micro-batches that a device holds: one on its way, and as many as the coordinator feeds ahead."""


def piece_tokens(layers: int, width: int, output_width: int) -> int:
    """Tokens that the trainer works on at a time."""
    return max(PIECE_ELEMENTS // max(layers * width, output_width), 1)


def server_memory(
    output: LayerProfile, backbone: Backbone, side: SideSpec, data: RunData, *, optimizer_copies: int
) -> dict[str, int]:
    """What the server holds beside its process and a cache in memory, in bytes by what takes it.

    Args:
        output: The model's output layer.
        backbone: The frozen model.
        side: The network beside it.
        data: Of it count the largest step and the task's own layers.
        optimizer_copies: Of each trained parameter.
    """
    taps, width = backbone.taps(side), backbone.width
    network = _FLOAT32_BYTES * side_parameters(backbone, side)
    trained = network + data.task_bytes
    logits_width = max(output.parameter_bytes // (_FLOAT32_BYTES * width), 1)
    piece = piece_tokens(taps, width, logits_width)
    sent = data.largest.sent(side)
    tokens, read = min(sent, piece), min(data.largest.selected, piece)
    arrived = sent * taps * width * _FLOAT32_BYTES
    rungs = tokens * taps * (_RUNG_VECTORS * width + _RUNG_RANKS * side.rank) * _FLOAT32_BYTES
    working = tokens * _WORKING_VECTORS * width * _FLOAT32_BYTES
    logits = read * logits_width * _FLOAT32_BYTES * _LOGIT_COPIES
    return {
        "weights": output.parameter_bytes + network,
        "gradients": trained,
        "optimizer": trained * optimizer_copies,
        "activations": arrived + rungs + working + logits,
        "buffers": LINK_COPIES * arrived + RUNTIME_BYTES,
    }


def server_shortage(name: str, limit_bytes: int, parts: Mapping[str, int]) -> str:
    """In which numbers a server is too small for what takes its memory; empty if it is not."""
    needed = sum(parts.values())
    if needed <= limit_bytes:
        return ""
    return (
        f"{name} has {format_bytes(limit_bytes)} and needs {format_bytes(needed)} as the server ({named(parts)}), "
        f"{format_bytes(needed - limit_bytes)} short"
    )


def named(parts: Mapping[str, int]) -> str:
    """What takes memory, in words."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)


def unsent_bytes(tokens: int, taps: int, width: int, upload: UploadDtype) -> int:
    """What a device holds of a micro-batch's activations: as tapped, as stacked, and encoded until they are sent."""
    tapped = tokens * taps * width * _FLOAT32_BYTES
    return 2 * tapped + _UNSENT_MICRO_BATCHES * taps_bytes(tokens, taps, width, upload)


def with_unsent(model: ModelProfile, side: SideSpec, data: RunData, batch_rows: int) -> ModelProfile:
    """A whole model whose tapped blocks keep, of each row, the activations that wait to be sent.

    The request for its plan says `keeps_micro_batch`.
    """
    tokens = -(-data.largest.sent(side) // batch_rows)
    kept = unsent_bytes(tokens, 1, hidden_width(model), side.upload)
    tapped = range(side.first_layer, len(model.layers) - 1)
    layers = tuple(
        msgspec.structs.replace(layer, kept_bytes_per_row=kept) if unit in tapped else layer
        for unit, layer in enumerate(model.layers)
    )
    return msgspec.structs.replace(model, layers=layers)


def without_output_layer(model: ModelProfile) -> ModelProfile:
    """What devices hold where nobody but the server needs logits."""
    return msgspec.structs.replace(model, layers=model.layers[:-1], tied=False, tied_bytes=0)


def hidden_width(model: ModelProfile) -> int:
    """Width D of the hidden states."""
    return model.layers[0].boundary.per_row // (_FLOAT32_BYTES * model.memory_tokens)
