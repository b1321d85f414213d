"""Side-tuning: what the network beside a frozen backbone looks like, and what is sent to it (METHODS.md 2)."""

from typing import Literal

import msgspec

UploadDtype = Literal["float32", "float16", "int8", "int4"]
SideMode = Literal["direct", "additive"]


class SideSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that devices and server must agree on, beside the backbone's `ModelSpec`.

    Attributes:
        rank: Width R of the side network's inner layers.
        temperature: T of the gates: a gate is the sigmoid of its parameter divided by it.
        first_layer: The ladder's lowest tap, k of METHODS.md. Layer l (1..L) is the output of block l - 1, unit l.
        upload: Type of the activations on the wire and in the server's cache.
        mode: `direct`: the server gets labels and the output layer reads backbone and side network together.
            `additive`: it gets prediction differences, and its output is added to the backbone's on the device.
        selects_tokens: Send only the tokens that enter the loss (TS); otherwise every token that is not padding.
        two_phases: The devices forward once and later epochs read the server's cache (TSTP); otherwise the devices
            forward and send in every epoch.
    """

    rank: int = 64
    temperature: float = 0.1
    first_layer: int = 1
    upload: UploadDtype = "float16"
    mode: SideMode = "direct"
    selects_tokens: bool = True
    two_phases: bool = True
