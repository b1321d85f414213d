from collections.abc import Callable

import pytest
from transformers import BertConfig, LlamaConfig, MixtralConfig

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.measure import device_profile

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 101,
}


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples of little work: what is measured is looked at here, never how fast it was."""
    for name, value in {"_BUDGET_S": 0.0, "_MATRIX": 64, "_UPDATE_ELEMENTS": 1 << 12}.items():
        monkeypatch.setattr(device_profile, name, value)


@pytest.fixture
def bert() -> Callable[..., ModelSpec]:
    """A tiny BERT token classifier; config values may be overridden."""

    def make(
        *, frozen: tuple[str, ...] = (), lora: LoraSpec | None = None, seed: int = 0, **config: object
    ) -> ModelSpec:
        return ModelSpec(
            config_json=BertConfig(**{**SMALL, "num_labels": 9, **config}).to_json_string(),
            auto_class="AutoModelForTokenClassification",
            seed=seed,
            frozen=frozen,
            method="full" if lora is None else "lora",
            lora=lora,
        )

    return make


@pytest.fixture
def llama() -> Callable[..., ModelSpec]:
    """A tiny Llama with tied embeddings."""

    def make(**config: object) -> ModelSpec:
        values = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True, **config}
        return ModelSpec(config_json=LlamaConfig(**values).to_json_string(), auto_class="AutoModelForCausalLM")

    return make


@pytest.fixture
def mixtral() -> ModelSpec:
    """A tiny mixture of experts."""
    values = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return ModelSpec(config_json=MixtralConfig(**values).to_json_string(), auto_class="AutoModelForCausalLM")
