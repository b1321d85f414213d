"""Additive mode: the server learns prediction differences instead of labels (METHODS.md 2.5). No privacy promise.

Of a classification the difference is onehot(y) - softmax(f(x)), whose only positive entry is the label; of a regression
y - f(x). The server's output is added on the device to what the difference was taken from: probabilities, or the score.

The loss is the squared error, of a classification half of it. So a regression learns exactly what it would learn from
its scores, and the first step's gradient of a classification is that of the cross-entropy.
"""

from torch import Tensor
from torch.nn import functional

from coterie.errors import RecipeError
from coterie.tasks.task import GenerativeTask, Task


def check_additive(task: Task) -> None:
    """Refuse additive mode where a difference would be a whole vocabulary.

    Raises:
        RecipeError: The task's labels are tokens of a language model.
    """
    if isinstance(task, GenerativeTask):
        raise RecipeError(
            f"additive mode would send a number for every token of the vocabulary, at each position that {task.name} "
            "learns",
            hint="use the direct mode, or the additive one with classification, tagging or regression",
        )


def prediction_differences(logits: Tensor, labels: Tensor) -> Tensor:
    """What the server gets in place of labels.

    Args:
        logits: The backbone's own, (M, C).
        labels: Class ids (M,), or scores (M,) in a floating type.

    Returns:
        float32 (M, C), of scores (M,).
    """
    if labels.is_floating_point():
        return labels.float() - logits.float().reshape(-1)
    return functional.one_hot(labels, logits.shape[-1]) - logits.float().softmax(-1)


def difference_loss_sum(additions: Tensor, differences: Tensor) -> Tensor:
    """The loss, summed over M tokens, as a float32 scalar.

    Args:
        additions: The server's output, (M, C).
        differences: (M, C), of a regression (M,).
    """
    if differences.ndim == 1:
        return (additions.float().reshape(-1) - differences).square().sum()
    return (additions.float() - differences).square().sum() / 2


def added(logits: Tensor, additions: Tensor) -> Tensor:
    """What the device predicts from, (M, C): probabilities, or of a regression (C = 1) scores, with the additions."""
    return (logits.float() if logits.shape[-1] == 1 else logits.float().softmax(-1)) + additions.float()
