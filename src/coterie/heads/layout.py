"""Where the projections of a block's attention and neurons are, by family, and what stands against sharing them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.backends.shares import Activation, AttentionShape, NeuronShape
from coterie.heads.effective import Fusion, Projection, Projections


class Refused(Exception):  # noqa: N818 - no error: the block runs as it is
    """Why a part of a block is not split, in words."""


class AttentionForm(NamedTuple):
    """The names in a family's attention.

    Attributes:
        core: Path in the block of the module whose forward is the attention.
        firsts: Paths in it of the projections of queries, keys and values, or of the one layer for all.
        fusion: How they lie in it.
        second: Path in the block of the output projection.
        dropout: Attribute of the core: the share of probabilities dropped, or a module that has it.
        head_dim: Attribute of the core: numbers of a head.
        scale: Attribute of the core: what scores are multiplied by.
        tail: What the core does after the mixing: nothing; the second projection; then dropout by the module of that
            name; or dropout and the residual.
    """

    core: str
    firsts: tuple[str, ...]
    fusion: Fusion
    second: str
    dropout: str
    head_dim: str = "head_dim"
    scale: str = "scaling"
    tail: str = "projected"


class NeuronForm(NamedTuple):
    """The names in a family's feed-forward part.

    Attributes:
        firsts: Paths in the block of the first layer, or of gate and up, or of the one layer for both.
        fusion: How they lie in it.
        activation: Path of the function's module.
        second: Path of the second layer.
        core: Path of the module whose forward is the whole gated part; empty without a gate.
    """

    firsts: tuple[str, ...]
    fusion: Fusion
    activation: str
    second: str
    core: str = ""


_BERT = (
    AttentionForm(
        "attention.self",
        ("query", "key", "value"),
        "apart",
        "attention.output.dense",
        "dropout",
        head_dim="attention_head_size",
        tail="inner",
    ),
    NeuronForm(("intermediate.dense",), "apart", "intermediate.intermediate_act_fn", "output.dense"),
)
_DISTILBERT = (
    AttentionForm(
        "attention",
        ("q_lin", "k_lin", "v_lin"),
        "apart",
        "attention.out_lin",
        "dropout",
        head_dim="attention_head_size",
    ),
    NeuronForm(("ffn.lin1",), "apart", "ffn.activation", "ffn.lin2"),
)
_LLAMA = (
    AttentionForm("self_attn", ("q_proj", "k_proj", "v_proj"), "apart", "self_attn.o_proj", "attention_dropout"),
    NeuronForm(("mlp.gate_proj", "mlp.up_proj"), "apart", "mlp.act_fn", "mlp.down_proj", core="mlp"),
)
_PHI3 = (
    AttentionForm("self_attn", ("qkv_proj",), "stacked", "self_attn.o_proj", "attention_dropout"),
    NeuronForm(("mlp.gate_up_proj",), "stacked", "mlp.activation_fn", "mlp.down_proj", core="mlp"),
)
_GPT2 = (
    AttentionForm("attn", ("c_attn",), "stacked", "attn.c_proj", "attn_dropout", tail="resid_dropout"),
    NeuronForm(("mlp.c_fc",), "apart", "mlp.act", "mlp.c_proj"),
)
_NEOX = (
    AttentionForm(
        "attention", ("query_key_value",), "by_head", "attention.dense", "attention_dropout", head_dim="head_size"
    ),
    NeuronForm(("mlp.dense_h_to_4h",), "apart", "mlp.act", "mlp.dense_4h_to_h"),
)
_BLOOM = (
    AttentionForm(
        "self_attention",
        ("query_key_value",),
        "by_head",
        "self_attention.dense",
        "attention_dropout",
        scale="inv_norm_factor",
        tail="residual",
    ),
    NeuronForm(("mlp.dense_h_to_4h",), "apart", "mlp.gelu_impl", "mlp.dense_4h_to_h"),
)
_OPT = (
    AttentionForm("self_attn", ("q_proj", "k_proj", "v_proj"), "apart", "self_attn.out_proj", "dropout"),
    NeuronForm(("fc1",), "apart", "activation_fn", "fc2"),
)
FORMS: dict[str, tuple[AttentionForm, NeuronForm]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie"), _BERT),
    "distilbert": _DISTILBERT,
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "granite", "smollm3"), _LLAMA),
    **dict.fromkeys(("qwen3", "gemma2", "gemma3_text", "mixtral"), _LLAMA),  # in part: see the refusals below
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "bloom": _BLOOM,
    "opt": _OPT,
}
"""By model type. Only families that tests hold equal: a block may do something that a trial does not show."""

_CAPS = ("attn_logit_softcapping", "clip_qkv")
"""Settings that bound scores or projections, which shows only in large numbers."""


class AttentionLayout(NamedTuple):
    """The attention of one block."""

    form: AttentionForm
    shape: AttentionShape
    core: nn.Module
    firsts: Projections
    second: Projection


class NeuronLayout(NamedTuple):
    """The neurons of one block."""

    form: NeuronForm
    shape: NeuronShape
    core: nn.Module | None
    first: nn.Module
    activation: nn.Module
    firsts: Projections
    second: Projection


def forms_of(model_type: str) -> tuple[AttentionForm, NeuronForm]:
    """The names in blocks of a family.

    Raises:
        Refused: It is not known here.
    """
    if model_type not in FORMS:
        raise Refused(f"{model_type} blocks are not among those that can be split: {', '.join(sorted(FORMS))}")
    return FORMS[model_type]


def attention_layout(block: nn.Module, form: AttentionForm, cos: Tensor | None) -> AttentionLayout:
    """Finds a block's attention.

    Args:
        block: As Hugging Face's code makes it, PEFT's wrapping or not.
        form: The family's names.
        cos: Cosines [B or 1, T, R] of the positions that the block is given, if any.

    Raises:
        Refused: It does something that no share computes.
    """
    core = _found(block, form.core, "attention")
    modules = [_found(core, path, "attention") for path in form.firsts]
    second = Projection(_found(block, form.second, "attention"))
    _refuse_more(core, form)
    for one in (*(Projection(module) for module in modules), second):
        if one.refusal:
            raise Refused(one.refusal)
    head_dim, scale = getattr(core, form.head_dim), getattr(core, form.scale)
    heads = second.weight().shape[1] // head_dim
    rows = sum(Projection(module).rows for module in modules)
    groups = (rows // head_dim - heads) // 2
    widths = (heads * head_dim, groups * head_dim, groups * head_dim)
    firsts = Projections(modules, form.fusion, widths, head_dim)
    turned = cos is not None and getattr(core, "use_rope", True)
    shape = AttentionShape(
        hidden=Projection(modules[0]).weight().shape[1],
        output=second.rows,
        head_dim=head_dim,
        heads=heads,
        groups=groups,
        scale=float(scale),
        biased=firsts.biased,
        rotary="half" if turned else "none",
        rotary_dims=cos.shape[-1] if cos is not None and turned else 0,
    )
    return AttentionLayout(form, shape, core, firsts, second)


def neuron_layout(block: nn.Module, form: NeuronForm) -> NeuronLayout:
    """Finds a block's feed-forward part; see `attention_layout`.

    Raises:
        Refused: It does something that no share computes.
    """
    core = _found(block, form.core, "feed-forward part") if form.core else None
    modules = [_found(block, path, "feed-forward part") for path in form.firsts]
    activation = _found(block, form.activation, "feed-forward part")
    second = Projection(_found(block, form.second, "feed-forward part"))
    for one in (*(Projection(module) for module in modules), second):
        if one.refusal:
            raise Refused(one.refusal)
    neurons = second.weight().shape[1]
    firsts = Projections(modules, form.fusion, (neurons,) * (2 if form.core else 1))
    shape = NeuronShape(
        hidden=Projection(modules[0]).weight().shape[1],
        output=second.rows,
        neurons=neurons,
        activation=_activation(activation),
        gated=bool(form.core),
        biased=firsts.biased,
    )
    return NeuronLayout(form, shape, core, modules[0], activation, firsts, second)


def _found(parent: nn.Module, path: str, what: str) -> nn.Module:
    module: object = parent
    for name in path.split("."):
        module = getattr(module, name, None)
    if not isinstance(module, nn.Module):
        raise Refused(f"its {what} has no {path}, and so is of a kind that is not known here")
    return module


def _refuse_more(core: nn.Module, form: AttentionForm) -> None:
    """Whatever else has parameters in there is computed by no share."""
    second = form.second.removeprefix(f"{form.core}.")
    known = tuple(f"{path}." for path in (*form.firsts, second))
    more = sorted({name.split(".")[0] for name, _ in core.named_parameters() if not name.startswith(known)})
    if more:
        raise Refused(f"its attention has {' and '.join(more)}, which no share computes")
    config = getattr(core, "config", None)
    for name in _CAPS:
        if getattr(core, name, None) is not None or getattr(config, name, None) is not None:
            raise Refused(f"its attention has {name}, which no share computes")
    kind = getattr(config, "_attn_implementation", "eager")
    if kind not in {"sdpa", "eager"}:
        raise Refused(f"its attention runs as {kind}, whose masks are not known here")


def _activation(module: nn.Module) -> Activation:
    """Which function it is, by what it gives."""
    x = torch.linspace(-6, 6, 97)
    with torch.no_grad():
        values = module(x)
    known: dict[Activation, Tensor] = {
        "gelu": functional.gelu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "relu": functional.relu(x),
        "silu": functional.silu(x),
    }
    for name, expected in known.items():
        if torch.allclose(values, expected, rtol=1e-5, atol=2e-6):
            return name
    raise Refused(f"the activation of its neurons ({type(module).__name__}) is none that a share computes")
