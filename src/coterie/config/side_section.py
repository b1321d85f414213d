"""The recipe's section on side-tuning."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coterie.jobs.side_spec import SideSpec, UploadDtype
from coterie.units import parse_bytes

Text = Annotated[str, Meta(min_length=1)]


class SideSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Side-tuning (`mode = "side"`): the network beside the model, and what its server gets and keeps."""

    rank: Annotated[
        int, Meta(ge=1, description="Width of the side network's inner layers.", extra={"flag": "side-rank"})
    ] = 64
    first_layer: Annotated[
        int,
        Meta(
            ge=1,
            description="The lowest layer whose output is sent: 1 is the first block. Higher means fewer bytes, and "
            "that the server sees less of the text.",
        ),
    ] = 1
    gate_temperature: Annotated[
        float, Meta(gt=0, description="How softly the gates mix the layers: lower is more abrupt.")
    ] = 0.1
    upload: Annotated[
        UploadDtype, Meta(description="Type of the activations on the wire and in the server's cache.")
    ] = "float16"
    additive: Annotated[
        bool,
        Meta(
            description="Send the server prediction differences instead of labels, and add its output to the model's. "
            "Of classification, tagging and regression. No protection of the labels: they can be read from these."
        ),
    ] = False
    token_selector: Annotated[
        bool, Meta(description="Send only the tokens that enter the loss; otherwise all but padding.")
    ] = True
    two_phases: Annotated[
        bool,
        Meta(
            description="Devices run once over the data, later epochs read the server's cache; otherwise devices run "
            "and send in every epoch."
        ),
    ] = True
    cache: Annotated[
        Literal["memory", "disk"],
        Meta(description="Where the server keeps activations. A killed server's `disk` cache is used on resuming."),
    ] = "disk"
    cache_quota: Annotated[
        Text | None, Meta(description="Most bytes that the cache may take, such as `20GiB`. Default: no limit.")
    ] = None
    cache_folder: Annotated[
        Text | None,
        Meta(
            description="Where servers on this machine keep their caches. Default: the folder `side-cache` of the run. "
            "Servers elsewhere have `coterie worker --cache-folder`."
        ),
    ] = None
    leave_after_collect: Annotated[
        bool,
        Meta(
            description="End here once everything is collected: the server, on another machine, goes on alone, and "
            "the same command with `--resume` fetches the result later."
        ),
    ] = False
    alone_hours: Annotated[
        float, Meta(gt=0, description="How long a server goes on alone at most before it keeps its state and ends.")
    ] = 24.0

    copy_backbone: Annotated[
        bool,
        Meta(description="Copy the frozen model into the exported folder; otherwise the folder says where it is."),
    ] = False

    @property
    def quota_bytes(self) -> int | None:
        """The most that the cache may take, in bytes; None without a limit."""
        return None if self.cache_quota is None else parse_bytes(self.cache_quota)

    @property
    def spec(self) -> SideSpec:
        """What devices and server must agree on."""
        return SideSpec(
            rank=self.rank,
            temperature=self.gate_temperature,
            first_layer=self.first_layer,
            upload=self.upload,
            mode="additive" if self.additive else "direct",
            selects_tokens=self.token_selector,
            two_phases=self.two_phases,
        )
