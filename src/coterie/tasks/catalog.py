"""Tasks by name."""

from coterie.errors import RecipeError
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.regression import Regression
from coterie.tasks.sequence_classification import SequenceClassification
from coterie.tasks.summarization import Summarization
from coterie.tasks.task import Task
from coterie.tasks.token_classification import TokenClassification

TASK_NAMES = (
    TokenClassification.name,
    SequenceClassification.name,
    Regression.name,
    CausalLm.name,
    Summarization.name,
)


def get_task(name: str, *, labels: tuple[str, ...] = ()) -> Task:
    """The task of this name; `labels` are those of a model that was trained before.

    Raises:
        RecipeError: No task has this name.
    """
    if name == TokenClassification.name:
        return TokenClassification(labels=labels)
    if name == SequenceClassification.name:
        return SequenceClassification(labels=labels)
    if name == Regression.name:
        return Regression()
    if name == CausalLm.name:
        return CausalLm()
    if name == Summarization.name:
        return Summarization()
    raise RecipeError(f"no task is called {name!r}", hint=f"the tasks are: {', '.join(TASK_NAMES)}")
