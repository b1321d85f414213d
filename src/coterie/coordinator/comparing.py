"""From a recipe and described devices to the planner's comparison of ways, side-tuning among them. No torch."""

from collections.abc import Callable, Sequence

import msgspec

from coterie.config.recipe import Recipe, TrainSection
from coterie.config.side_section import SideSection
from coterie.coordinator.plan_facts import PlanFacts
from coterie.coordinator.planning import plan_request
from coterie.errors import UsageError
from coterie.ids import WorkerId
from coterie.planner.way import WaysRequest
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.profiles.hypothetical import EvenLinks, HypotheticalDevice, hypothetical_cluster

_LORA_KEYS = ("lora_variant", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that are not there, and which of them does what.

    Attributes:
        owner: Name of the one that holds the data; None for the first.
        server: Name of the one that would train the side network; None for the fastest of the others.
    """

    devices: tuple[HypotheticalDevice, ...]
    links: EvenLinks | None = None
    owner: str | None = None
    server: str | None = None


def compared_recipes(recipe: Recipe) -> tuple[Recipe, Recipe]:
    """What is planned for adapters (LoRA, as the recipe sets it or by default) and for side-tuning."""
    train = msgspec.structs.replace(recipe.train, freeze=())
    adapters = msgspec.structs.replace(train, mode="pipeline", method="lora")
    frozen = msgspec.structs.replace(train, mode="side", method="full", trainable=(), **_defaults(_LORA_KEYS))
    unpacked = msgspec.structs.replace(recipe.data, packing=False)
    return (
        msgspec.structs.replace(recipe, train=adapters),
        msgspec.structs.replace(recipe, train=frozen, data=unpacked),
    )


def ways_request(
    recipe: Recipe, side: SideSection, described: Described, facts_of: Callable[[Recipe], PlanFacts]
) -> WaysRequest:
    """The planner's question about all ways.

    Args:
        recipe: Of it count: model, data, training settings and plan.
        side: The side network and its cache.
        described: The devices.
        facts_of: Counts a recipe's model and measures this machine with it, or knows the answer already.

    Raises:
        UsageError: Owner or server are no devices.
        CoterieError: Model or data are not usable.
    """
    owner, server = _roles(described)
    adapters, frozen = compared_recipes(recipe)
    adapter_facts, frozen_facts = facts_of(adapters), facts_of(frozen)
    return WaysRequest(
        adapters=plan_request(adapters, adapter_facts.model, _cluster(described, adapter_facts)),
        frozen=plan_request(frozen, frozen_facts.model, _cluster(described, frozen_facts), forward_only=True),
        side=side.spec,
        data=frozen_facts.data,
        owner=owner,
        server=server,
        power={WorkerId(device.name): device.power for device in described.devices},
        cache_in_memory=side.cache == "memory",
        cache_quota_bytes=side.quota_bytes,
    )


def _cluster(described: Described, facts: PlanFacts) -> ClusterProfile:
    return hypothetical_cluster(described.devices, facts.device, described.links)


def _roles(described: Described) -> tuple[WorkerId, WorkerId]:
    names = [device.name for device in described.devices]
    for flag, name in (("--owner", described.owner), ("--server", described.server)):
        if name is not None and name not in names:
            raise UsageError(f"{flag} {name}: no --device has this name", hint=f"the devices are {', '.join(names)}")
    owner = described.owner or names[0]
    return WorkerId(owner), WorkerId(described.server or _fastest(described.devices, owner))


def _fastest(devices: Sequence[HypotheticalDevice], owner: str) -> str:
    """The fastest device beside the owner's; that one itself if there is no other."""
    others = [device for device in devices if device.name != owner] or devices
    return max(others, key=lambda device: (device.speed, device.memory_bytes or 0)).name


def _defaults(keys: Sequence[str]) -> dict[str, object]:
    return {key: getattr(TrainSection(), key) for key in keys}
