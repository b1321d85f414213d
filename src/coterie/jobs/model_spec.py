"""Which model, which class of it, and which of its parameters are trained."""

from typing import Literal

import msgspec

TrainableMethod = Literal["full", "lora", "bitfit", "head"]
LoraVariant = Literal["lora", "rslora", "dora"]
FrozenDtype = Literal["float32", "bfloat16", "int8", "int4"]


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters, in PEFT's words.

    The variants: `rslora` scales by alpha / sqrt(rank) instead of alpha / rank; `dora` also trains the length of each
    output's weights, apart from their direction.

    `target_modules` and `modules_to_save` are full module names, resolved once on the whole model (never on a stage,
    whose stubs would hide modules): see `coterie.models.adapters.resolve_lora`.
    """

    variant: LoraVariant = "lora"
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to build any stage of a model, without the weights.

    Attributes:
        config_json: The Hugging Face config, task settings (labels, dropout) included, as `config.to_json_string()`.
        auto_class: Name of the transformers auto class, such as `AutoModelForTokenClassification`.
        seed: Base of all randomness: new layers, adapters, dropout.
        method: Train everything (`full`), adapters (`lora`), biases and task layers (`bitfit`), only task layers
            (`head`), or nothing (`none`: the model only predicts).
        lora: Set exactly when `method` is `lora`.
        frozen: Full names of parameters that are not trained, under the methods that train the model's own (all but
            `lora`).
        compute_dtype: Type of the forward's arithmetic; weights that are trained stay float32.
        frozen_dtype: How the linear layers inside blocks are held whose weights are not trained; see
            `coterie.models.frozen_weights`.
    """

    config_json: str
    auto_class: str
    seed: int = 0
    method: TrainableMethod | Literal["none"] = "full"
    lora: LoraSpec | None = None
    frozen: tuple[str, ...] = ()
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_dtype: FrozenDtype = "float32"
