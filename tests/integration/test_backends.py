"""Runs whose layers are shared among compute backends: the losses of one device, also when backends fail."""

import importlib.util
import os
import signal
import subprocess
import sys
import types

import msgspec
import psutil
import pytest

from coterie.backends import catalog
from coterie.backends.backend import BackendInfo
from coterie.backends.child_process import ChildProcessBackend
from coterie.backends.numpy_backend import NumpyBackend
from coterie.errors import BackendError
from coterie.local import JOIN_LINK_VARIABLE
from coterie.metrics.fault_records import RecoveryRecord
from coterie.metrics.progress import DeviceLine, RunState
from coterie.metrics.records import FaultRecord, StepRecord, SummaryRecord
from coterie.metrics.summary import backend_lines
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare
from coterie.units import MIB
from coterie.worker.settings import WorkerSettings

GROUPS, NEURONS = 4, 64
WORKER = f"""
import asyncio, os, sys
import msgspec
from coterie.measure import device_profile
from coterie.transport.join_link import JoinLink
from coterie.worker.program import run_worker
from coterie.worker.settings import WorkerSettings
settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
link = JoinLink.from_text(os.environ["{JOIN_LINK_VARIABLE}"])
device_profile._BUDGET_S = 0.01  # no plan here depends on it
asyncio.run(run_worker(link, settings, lambda text: print(text, flush=True)))
"""

# AdamW divides gradients by their size: where they are nothing but rounding it moves weights by whole steps, and two
# runs that round differently part. Plain descent shows whether their gradients are equal.
OPTIONS = {"optimizer": "sgd", "learning_rate": 0.05}

needs_opencl = pytest.mark.skipif(
    importlib.util.find_spec("pyopencl") is None, reason="pyopencl is not installed (extra `backends`)"
)


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


def worker(name, *names, **settings):
    """A device that shares its layers among these backends."""
    return WorkerSettings(name=name, backends=names, allocation=dealt(*names), **settings)


def records(watcher, kind):
    return [record for record in watcher.records if isinstance(record, kind)]


class Faulty(NumpyBackend):
    """Computes well until it is told to fail."""

    fails = False
    failures = 0
    nonsense = float("nan")

    @property
    def info(self):
        return BackendInfo(name="faulty", device="processor", kind="cpu", driver="none", threads=1)

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        outputs, saved = super().forward(loaded, inputs, inner=inner, keep=keep)
        if self.fails:
            type(self).failures += 1
            outputs.y[:, 0, 0] += self.nonsense
        return outputs, saved


@pytest.fixture
def faulty(monkeypatch):
    """A catalog with a backend that a test can make fail, and with NumPy in a process that it can end."""
    kind = type("Faulty", (Faulty,), {})
    for name, probe in {"faulty": lambda _: (kind(),), "numpy": lambda _: (ChildProcessBackend("numpy"),)}.items():
        module = types.ModuleType(f"coterie_test_{name}_backend")
        module.probe = probe
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(catalog.MODULES, name, module.__name__)
    return kind


def test_two_devices_give_the_losses_of_one_with_torch_alone(tmp_path, make_recipe, cluster, run, alone):
    recipe = make_recipe(tmp_path / "run", **OPTIONS, workers=2, cuts=(3,), max_steps=3)
    watcher = cluster(worker("device-a", "torch", "numpy"), worker("device-b", "torch", "numpy"))
    run(recipe, watcher)
    assert watcher.losses == pytest.approx(alone(recipe, 3), rel=5e-6)
    assert watcher.losses[-1] < watcher.losses[0]
    of_workers = [worker for step in records(watcher, StepRecord) for worker in step.workers]
    assert all(set(one.backends) == {"torch", "numpy"} and min(one.backends.values()) > 0 for one in of_workers)
    assert any("heads of" in line and "torch 2, numpy 2" in line for line in watcher.said)


def test_backends_that_die_or_compute_nonsense_in_mid_run_are_left_out_and_the_losses_stay(
    tmp_path, make_recipe, cluster, run, alone, faulty
):
    recipe = make_recipe(tmp_path / "run", **OPTIONS, workers=1, max_steps=5)
    watcher = cluster(worker("device-a", "torch", "numpy", "faulty"))

    def break_down(record):
        if not isinstance(record, StepRecord):
            return
        if record.step == 1:
            (hosted,) = [p for p in psutil.Process().children() if "coterie.backends.child_program" in p.cmdline()]
            os.kill(hosted.pid, signal.SIGKILL)
        faulty.fails = record.step >= 2

    watcher.on_record = break_down
    run(recipe, watcher)
    assert watcher.losses == pytest.approx(alone(recipe, 5), rel=5e-6)
    killed, wrong = records(watcher, FaultRecord)
    assert {killed.slug, wrong.slug} == {"backend"}
    assert "the backend numpy is left out from now on: it failed: the process" in killed.message
    assert "the backend faulty is left out from now on: it gave numbers that are not finite" in wrong.message
    assert killed.worker == wrong.worker == watcher.plan.stages[0].worker
    (summary,) = records(watcher, SummaryRecord)
    lines = backend_lines(summary)
    assert any(line.startswith("device-a: the backend numpy was left out during the run: ") for line in lines)
    assert any(line.startswith("device-a: the backend faulty was left out during the run: ") for line in lines)
    assert faulty.failures == 1, "it was asked again"


def test_the_step_in_which_a_backend_is_found_to_be_wrong_is_done_again_without_it(
    tmp_path, make_recipe, cluster, run, alone, faulty
):
    recipe = make_recipe(tmp_path / "run", **OPTIONS, workers=1, micro_batches=4, max_steps=5)
    watcher = cluster(worker("device-a", "torch", "faulty"))
    faulty.nonsense = 0.5

    def begin_to_err(record):
        faulty.fails = faulty.fails or (isinstance(record, StepRecord) and record.step == 2)

    watcher.on_record = begin_to_err
    run(recipe, watcher)
    assert faulty.failures > 1, "it was found at once: nothing wrong had gone into the step"
    assert watcher.losses == pytest.approx(alone(recipe, 5), rel=5e-6)
    (recovery,) = records(watcher, RecoveryRecord)
    assert "the backend faulty is left out: it computed wrongly" in recovery.reason
    (summary,) = records(watcher, SummaryRecord)
    left_out = "device-a: the backend faulty was left out during the run: it computed wrongly"
    assert any(line.startswith(left_out) for line in backend_lines(summary))


def test_a_backend_that_is_not_there_ends_the_run_before_it_begins(tmp_path, make_recipe, cluster, run):
    watcher = cluster(WorkerSettings(name="device-a", backends=("torch", "abacus")))
    with pytest.raises(BackendError, match="no backend abacus"):
        run(make_recipe(tmp_path / "run", workers=1), watcher)


@needs_opencl
def test_a_worker_process_under_an_enforced_memory_limit_gives_the_losses_of_torch_alone(
    tmp_path, make_recipe, cluster, run, alone
):
    class InProcesses(cluster):
        """Workers in processes of their own, as the device's owner would start them."""

        def start(self, settings):
            self.output = tmp_path / "worker.log"
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", WORKER, msgspec.json.encode(settings).decode()],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, JOIN_LINK_VARIABLE: self.join_link},
                )

        def wait(self):
            try:
                assert self.process.wait(60) == 0, self.output.read_text()
            finally:
                self.process.kill()

    limits = {"memory_bytes": 1000 * MIB, "enforce_memory": True}
    recipe = make_recipe(tmp_path / "run", **OPTIONS, workers=1, max_steps=12, epochs=3)
    watcher = InProcesses(worker("board", "torch", "opencl", **limits))
    run(recipe, watcher)
    assert len(watcher.losses) == 12
    assert watcher.losses == pytest.approx(alone(recipe, 12), rel=1e-5)
    said = watcher.output.read_text()
    assert "compute backends: torch (processor), opencl" in said
    assert "heads of 4 blocks are shared: torch 2, opencl 2" in said
    assert "not enforced" not in said
    assert "rows a shared block takes" in watcher.explanation
    (stage,) = watcher.plan.stages
    (summary,) = records(watcher, SummaryRecord)
    (device,) = summary.devices
    assert device.measured_peak_bytes <= limits["memory_bytes"]
    assert set(device.backends) == {"torch", "opencl"}
    assert device.backends_left_out == {}
    assert any(line.startswith("board: backends busy: torch ") for line in backend_lines(summary))
    display = RunState(12, (DeviceLine(stage.worker, "board", stage.memory_limit, "everything"),))
    for record in watcher.records:
        display.take(record)
    assert "opencl " in display.line


@needs_opencl
def test_a_local_worker_measures_its_backends_and_the_plan_says_what_it_found(tmp_path, make_recipe, cluster, run):
    local = {"name": "home", "memory": "1GiB", "backends": "torch+opencl"}
    recipe = make_recipe(tmp_path / "run", **OPTIONS, workers=1, max_steps=1, local_workers=(local,))
    watcher = cluster()
    watcher.start = lambda _: None  # the run starts its own
    run(recipe, watcher)
    for words in ("home: heads: ", "home: neurons: ", "torch alone"):
        assert words in watcher.explanation
