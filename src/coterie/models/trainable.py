"""Which of a model's own parameters are trained: all, chosen ones, its biases, or its task layers."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from coterie.errors import RecipeError
from coterie.jobs.model_spec import LoraSpec
from coterie.models.anatomy import Anatomy

_BLOCKS = re.compile(r"blocks? (\d+)(?:(\.\.)(\d+)?)?")

Setting = Literal["frozen", "trainable"]


class Choice(NamedTuple):
    """The user's patterns (see `matching`): what is not trained, or else all that is."""

    frozen: Sequence[str] = ()
    trainable: Sequence[str] = ()


def frozen_when_chosen(anatomy: Anatomy, choice: Choice, new_parameters: Iterable[str]) -> tuple[str, ...]:
    """What is not trained when the user chooses.

    Args:
        anatomy: The model's.
        choice: Patterns of either kind.
        new_parameters: Those that no file holds: untrained they would be random for ever.

    Raises:
        RecipeError: The patterns contradict each other, match nothing, freeze everything, or freeze a new layer.
    """
    chosen = _chosen(anatomy, choice)
    if not chosen:
        raise RecipeError("every parameter is frozen, so nothing would be trained", hint="freeze less")
    random = [name for name in new_parameters if name not in chosen]
    if random:
        layer = random[0].rpartition(".")[0]
        raise RecipeError(
            f"{random[0]} is new, no file holds it, and frozen it would stay random",
            hint=f"add {layer}.* to `trainable`" if choice.trainable else f"leave {layer} out of `freeze`",
        )
    return _all_but(anatomy, chosen)


def frozen_under_bitfit(anatomy: Anatomy, choice: Choice, task_layers: Iterable[str]) -> tuple[str, ...]:
    """What is not trained when only biases are, those of the chosen parameters, and the task layers.

    Raises:
        RecipeError: As `frozen_when_chosen`, or no bias is left.
    """
    chosen = _chosen(anatomy, choice)
    biases = {name for name in chosen if name.rpartition(".")[2] == "bias"}
    task = parameters_of(anatomy, task_layers)
    if not biases - task:
        raise RecipeError(
            "bitfit trains biases, and there are none to train here",
            hint="use the method `lora`; models such as Llama have no biases at all",
        )
    return _all_but(anatomy, biases | task)


def frozen_under_head(anatomy: Anatomy, task_layers: Iterable[str]) -> tuple[str, ...]:
    """What is not trained when only the task layers are.

    Raises:
        RecipeError: The model has no task layer.
    """
    task = parameters_of(anatomy, task_layers)
    if not task:
        raise RecipeError(
            "this model has no task layer for the method `head` to train",
            hint='choose layers instead: method = "full" with trainable = ["output layer"]',
        )
    return _all_but(anatomy, task)


def adapted_in(anatomy: Anatomy, lora: LoraSpec, trainable: Sequence[str]) -> tuple[str, ...]:
    """Those of the resolved targets whose weights the patterns choose.

    Raises:
        RecipeError: A pattern chooses none of them.
    """
    weights = {anatomy.slots.get(f"{name}.weight", f"{name}.weight"): name for name in lora.target_modules}
    chosen: set[str] = set()
    for pattern in trainable:
        found = weights.keys() & matching(anatomy, [pattern], "trainable")
        if not found:
            raise RecipeError(
                f"the trainable pattern {pattern!r} chooses no layer that gets an adapter",
                hint=f"adapters go to layers such as {lora.target_modules[0]}",
            )
        chosen |= {weights[name] for name in found}
    return tuple(name for name in lora.target_modules if name in chosen)


def parameters_of(anatomy: Anatomy, modules: Iterable[str]) -> frozenset[str]:
    """All parameters inside these modules."""
    prefixes = tuple(f"{module}." for module in modules)
    return frozenset(name for name in anatomy.unit_of if name.startswith(prefixes))


def matching(anatomy: Anatomy, patterns: Iterable[str], setting: Setting) -> frozenset[str]:
    """Parameters that patterns mean.

    A pattern is a unit (`embedding`, `block 3`, `output layer`), a range of blocks with both ends in it (`block 4..5`,
    `block 4..`), or a glob of parameter names. A matrix that both ends use is part of both, under each of its names.

    Raises:
        RecipeError: A pattern matches nothing.
    """
    matched: set[str] = set()
    for pattern in patterns:
        units = _units(anatomy, pattern)
        found = {name for name, unit in anatomy.unit_of.items() if unit in units or fnmatchcase(name, pattern)}
        found |= {name for slot, name in anatomy.slots.items() if fnmatchcase(slot, pattern)}
        if anatomy.tied is not None and anatomy.unit_count - 1 in units:
            found.add(anatomy.tied.name)
        if not found:
            raise RecipeError(
                f"the {setting} pattern {pattern!r} matches no parameter",
                hint=f"write a unit ({', '.join(anatomy.unit_names)}), blocks (block 0..1) or a glob such as "
                f"{next(iter(anatomy.unit_of))}",
            )
        matched |= found
    return frozenset(matched)


def _units(anatomy: Anatomy, pattern: str) -> frozenset[int]:
    match = _BLOCKS.fullmatch(pattern)
    if match is None:
        word = "embedding" if pattern == "embeddings" else pattern
        return frozenset(unit for unit, name in enumerate(anatomy.unit_names) if name == word)
    first, dots, last = match.groups()
    stop = int(last) + 1 if last else int(first) + 1
    if dots and not last:
        stop = anatomy.unit_count - 2
    return frozenset(block + 1 for block in range(int(first), stop) if block < anatomy.unit_count - 2)


def _chosen(anatomy: Anatomy, choice: Choice) -> frozenset[str]:
    if choice.frozen and choice.trainable:
        raise RecipeError(
            "`freeze` and `trainable` each say what the other leaves over, and both are given",
            hint="leave one of them out",
        )
    if choice.trainable:
        return matching(anatomy, choice.trainable, "trainable")
    return frozenset(anatomy.unit_of) - matching(anatomy, choice.frozen, "frozen")


def _all_but(anatomy: Anatomy, trained: frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(name for name in anatomy.unit_of if name not in trained)
