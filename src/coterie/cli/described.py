"""Facts for plans about devices that are only described; needs no torch where they are known."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.cli.console import PlainConsole
    from coterie.config.recipe import Recipe
    from coterie.coordinator.plan_facts import PlanFacts


def facts_of(recipe: "Recipe", console: "PlainConsole") -> "PlanFacts":
    """Model, data and this machine's speed: kept from an earlier command, else counted and measured now.

    Args:
        recipe: Whose model and data.
        console: Told of what is measured or was kept.

    Raises:
        CoterieError: Model, data or recipe are not usable.
    """
    from coterie.clock import SystemClock  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.kept import kept_note  # noqa: PLC0415
    from coterie.coordinator.plan_facts import known_facts  # noqa: PLC0415

    facts = None if recipe.cluster.measure_again else known_facts(recipe)
    if facts is None:
        from coterie import api  # noqa: PLC0415 - imports torch: seconds

        return api.measure_facts(recipe, console)
    if facts.device.measured_at_s:
        console.notice(kept_note("this machine", facts.device, SystemClock().wall() - facts.device.measured_at_s))
    return facts
