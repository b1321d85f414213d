"""What a block's attention and feed-forward part look like, read off a model's config: enough to time shares."""

from typing import TYPE_CHECKING, Literal, cast

import msgspec

from coterie.backends.shares import Activation, AttentionShape, NeuronShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Family = Literal["bert", "llama", "gpt2", "opt"]

_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "ernie"), "bert"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "phi3"), "llama"),
    "gpt2": "gpt2",
    "opt": "opt",
}
_BIASED_QUERIES = frozenset({"qwen2"})
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}


class LayerShapes(msgspec.Struct, frozen=True, kw_only=True):
    """A block's two parts.

    Attributes:
        attention: All its KV groups; None if the family is not known.
        neurons: All its neurons; None if the family or the activation is not known.
        blocks: How many blocks the model has.
        causal: A token sees only those before it.
        dropout: Attention probabilities are dropped while training.
        notes: Why a part is None.
    """

    attention: AttentionShape | None = None
    neurons: NeuronShape | None = None
    blocks: int
    causal: bool = False
    dropout: bool = False
    notes: tuple[str, ...] = ()


def layer_shapes(config: "PretrainedConfig") -> LayerShapes:
    """The shapes of one block of a model; blocks are taken to be equal."""
    blocks = cast("int", _first(config, "num_hidden_layers", "n_layer", "n_layers", default=0))
    family = _FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(_FAMILIES)
        return LayerShapes(blocks=blocks, notes=(f"{config.model_type} is not among the families known here: {known}",))
    hidden = cast("int", _first(config, "hidden_size", "n_embd", "dim", default=0))
    neurons, note = _neurons(config, family, hidden)
    dropout = _first(config, "attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", default=0.0)
    return LayerShapes(
        attention=_attention(config, family, hidden),
        neurons=neurons,
        blocks=blocks,
        causal=family != "bert",
        dropout=bool(dropout),
        notes=(note,) if note else (),
    )


def _attention(config: "PretrainedConfig", family: Family, hidden: int) -> AttentionShape:
    heads = cast("int", _first(config, "num_attention_heads", "n_head", "n_heads", default=1))
    groups = cast("int", _first(config, "num_key_value_heads", default=heads)) if family == "llama" else heads
    head_dim = cast("int", _first(config, "head_dim", default=hidden // heads))
    biased = family != "llama" or config.model_type in _BIASED_QUERIES or bool(getattr(config, "attention_bias", False))
    turned = int(head_dim * cast("float", _first(config, "partial_rotary_factor", default=1.0)))
    return AttentionShape(
        hidden=hidden,
        output=hidden,
        head_dim=head_dim,
        heads=heads,
        groups=groups,
        scale=head_dim**-0.5,
        biased=biased,
        rotary="half" if family == "llama" else "none",
        rotary_dims=turned if family == "llama" else 0,
    )


def _neurons(config: "PretrainedConfig", family: Family, hidden: int) -> tuple[NeuronShape | None, str]:
    width = _first(config, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden)
    function = _first(config, "hidden_activation", "hidden_act", "activation_function", "activation", default="gelu")
    activation = _ACTIVATIONS.get(str(function))
    if activation is None:
        return None, f"the activation {function} of its neurons is not known here"
    return NeuronShape(
        hidden=hidden,
        output=hidden,
        neurons=cast("int", width),
        activation=activation,
        gated=family == "llama",
        biased=family != "llama" or bool(getattr(config, "mlp_bias", False)),
    ), ""


def _first(config: "PretrainedConfig", *names: str, default: float | str) -> object:
    """The first of these settings that the config has and that is not None."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)
