"""Tasks by name."""

from coterie.errors import RecipeError
from coterie.tasks.task import Task
from coterie.tasks.token_classification import TokenClassification

TASK_NAMES = (TokenClassification.name,)


def get_task(name: str, *, labels: tuple[str, ...] = ()) -> Task:
    """The task of this name; `labels` are those of a model that was trained before.

    Raises:
        RecipeError: No task has this name.
    """
    if name == TokenClassification.name:
        return TokenClassification(labels=labels)
    raise RecipeError(f"no task is called {name!r}", hint=f"the tasks are: {', '.join(TASK_NAMES)}")
