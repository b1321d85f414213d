"""What is side-tuned on what, and what it is compared with: data sets, models, sizes, hyperparameters."""

from typing import Literal

import msgspec

from task_settings import Sizes

Variant = Literal[
    "eco", "eco without TS", "eco without TSTP", "neither", "mobillm", "bitfit-local", "bitfit-split", "lora-local"
]

SIDE_VARIANTS: tuple[Variant, ...] = ("eco", "eco without TS", "eco without TSTP", "neither")
"""With a side network; `mobillm` is `neither` by another name: every token, every epoch."""

LOCAL_VARIANTS: tuple[Variant, ...] = ("bitfit-local", "bitfit-split", "lora-local")
"""Without one."""

VARIANTS: tuple[Variant, ...] = ("lora-local", "bitfit-local", "bitfit-split", "mobillm", *SIDE_VARIANTS)
"""In the order of the table."""

RANKS = (16, 64, 128, 256)
USUAL_RANK = 64


class SideSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One data set with its model.

    Attributes:
        name: For people and `--sets`.
        slices: Whose slices `task_slices` makes.
        figure: Quality, a share.
        epochs: Of side-tuning.
        learning_rate: Of side-tuning.
        local_epochs: Of what trains the model itself: it takes fewer, and each costs the device a backward too.
        local_learning_rate: Of BitFit and LoRA.
        local_seeds: How many of the seeds they run: each takes as long as all side-tuning together.
        decoder: SmolLM2-135M, else MiniLM.
    """

    name: str
    slices: str
    figure: str
    sizes: Sizes
    epochs: int
    learning_rate: float
    local_epochs: int
    local_learning_rate: float = 5e-3
    local_seeds: int = 1
    batch_rows: int = 16
    decoder: bool = False

    @property
    def task(self) -> str:
        """What recipes call it."""
        return "sequence-classification" if self.slices == "sentence pairs" else self.slices


SETTINGS = (
    SideSetting(
        name="banking77",
        slices="sequence-classification",
        figure="accuracy",
        sizes=Sizes(train=640, test=1000),
        epochs=20,
        learning_rate=3e-3,
        local_epochs=10,
    ),
    SideSetting(
        name="banking77_pairs",
        slices="sentence pairs",
        figure="accuracy",
        sizes=Sizes(train=640, test=1000),
        epochs=20,
        learning_rate=1e-3,
        local_epochs=10,
    ),
    SideSetting(
        name="wikigold",
        slices="token-classification",
        figure="entity_f1",
        sizes=Sizes(train=320, test=342),
        epochs=12,
        learning_rate=3e-3,
        local_epochs=10,
    ),
    SideSetting(
        name="banking77 decoder",
        slices="sequence-classification",
        figure="accuracy",
        sizes=Sizes(train=320, test=1000),
        epochs=10,
        learning_rate=5e-3,
        local_epochs=3,
        local_learning_rate=5e-4,
        decoder=True,
    ),
    SideSetting(
        name="mts_dialog",
        slices="summarization",
        figure="token_accuracy",
        sizes=Sizes(train=128, test=60),
        epochs=10,
        learning_rate=1e-3,
        local_epochs=2,
        local_learning_rate=1e-3,
        batch_rows=4,
        decoder=True,
    ),
)


def quick(setting: SideSetting) -> SideSetting:
    """A look at whether everything runs: little is learnt from so few rows."""
    rows = 4 * setting.batch_rows if not setting.decoder else 2 * setting.batch_rows
    sizes = Sizes(train=min(rows, setting.sizes.train), test=8 if setting.decoder else 32)
    return msgspec.structs.replace(setting, sizes=sizes, epochs=2, local_epochs=1, local_seeds=1)
