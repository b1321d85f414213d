"""Who gets to see what of text, labels and model, in sentences: facts about what is sent, no judgement of its worth.

How much text can be read from hidden states is measured by `coterie audit`, and nothing about it is claimed here.
"""

from collections.abc import Sequence

from coterie.ids import WorkerId
from coterie.jobs.side_spec import SideSpec
from coterie.planner.plan import StageAssignment


def exposed_to_nobody(owner_name: str) -> tuple[str, ...]:
    """Training on the owner's own device."""
    return (f"nobody: text, labels and weights stay on {owner_name}",)


def exposed_by_stages(
    stages: Sequence[StageAssignment], owner: WorkerId, *, sees_labels: bool, last_words: str = ""
) -> tuple[str, ...]:
    """Stages on devices other than the owner's."""
    told = []
    for stage in stages:
        if stage.worker == owner:
            continue
        seen = "all text (token ids), the hidden states that cross its cuts, and its layers' weights"
        if sees_labels and stage is stages[-1]:
            seen = seen.replace(", and its", ", all labels, and its")
        told.append(f"{stage.device_name}: {seen}{last_words}")
    return tuple(told)


def exposed_to_server(server_name: str, side: SideSpec, blocks: int) -> tuple[str, ...]:
    """What a side network's server gets."""
    which = "the tokens that enter the loss" if side.selects_tokens else "every token"
    layers = f"blocks {side.first_layer} to {blocks}" if side.first_layer < blocks else f"block {blocks}"
    labels = "all labels"
    if side.mode == "additive":
        labels = "prediction differences, whose only positive entry is the label"
    seen = f"the outputs of {layers} at {which} of every row ({side.upload}), {labels}, and the trained side network"
    return (f"{server_name}: {seen}; no token ids (`coterie audit` measures what can be read from such outputs)",)
