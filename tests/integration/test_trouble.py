"""What goes wrong on the way: refused before it costs anything, or ended with a checkpoint and a name."""

import logging
import secrets

import pytest
import torch

from coterie.coordinator.one_device import largest_difference
from coterie.errors import (
    DoesNotFitError,
    NonFiniteLossError,
    OutOfMemoryError,
)
from coterie.metrics.fault_records import RecoveryRecord
from coterie.metrics.records import FaultRecord, StepRecord
from coterie.transport.join_link import JoinLink
from coterie.units import MIB
from coterie.worker.settings import WorkerSettings

# ---- devices and memory


def test_when_nothing_fits_every_device_is_named_with_what_it_lacks(tmp_path, make_recipe, cluster, run, checkpoints):
    recipe = make_recipe(tmp_path / "run", workers=2, min_workers=1)
    watcher = cluster(
        WorkerSettings(name="watch", memory_bytes=20 * MIB), WorkerSettings(name="toaster", memory_bytes=30 * MIB)
    )
    with pytest.raises(DoesNotFitError) as caught:
        run(recipe, watcher)
    assert caught.value.exit_code == 7
    for name in ("watch", "toaster"):
        assert name in caught.value.message
    assert "MiB" in caught.value.message
    assert not checkpoints(recipe)
    assert watcher.failures == {}, "workers end in order: it is not their fault"


def test_a_device_too_small_for_anything_is_left_out_by_name(tmp_path, make_recipe, cluster, run):
    recipe = make_recipe(tmp_path / "run", workers=2, min_workers=1, max_steps=1)
    watcher = cluster(WorkerSettings(name="desktop"), WorkerSettings(name="watch", memory_bytes=20 * MIB))
    result = run(recipe, watcher)
    assert [stage.device_name for stage in result.plan.stages] == ["desktop"]
    assert [device.device_name for device in result.plan.left_out] == ["watch"]
    assert "Left out: watch, cannot hold even one unit" in watcher.explanation


def test_memory_that_runs_out_on_every_device_ends_the_run_with_a_name_and_keeps_the_checkpoint(
    tmp_path, make_recipe, cluster, monkeypatch, run, checkpoints
):
    backward = torch.autograd.backward
    watcher = cluster()

    def run_out(*arguments, **options):
        if len(watcher.losses) > 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory")
        backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", run_out)
    recipe = make_recipe(tmp_path / "run", epochs=3, checkpoint_every=2, rejoin_s=0)
    with pytest.raises(OutOfMemoryError, match=r"device-[abc]: memory ran out on stage \d \(device-[abc]\)") as caught:
        run(recipe, watcher)
    assert caught.value.exit_code == 14
    assert "predicted peak" in caught.value.message
    assert "does not fit on the 3 devices" in caught.value.message, "smaller stages have been tried"
    assert checkpoints(recipe)
    assert set(watcher.failures) <= {"device-a", "device-b", "device-c"}


def test_a_device_whose_memory_runs_out_gets_a_smaller_stage_and_the_run_goes_on(
    tmp_path, make_recipe, cluster, monkeypatch, run, alone
):
    backward = torch.autograd.backward
    watcher = cluster()
    failed = []

    def run_out_once(*arguments, **options):
        if len(watcher.losses) > 3 and not failed:
            failed.append(True)
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory")
        backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", run_out_once)
    recipe = make_recipe(tmp_path / "run", max_steps=8, rejoin_s=0)
    result = run(recipe, watcher)
    assert largest_difference(result.losses, alone(recipe, 8)) < 1e-6
    (recovery,) = (record for record in watcher.records if isinstance(record, RecoveryRecord))
    assert not recovery.is_gone
    assert "memory ran out" in recovery.reason
    assert watcher.failures == {}


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path, make_recipe, cluster, run, checkpoints
):
    watcher = cluster()
    recipe = make_recipe(tmp_path / "run", epochs=3, checkpoint_every=1, learning_rate=1e25, max_grad_norm=0)
    with pytest.raises(NonFiniteLossError, match=r"step \d+") as caught:
        run(recipe, watcher)
    assert caught.value.exit_code == 13
    assert "rows" in caught.value.message
    steps = sum(isinstance(record, StepRecord) for record in watcher.records)
    assert checkpoints(recipe)[-1] == steps
    assert not (tmp_path / "run" / "model").exists()
    assert [record.slug for record in watcher.records if isinstance(record, FaultRecord)] == ["non-finite-loss"]


# ---- links


def test_workers_without_direct_links_go_through_the_coordinator_to_the_same_losses(
    tmp_path, make_recipe, cluster, run, alone
):
    recipe = make_recipe(tmp_path / "run", max_steps=5)
    settings = [WorkerSettings(name=f"device-{letter}", direct_links=False) for letter in "abc"]
    watcher = cluster(*settings)
    result = run(recipe, watcher)
    assert largest_difference(result.losses, alone(recipe, 5)) < 1e-6
    assert {link.path for link in result.summary.links} == {"relayed"}
    assert any("goes through the coordinator" in note for note in watcher.notices)


# ---- secrets


def test_no_file_and_no_log_line_holds_a_token(tmp_path, make_recipe, cluster, monkeypatch, caplog, run):
    tokens = []
    make = secrets.token_urlsafe

    def noted(size):
        tokens.append(make(size))
        return tokens[-1]

    monkeypatch.setattr(secrets, "token_urlsafe", noted)
    logger = logging.getLogger("coterie")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.DEBUG, "coterie"):
        watcher = cluster()
        run(make_recipe(tmp_path / "run", max_steps=2), watcher)
    join_token = JoinLink.from_text(watcher.join_link).token
    assert join_token in tokens
    texts = [text.encode() for text in (caplog.text, *watcher.said, *watcher.notices)]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    # What lets devices come back, and what controls the run, is kept for its owner alone.
    private = [path for path in files if path.parent.name == "door" or path.name == "control.json"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    texts += [path.read_bytes() for path in files if path not in private]
    for token in tokens:
        assert not any(token.encode() in text for text in texts)
    assert not any(join_token.encode() in path.read_bytes() for path in private)
