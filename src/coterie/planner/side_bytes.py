"""What side-tuning and its baselines send and keep, in bytes: formulas (METHODS.md 2), exact for the shapes given.

Counted are tensors as the codecs lay them out, their scales included; headers of frames, sample ids and labels are not.
Every link is seen from the device: what it sends goes up.
"""

from typing import Literal

import msgspec

from coterie.jobs.side_spec import SideSpec, UploadDtype
from coterie.transport.limits import ITEM_BYTES, SCALE_BYTES, wire_bytes

Baseline = Literal["mobillm", "bitfit-split", "local"]
"""What Eco-MobiLLM is compared with: every token of every epoch to a side network; the two ends of the model on the
device and its middle on the server; everything on the device."""

CODECS: dict[UploadDtype, str] = {"float32": "raw", "float16": "fp16", "int8": "int8", "int4": "int4"}
"""How each type travels: the names of `coterie.tensors.codecs`."""

_FLOAT32_BYTES = ITEM_BYTES["float32"]
_WORD_BYTES = 4


class Backbone(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen model as a ladder sees it: L blocks of width D."""

    blocks: int
    width: int

    def taps(self, side: SideSpec) -> int:
        """How many blocks' outputs go to the server: those from `first_layer` on."""
        return max(self.blocks - side.first_layer + 1, 0)


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a batch, or of all rows of an epoch.

    Attributes:
        padded: With padding: what a backbone computes, and what split learning sends.
        real: Without padding: what a side network gets that selects no tokens.
        selected: Those whose output enters the loss.
    """

    padded: int
    real: int
    selected: int

    def sent(self, side: SideSpec) -> int:
        """Positions whose activations a device sends."""
        return self.selected if side.selects_tokens else self.real


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a device sends and receives."""

    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Both directions."""
        return self.up_bytes + self.down_bytes


def taps_bytes(positions: int, taps: int, width: int, upload: UploadDtype) -> int:
    """Activations [N, L', D] of N positions as one tensor, scales included."""
    return wire_bytes("float32", (positions, taps, width), CODECS[upload])


def upload_bytes(tokens: TokenCounts, backbone: Backbone, side: SideSpec) -> int:
    """What the devices of a backbone send for one batch, all of them together (a scale more for each further one)."""
    return taps_bytes(tokens.sent(side), backbone.taps(side), backbone.width, side.upload)


def cached_token_bytes(taps: int, width: int, upload: UploadDtype) -> int:
    """What the server keeps of one token: its activations, in `float16` with a scale for each layer; whole words."""
    scales = (taps - 1) * SCALE_BYTES if upload == "float16" else 0
    return -(-(taps_bytes(1, taps, width, upload) + scales) // _WORD_BYTES) * _WORD_BYTES


def cache_bytes(epoch: TokenCounts, backbone: Backbone, side: SideSpec) -> int:
    """What the server keeps of one epoch between the two phases; nothing if it trains while batches arrive only.

    Labels and index, about 40 bytes a row, are not counted.
    """
    if not side.two_phases:
        return 0
    return epoch.sent(side) * cached_token_bytes(backbone.taps(side), backbone.width, side.upload)


def baseline_bytes(baseline: Baseline, tokens: TokenCounts, backbone: Backbone, upload: UploadDtype) -> Traffic:
    """One batch of a baseline.

    `bitfit-split` cuts twice, so that text and labels stay on the device: each cut carries hidden states [B, T, D] one
    way and their gradient the other.
    """
    if baseline == "local":
        return Traffic()
    if baseline == "mobillm":
        every_token = SideSpec(upload=upload, selects_tokens=False)
        padded = TokenCounts(padded=tokens.padded, real=tokens.padded, selected=tokens.padded)
        return Traffic(up_bytes=upload_bytes(padded, backbone, every_token))
    crossing = wire_bytes("float32", (tokens.padded, backbone.width), CODECS[upload])
    return Traffic(up_bytes=2 * crossing, down_bytes=2 * crossing)


def side_parameters(backbone: Backbone, side: SideSpec) -> int:
    """Trained numbers of a side network.

    Each tapped block has a layer norm (2 D) and two matrices (D to R and back); every block but the lowest a gate, and
    one gate more scales what is added to the backbone's last output.
    """
    taps = backbone.taps(side)
    return taps * (2 * backbone.width + 2 * backbone.width * side.rank) + taps


def side_network_bytes(backbone: Backbone, side: SideSpec, *, task_parameters: int = 0) -> int:
    """What a device downloads at the end: the side network, and the task's own layers trained with it (float32)."""
    return _FLOAT32_BYTES * (side_parameters(backbone, side) + task_parameters)


class RunBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a whole run.

    Attributes:
        traffic: Between devices and server, activations and the trained network.
        cache_bytes: On the server.
        device_passes: How often the devices run the backbone over the data.
    """

    traffic: Traffic
    cache_bytes: int
    device_passes: int


def side_run_bytes(
    epoch: TokenCounts, epochs: int, backbone: Backbone, side: SideSpec, *, task_parameters: int = 0
) -> RunBytes:
    """A run of side-tuning: one pass of the devices with two phases, else one for each epoch."""
    passes = 1 if side.two_phases else epochs
    return RunBytes(
        traffic=Traffic(
            up_bytes=passes * upload_bytes(epoch, backbone, side),
            down_bytes=side_network_bytes(backbone, side, task_parameters=task_parameters),
        ),
        cache_bytes=cache_bytes(epoch, backbone, side),
        device_passes=passes,
    )
