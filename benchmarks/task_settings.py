"""What is trained on what, and how, to compare every task with a plain loop: the same on both sides."""

import msgspec


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows a task's slices have."""

    train: int
    test: int


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One task: its model, slices and hyperparameters, which are the same on both sides.

    Attributes:
        name: For people; pairs of texts are a case of sequence classification.
        figures: Quality by name, all shares; the first is compared.
        steps: Of the runs whose quality is compared.
    """

    name: str
    figures: tuple[str, ...]
    sizes: Sizes
    steps: int
    learning_rate: float
    batch_rows: int = 16
    decoder: bool = False

    @property
    def task(self) -> str:
        """What recipes call it."""
        return "sequence-classification" if self.name == "sentence pairs" else self.name


SETTINGS = (
    Setting(
        name="token-classification",
        figures=("entity_f1",),
        sizes=Sizes(train=1280, test=342),
        steps=160,
        learning_rate=3e-4,
        batch_rows=8,
    ),
    Setting(
        name="sequence-classification",
        figures=("accuracy",),
        sizes=Sizes(train=1280, test=1000),
        steps=80,
        learning_rate=3e-4,
    ),
    Setting(
        name="sentence pairs",
        figures=("accuracy",),
        sizes=Sizes(train=1280, test=1000),
        steps=80,
        learning_rate=2e-4,
    ),
    Setting(
        name="regression",
        figures=("spearman", "pearson"),
        sizes=Sizes(train=1280, test=1000),
        steps=80,
        learning_rate=2e-4,
    ),
    Setting(
        name="causal-lm",
        figures=("token_accuracy",),
        sizes=Sizes(train=64, test=64),
        steps=30,
        learning_rate=1e-3,
        batch_rows=2,
        decoder=True,
    ),
    Setting(
        name="summarization",
        figures=("token_accuracy",),
        sizes=Sizes(train=64, test=60),
        steps=30,
        learning_rate=1e-3,
        batch_rows=2,
        decoder=True,
    ),
)
