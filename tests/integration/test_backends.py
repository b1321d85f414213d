"""Runs whose layers are shared among compute backends: the losses of one device, also when a backend fails."""

import sys
import types

import pytest

from coterie.backends import catalog
from coterie.backends.backend import BackendInfo
from coterie.backends.numpy_backend import NumpyBackend
from coterie.errors import BackendError
from coterie.heads.pool import VERIFY_EVERY
from coterie.metrics.records import FaultRecord, StepRecord, SummaryRecord
from coterie.metrics.summary import backend_lines
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare
from coterie.worker.settings import WorkerSettings

GROUPS, NEURONS = 4, 64
STEPS = 3


def _no_opencl():
    try:
        found = catalog.find_backends(1, ("opencl",))
    except BackendError as error:
        return error.message
    for backend in found.backends:
        backend.close()
    return ""


NO_OPENCL = _no_opencl()


def dealt(*names):
    """Every part in nearly equal shares."""

    def part(total):
        even = total // len(names)
        counts = [even] * (len(names) - 1) + [total - even * (len(names) - 1)]
        shares = tuple(
            PartShare(backend=name, count=count, predicted_s=1.0) for name, count in zip(names, counts, strict=True)
        )
        return PartAllocation(shares=shares, predicted_s=1.0, best_single_s=2.0, best_single=names[0])

    return HeadAllocation(attention=part(GROUPS), neurons=part(NEURONS))


def workers(*names):
    """Two devices, each of which shares its layers among these backends."""
    return [WorkerSettings(name=f"device-{letter}", backends=names, allocation=dealt(*names)) for letter in "ab"]


class Faulty(NumpyBackend):
    """Computes well until it is told to fail."""

    fault = ""
    failures = 0

    @property
    def info(self):
        return BackendInfo(name="faulty", device="processor", kind="cpu", driver="none", threads=1)

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        type(self).failures += bool(self.fault)
        outputs, saved = super().forward(loaded, inputs, inner=inner, keep=keep)
        if self.fault == "crash":
            raise BackendError("the device is gone")
        if self.fault == "wrong":
            outputs.y[:] *= 1.1
        return outputs, saved


@pytest.fixture
def faulty(monkeypatch):
    """A backend of the catalog that a test can make fail."""
    kind = type("Faulty", (Faulty,), {})
    module = types.ModuleType("coterie_test_faulty_backend")
    module.probe = lambda _threads: (kind(),)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(catalog.MODULES, "faulty", module.__name__)
    return kind


# AdamW divides gradients by their size: where they are nothing but rounding it moves weights by whole steps, and two
# runs that round differently part. Plain descent shows whether their gradients are equal.
OPTIONS = {"workers": 2, "cuts": (3,), "max_steps": STEPS, "optimizer": "sgd", "learning_rate": 0.05}
SETTINGS = {
    "flush": {},
    "lora, recomputed": {"method": "lora", "learning_rate": 0.5, "recompute": "on"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_are_those_of_one_device_with_torch_alone(tmp_path, make_recipe, cluster, run, alone, settings):
    recipe = make_recipe(tmp_path / "run", **(OPTIONS | SETTINGS[settings]))
    watcher = cluster(*workers("torch", "numpy"))
    run(recipe, watcher)
    assert watcher.losses == pytest.approx(alone(recipe, STEPS), rel=5e-6)
    assert watcher.losses[-1] < watcher.losses[0]
    steps = [record for record in watcher.records if isinstance(record, StepRecord)]
    assert all(set(worker.backends) == {"torch", "numpy"} for step in steps for worker in step.workers)
    assert all(min(worker.backends.values()) > 0 for step in steps for worker in step.workers)
    assert any("heads of" in line and "torch 2, numpy 2" in line for line in watcher.said)


def test_stale_weights_stay_with_their_micro_batches_on_every_backend(tmp_path, make_recipe, cluster, run):
    options = OPTIONS | {"schedule": "stash", "freeze": ("embeddings",)}
    plain = cluster(*[WorkerSettings(name=f"device-{letter}") for letter in "ab"])
    run(make_recipe(tmp_path / "plain", **options), plain)
    shared = cluster(*workers("torch", "numpy"))
    run(make_recipe(tmp_path / "shared", **options), shared)
    assert shared.losses == pytest.approx(plain.losses, rel=5e-6)


@pytest.mark.skipif(bool(NO_OPENCL), reason=NO_OPENCL)
def test_opencl_computes_the_same_losses(tmp_path, make_recipe, cluster, run, alone):
    recipe = make_recipe(tmp_path / "run", **OPTIONS)
    watcher = cluster(*workers("torch", "opencl", "numpy"))
    run(recipe, watcher)
    assert watcher.losses == pytest.approx(alone(recipe, STEPS), rel=5e-6)


@pytest.mark.parametrize("fault", ["crash", "wrong"])
def test_a_backend_that_fails_in_mid_run_is_left_out_and_the_run_goes_on(
    tmp_path, make_recipe, cluster, run, alone, faulty, fault
):
    recipe = make_recipe(tmp_path / "run", **(OPTIONS | {"max_steps": 6}))
    shared = cluster(*workers("torch", "faulty"))

    def break_down(record):
        if isinstance(record, StepRecord) and record.step == 1:
            faulty.fault = fault

    shared.on_record = break_down
    run(recipe, shared)
    # What a wrong backend gave until it was found out is in the weights.
    assert shared.losses == pytest.approx(alone(recipe, 6), rel=0.1 if fault == "wrong" else 5e-6)
    faults = [record for record in shared.records if isinstance(record, FaultRecord)]
    assert {record.slug for record in faults} == {"backend"}
    assert {record.worker for record in faults} == {stage.worker for stage in shared.plan.stages}
    word = {"crash": "the device is gone", "wrong": "away from torch"}[fault]
    assert all(word in record.message for record in faults)
    summary = next(record for record in shared.records if isinstance(record, SummaryRecord))
    assert sum("the backend faulty was left out during the run" in line for line in backend_lines(summary)) == len(
        summary.devices
    )
    assert faulty.failures <= len(summary.devices) * {"crash": 1, "wrong": VERIFY_EVERY}[fault], "it was asked again"


def test_a_backend_that_is_not_there_ends_the_run_before_it_begins(tmp_path, make_recipe, cluster, run):
    watcher = cluster(WorkerSettings(name="device-a", backends=("torch", "abacus")))
    with pytest.raises(BackendError, match="no backend abacus"):
        run(make_recipe(tmp_path / "run", workers=1), watcher)


def test_the_scheduler_measures_and_decides_and_the_plan_says_so(tmp_path, make_recipe, cluster, run):
    watcher = cluster(WorkerSettings(name="device-a", backends=("torch", "numpy")))
    run(make_recipe(tmp_path / "run", workers=1, max_steps=1), watcher)
    for words in ("device-a: heads: ", "device-a: neurons: "):
        assert words in watcher.explanation
    assert any(line.startswith("compute backends: torch") for line in watcher.said)
