"""What could be shared of a stage's blocks: the shapes that backends are measured with before anything is shared."""

import msgspec
from torch import nn

from coterie.backends.shares import AttentionShape, NeuronShape
from coterie.heads.layout import Refused, attention_layout, forms_of, neuron_layout
from coterie.heads.trials import Trial, cosines_of, output_of, own_blocks, quiet, trials_of
from coterie.models import StageModule
from coterie.models.stubs import hidden_argument, with_hidden

_UNMOVED = 1e-5
"""Against the change of a token itself, what may reach one before it by rounding."""


class BlockShapes(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a stage's first block.

    Attributes:
        attention: All its KV groups; None if they cannot be shared.
        neurons: All its neurons; None if they cannot be shared.
        causal: Tokens see only those before them, whether a mask says so or the attention's own code.
        dropout: Attention probabilities are dropped while training.
        notes: Why a part is None.
    """

    attention: AttentionShape | None = None
    neurons: NeuronShape | None = None
    causal: bool = False
    dropout: bool = False
    notes: tuple[str, ...] = ()


def block_shapes(stage: StageModule) -> BlockShapes:
    """The shapes of the first block of a stage, whose blocks are taken to be equal."""
    found = next(iter(own_blocks(stage.module)), None)
    if found is None:
        return BlockShapes(notes=("there is no block",))
    number, block = found
    try:
        forms = forms_of(str(stage.module.config.model_type))
        with quiet(stage):
            trial = trials_of(stage, {number: block})[number][0]
            causal = _is_causal(block, trial)
    except Refused as reason:
        return BlockShapes(notes=(str(reason),))
    notes: list[str] = []
    attention = neurons = None
    dropout = False
    try:
        layout = attention_layout(block, forms[0], cosines_of(trial))
        attention = layout.shape
        dropout = _drops(layout.core, forms[0].dropout)
    except Refused as reason:
        notes.append(f"heads are not shared: {reason}")
    try:
        neurons = neuron_layout(block, forms[1]).shape
    except Refused as reason:
        notes.append(f"neurons are not shared: {reason}")
    return BlockShapes(attention=attention, neurons=neurons, causal=causal, dropout=dropout, notes=tuple(notes))


def _drops(core: nn.Module, name: str) -> bool:
    value = getattr(core, name, 0.0)
    return bool(value.p if isinstance(value, nn.Dropout) else value)


def _is_causal(block: nn.Module, trial: Trial) -> bool:
    """Whether the first token's result is the same whatever the last token is."""
    hidden = hidden_argument(trial.args, trial.kwargs)
    other = hidden.clone()
    other[:, -1] *= -1  # norms would take away what is only added
    changed = output_of(block, Trial(*with_hidden(other, trial.args, trial.kwargs), trial.autocast))
    difference = changed - output_of(block, trial)
    return bool(difference[:, 0].norm() <= _UNMOVED * difference[:, -1].norm())
