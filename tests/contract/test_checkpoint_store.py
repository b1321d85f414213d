"""The promise of a checkpoint store: whatever kills the writer, the newest committed checkpoint is whole and equal."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.store import CheckpointStore
from coterie.errors import StorageError
from coterie.ids import RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec

SHAPES = {unit: {f"unit.{unit}.weight": (3 + unit, 4), f"unit.{unit}.bias": (4,)} for unit in range(5)}


def tensor(step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(f"{step}/{name}".encode(), "little") % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit_state(step: int, unit: int, shapes=SHAPES):
    parameters = {name: tensor(step, name, shape) for name, shape in shapes[unit].items()}
    state = {name: {"exp_avg": tensor(step, f"{name}/m", shape), "step": torch.tensor(float(step))}
             for name, shape in shapes[unit].items()}  # fmt: skip
    return parameters, state


def manifest(step: int) -> Manifest:
    terms = RunTerms(
        run_id=RunId("r"), model=ModelSpec(config_json="{}", auto_class="AutoModel"), optimizer=OptimizerSpec(),
        seed=1, batch_rows=8, micro_batches=4, schedule="flush",
    )  # fmt: skip
    return Manifest(terms=terms, global_step=step, epoch=0, data_position=step, samples_seen=step * 8)


def save(store: CheckpointStore, step: int, shapes=SHAPES) -> None:
    with store.begin(step, shapes) as writer:
        for unit in shapes:
            writer.write_unit(unit, *unit_state(step, unit, shapes))
        writer.commit(manifest(step))


def assert_holds(store: CheckpointStore, step: int, shapes=SHAPES) -> None:
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert store.damage == {}
    for unit in shapes:
        parameters, state = checkpoint.read_unit(unit)
        wanted, wanted_state = unit_state(step, unit, shapes)
        assert all(torch.equal(parameters[name], value) for name, value in wanted.items())
        assert all(torch.equal(state[name]["exp_avg"], wanted_state[name]["exp_avg"]) for name in wanted)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers; this system cannot fork")

WRITER = textwrap.dedent(
    """
    import importlib.util, os, signal, sys, time
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("contract", sys.argv[1])
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    from coterie.checkpoint.store import CheckpointStore

    FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}

    def at_file_event(number):
        # kill -9 immediately before this process's number-th call into the file system
        left = number

        def hook(event, args):
            nonlocal left
            if event in FILE_EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    def write(folder, first, kill_at, report):
        store = CheckpointStore(folder)
        if kill_at:
            at_file_event(kill_at)
        for step in range(first, first + (1 if kill_at else 10_000)):
            contract.save(store, step)
            os.write(report, f"{step}\\n".encode())

    def round_of(folder, first, kill_at, wait_s):
        # fork a writer, let it be killed, return the last step that it says it had committed
        read, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            write(folder, first, kill_at, report)
            os._exit(0)
        os.close(report)
        lines = os.fdopen(read)
        steps = []
        if not kill_at:
            steps.append(int(lines.readline()))  # one commit is done; kill it somewhere in the next ones
            time.sleep(wait_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        steps += [int(line) for line in lines]
        lines.close()
        return (steps[-1] if steps else first - 1), os.WIFSIGNALED(status)

    for line in sys.stdin:
        folder, first, kill_at, wait_s = line.split()
        step, killed = round_of(Path(folder), int(first), int(kill_at), float(wait_s))
        print(step, int(killed), flush=True)
    """
)


@pytest.fixture(scope="module")
def killer():
    """A process that imports everything once and then forks one doomed writer per question."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(folder: Path, first: int, *, kill_at: int = 0, wait_s: float = 0.0) -> tuple[int, bool]:
        process.stdin.write(f"{folder} {first} {kill_at} {wait_s}\n")
        process.stdin.flush()
        step, killed = process.stdout.readline().split()
        return int(step), killed == "1"

    yield ask
    process.stdin.close()
    assert process.wait(timeout=200) == 0
    process.stdout.close()


@needs_fork
def test_a_kill_at_a_random_moment_costs_at_most_the_checkpoint_in_progress(tmp_path, killer):
    store = CheckpointStore(tmp_path)
    start_s = time.monotonic()
    save(store, 1)
    save_s = time.monotonic() - start_s
    rng = random.Random(1)
    committed = 1
    for _ in range(20):
        said, killed = killer(tmp_path, committed + 1, wait_s=rng.uniform(0, 1.5) * save_s)
        assert killed
        # killed between the rename and the report, the next step may be there too
        committed = store.latest().step
        assert said <= committed <= said + 1
        assert_holds(store, committed)
    assert committed > 20


@needs_fork
def test_a_kill_before_any_single_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, killer):
    outcomes = []
    for kill_at in range(1, 400):
        folder = tmp_path / f"kill-{kill_at}"
        store = CheckpointStore(folder)
        for step in (1, 2):
            save(store, step)
        said, killed = killer(folder, 3, kill_at=kill_at)
        step = store.latest().step
        assert said <= step <= 3
        assert_holds(store, step)
        save(store, 4)
        assert_holds(store, 4)
        assert all(path.suffix == "" for path in folder.iterdir())
        assert len(list(folder.iterdir())) == 2
        outcomes.append(step)
        shutil.rmtree(folder)
        if not killed:
            break
    assert not killed
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 20


@needs_fork
def test_a_kill_while_the_same_step_is_written_again_never_loses_it(tmp_path, killer):
    outcomes = 0
    for kill_at in range(1, 400):
        folder = tmp_path / f"kill-{kill_at}"
        store = CheckpointStore(folder)
        save(store, 3)
        _, killed = killer(folder, 3, kill_at=kill_at)
        assert_holds(store, 3)
        save(store, 4)
        assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000004"]
        outcomes += 1
        if not killed:
            break
    assert not killed
    assert outcomes > 20


DISK_FULL = textwrap.dedent(
    """
    import importlib.util, json, sys
    from pathlib import Path
    spec = importlib.util.spec_from_file_location("contract", sys.argv[1])
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    print(json.dumps(contract.fill(Path(sys.argv[2]), sys.argv[3])))
    """
)

BIG = {0: {"small": (10,)}, 1: {"big": (64, 1024)}}


def fill(folder: Path, limit: str) -> list[dict]:
    """In a process of its own: save small checkpoints, then one that does not fit; returns what happened."""
    store = CheckpointStore(folder)
    for step in (1, 2):
        save(store, step)
    if limit == "file-size":
        import resource  # noqa: PLC0415 - not on Windows

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    outcomes = []
    for needed_bytes in (None, 0):  # with the check before the start, and as if another program took the room later
        try:
            with store.begin(3, BIG, needed_bytes=needed_bytes) as writer:
                writer.write_unit(0, *unit_state(3, 0, BIG))
                writer.write_unit(1, *unit_state(3, 1, BIG))
                writer.commit(manifest(3))
        except StorageError as error:
            outcomes.append({"message": error.message, "names": sorted(path.name for path in folder.iterdir())})
        assert_holds(store, 2)
    save(store, 4)
    assert_holds(store, 4)
    return outcomes


def run_fill(command: list[str], folder: Path, limit: str) -> list[dict]:
    result = subprocess.run(
        [*command, sys.executable, "-c", DISK_FULL, __file__, str(folder), limit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE exists on POSIX only")
def test_a_write_that_the_system_refuses_in_the_middle_leaves_the_previous_checkpoint(tmp_path):
    outcomes = run_fill([], tmp_path / "store", "file-size")
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert "not enough room" in outcome["message"]
        assert outcome["names"] == ["step-000001", "step-000002"]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_how_much_is_missing(tmp_path):
    if not can_mount():
        pytest.skip("needs a small file system in a private mount namespace (unshare -rm), which is not allowed here")
    mounted = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$@"', "sh"]
    outcomes = run_fill(mounted, tmp_path / "store", "disk")
    assert len(outcomes) == 2
    assert "256 KiB needed" in outcomes[0]["message"]
    for outcome in outcomes:
        assert "not enough room" in outcome["message"]
        assert outcome["names"] == ["step-000001", "step-000002"]


@st.composite
def cuts(draw):
    inner = draw(st.sets(st.integers(1, len(SHAPES) - 1), max_size=4))
    edges = [0, *sorted(inner), len(SHAPES)]
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(write=cuts(), read=cuts(), order=st.randoms(use_true_random=False))
def test_any_cut_reads_what_any_other_cut_wrote(tmp_path, write, read, order):
    store = CheckpointStore(tmp_path / "store")
    stages = list(write)
    order.shuffle(stages)  # stages send in the order in which they are done
    with store.begin(7, SHAPES) as writer:
        for stage in stages:
            for unit in stage:
                writer.write_unit(unit, *unit_state(7, unit))
        writer.commit(manifest(7))
    checkpoint = store.latest()
    for stage in read:
        names = [name for unit in stage for name in SHAPES[unit]]
        parameters, state = checkpoint.read(names)
        wanted = {name: value for unit in stage for name, value in unit_state(7, unit)[0].items()}
        assert list(parameters) == list(state) == list(wanted)
        assert all(torch.equal(parameters[name], value) for name, value in wanted.items())
        assert all(torch.equal(value, checkpoint.parameters(names)[name]) for name, value in wanted.items())
