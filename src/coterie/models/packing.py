"""Models that keep rows apart which share a context: those whose attention reads where each row begins."""

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.skeleton import config_of

PACKABLE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
    }
)
"""Model types for which a test holds the loss of packed rows equal to that of the same rows apart."""


def check_packing(spec: ModelSpec) -> None:
    """Refuse models in which a packed row would see the rows before it.

    Raises:
        UnsupportedModelError: The model is not known to keep rows apart.
    """
    kind = config_of(spec).model_type
    if kind not in PACKABLE:
        raise UnsupportedModelError(
            f"{kind} models are not known to keep rows apart that share a context (packing)",
            hint=f"leave packing out; it works with {', '.join(sorted(PACKABLE))}",
        )
