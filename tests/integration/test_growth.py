"""A device that joins while a run trains: measured beside it, and used where that pays."""

import pytest

from coterie.api import training
from coterie.coordinator.one_device import largest_difference
from coterie.coordinator.run import TrainingRun
from coterie.metrics.records import MembershipRecord, RebalanceRecord, StepRecord
from coterie.worker.settings import WorkerSettings

STEPS = 12
SLOW = WorkerSettings(name="slow", speed=0.02)
FAST = WorkerSettings(name="fast")


@pytest.fixture
def runs(monkeypatch):
    """Every training run of the test, as it begins."""
    begun = []

    class Watched(TrainingRun):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            begun.append(self)

    monkeypatch.setattr(training, "TrainingRun", Watched)
    return begun


def test_a_much_faster_device_that_joins_in_mid_run_takes_the_layers_and_changes_no_number(
    tmp_path, make_recipe, cluster, run, alone, runs
):
    class Growing(cluster):
        """The run rests until the newcomer is weighed: how many steps that would take depends on the machine.

        Nor must one thread of this process measure, and draw random numbers, while another one computes.
        """

        def notice(self, text):
            super().notice(text)
            if text.startswith("paused: "):
                self.start(FAST)

    def rest(record):
        if isinstance(record, StepRecord) and record.step == 0:
            runs[-1].session.pausing.ask()
        elif isinstance(record, RebalanceRecord):
            runs[-1].session.pausing.end()

    watcher = Growing(SLOW)
    watcher.on_record = rest
    recipe = make_recipe(
        tmp_path / "run",
        workers=1,
        epochs=20,
        max_steps=STEPS,
        evaluate_every_epoch=False,
        heartbeat_timeout_s=60,
    )
    result = run(recipe, watcher)
    (joined,) = (record for record in watcher.records if isinstance(record, MembershipRecord))
    assert (joined.worker, joined.change) == ("fast", "joined")
    weighed = next(record for record in watcher.records if isinstance(record, RebalanceRecord))
    assert (weighed.cause, weighed.worth) == ("joined", True), weighed.reason
    assert weighed.gain_s > weighed.cost_s
    assert weighed.moved_units > 0
    assert weighed.line in [record.line for record in result.summary.rebalances]
    assert "fast" in [stage.worker for stage in result.plan.stages]
    assert result.summary.recoveries == ()
    assert watcher.failures == {}
    assert len(result.losses) == STEPS
    assert largest_difference(result.losses, alone(recipe, STEPS)) < 1e-5
