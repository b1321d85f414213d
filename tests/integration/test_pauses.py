"""A run that rests for a while gives the numbers of one that never did, whatever its schedule."""

import threading
from pathlib import Path

import pytest

from coterie.coordinator.run_control import RunControl
from coterie.metrics.records import AnyRecord, StepRecord
from coterie.metrics.status import RunStatus
from coterie.worker.settings import WorkerSettings

STEPS = 40
"""Enough for a wish to arrive before the last one."""
PAUSED_AT = 2


class Rest:
    """Asks for a pause when a step is done, looks at the run for a while, and lets it go on."""

    def __init__(self, folder: Path, wait_until) -> None:
        self._control = RunControl(folder)
        self._wait_until = wait_until
        self._thread = threading.Thread(target=self._rest, daemon=True)
        self.seen: list[RunStatus] = []
        self.failure: BaseException | None = None

    def on_record(self, record: AnyRecord) -> None:
        if isinstance(record, StepRecord) and record.step == PAUSED_AT:
            self._thread.start()

    def _rest(self) -> None:
        try:
            self._control.pause()
            self._wait_until(lambda: self._control.status().phase == "paused", "a rest")
            self.seen += [self._control.status() for _ in range(20)]
            self._control.go_on()
        except BaseException as failure:
            self.failure = failure

    def end(self) -> list[RunStatus]:
        self._thread.join(100)
        assert self.failure is None
        return self.seen


@pytest.mark.parametrize("schedule", ["flush", "stash"])
def test_a_pause_changes_no_number(make_recipe, run, cluster, tmp_path, schedule, wait_until):
    options = {"schedule": schedule, "max_steps": STEPS, "workers": 2, "epochs": 5}
    workers = tuple(WorkerSettings(name=name) for name in ("a", "b"))
    undisturbed, paused = cluster(*workers), cluster(*workers)
    run(make_recipe(tmp_path / "undisturbed", **options), undisturbed)
    recipe = make_recipe(tmp_path / "paused", **options)
    rest = Rest(Path(recipe.run.output), wait_until)
    paused.on_record = rest.on_record
    run(recipe, paused)
    seen = rest.end()
    assert {status.phase for status in seen} == {"paused"}
    assert len({status.step for status in seen}) == 1
    assert PAUSED_AT < seen[0].step < STEPS
    assert len(paused.losses) == STEPS
    assert paused.losses == undisturbed.losses
