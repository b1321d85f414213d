"""The spec of a side-tuning run's backbone: frozen, but for the task layers, which the server trains."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from coterie.errors import RecipeError
from coterie.jobs.model_spec import FrozenDtype, ModelSpec
from coterie.models import ModelSource, make_forward_spec, make_model_spec


def make_backbone_spec(
    source: ModelSource,
    *,
    auto_class: str,
    seed: int,
    config_overrides: Mapping[str, Any] = MappingProxyType({}),
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
    frozen_dtype: FrozenDtype = "float32",
) -> ModelSpec:
    """A spec whose method is `head`, or `none` for a model without task layers (a language model).

    Args:
        source: The opened model.
        auto_class: Such as `AutoModelForSequenceClassification`.
        seed: Base of new task layers and of the side network.
        config_overrides: Config values that the task or the user sets.
        compute_dtype: What the devices compute in.
        frozen_dtype: How the devices hold the blocks' weights.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
        RecipeError: It has no layer that `frozen_dtype` would concern.
    """
    try:
        return make_model_spec(
            source,
            auto_class=auto_class,
            config_overrides=config_overrides,
            seed=seed,
            method="head",
            compute_dtype=compute_dtype,
            frozen_dtype=frozen_dtype,
        )
    except RecipeError:
        # There is no task layer. (If it was another mistake, the next call says so.)
        return make_forward_spec(
            source,
            auto_class=auto_class,
            config_overrides=config_overrides,
            seed=seed,
            compute_dtype=compute_dtype,
            frozen_dtype=frozen_dtype,
        )
