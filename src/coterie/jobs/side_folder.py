"""The file that says what an exported side network belongs to: backbone, shape, settings. Read without torch.

The folder is documented in docs/how-to-predict-and-export.md; `coterie.sidetuning.export` writes it.
"""

from pathlib import Path

import msgspec

from coterie.errors import ModelError
from coterie.jobs.side_spec import SideSpec

SIDE_CONFIG = "side_config.json"
"""By this file a folder is known as one with a side network."""

SIDE_NETWORK = "side_network.safetensors"
"""The side network's parameters, by their names in `coterie.sidetuning.side_network`."""

TASK_LAYERS = "task_layers.safetensors"
"""The backbone's layers that were trained beside it, by their names in the Hugging Face model; there may be none."""

FIRST_TASK_LAYERS = "first_task_layers.safetensors"
"""The same layers as they were before training: additive mode adds to what the backbone says with these."""

BACKBONE = "backbone"
"""The folder in it that holds the backbone, where that was copied."""

FORMAT = 1

FETCH_AGAIN = "delete the folder and repeat `coterie train` with --resume: its server still has what was trained"
"""What to do about a damaged folder: `coterie export` has nothing that it could write a side network from."""


class SideConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds.

    Attributes:
        format: Of the folder; a newer one than `FORMAT` is refused.
        backbone: Hub name, or path of the folder; `backbone` where it was copied into this folder.
        gguf_file: Name of the file in that folder, if the backbone is a GGUF file.
        backbone_digest: Tells the backbone's weights from others (`coterie.models.digest`).
        auto_class: The transformers class that opens it, such as `AutoModelForTokenClassification`.
        blocks: Module name of the list of blocks, whose outputs the side network reads.
        layers, width: How many blocks there are, and how wide their output is (L and D).
        side: Settings of the side network.
    """

    format: int = FORMAT
    backbone: str
    gguf_file: str = ""
    backbone_digest: str = ""
    auto_class: str
    blocks: str
    layers: int
    width: int
    side: SideSpec

    def backbone_path(self, folder: Path) -> str:
        """Where the backbone is, for a config that lies in `folder`: a hub name or a path, perhaps of a GGUF file.

        Args:
            folder: The exported folder.
        """
        place = str(folder / BACKBONE) if self.backbone == BACKBONE else self.backbone
        return str(Path(place) / self.gguf_file) if self.gguf_file else place


def read_side_config(folder: Path) -> SideConfig | None:
    """The config of a folder with a side network; None for any other folder.

    Raises:
        ModelError: The file is damaged, or of a newer format.
    """
    path = folder / SIDE_CONFIG
    if not path.is_file():
        return None
    try:
        config = msgspec.json.decode(path.read_bytes(), type=SideConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=FETCH_AGAIN) from error
    if config.format > FORMAT:
        raise ModelError(
            f"{path} is of format {config.format}, and this version reads up to {FORMAT}",
            hint="use the version of coterie that wrote it, or a newer one",
        )
    return config


def write_side_config(folder: Path, config: SideConfig) -> None:
    """Write the file."""
    (folder / SIDE_CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
