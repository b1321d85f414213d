"""What of the model is whose in a side-tuning run: the frozen backbone the devices', the output layer the server's."""

from collections.abc import Mapping

import msgspec

from coterie.config.recipe import Recipe
from coterie.jobs.model_spec import ModelSpec
from coterie.models import ModelSource, make_forward_spec, make_model_spec
from coterie.tasks.task import GenerativeTask, Task


def side_model_spec(recipe: Recipe, source: ModelSource, task: Task, overrides: Mapping[str, object]) -> ModelSpec:
    """The spec that the server builds the output layer from: task layers are trained, a language model's are not.

    Raises:
        UnsupportedModelError: The model cannot be cut.
        RecipeError: A setting does not fit it.
    """
    if isinstance(task, GenerativeTask):
        spec = make_forward_spec(
            source,
            auto_class=task.auto_class,
            config_overrides=overrides,
            frozen_dtype=recipe.model.frozen_dtype,
        )
        return msgspec.structs.replace(spec, seed=recipe.train.seed)
    return make_model_spec(
        source,
        auto_class=task.auto_class,
        config_overrides=overrides,
        seed=recipe.train.seed,
        method="head",
        frozen_dtype=recipe.model.frozen_dtype,
    )


def backbone_spec(spec: ModelSpec) -> ModelSpec:
    """The same model as devices run it: nothing of it is trained."""
    return msgspec.structs.replace(spec, method="none", frozen=())
