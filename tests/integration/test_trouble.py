"""What goes wrong on the way: refused before it costs anything, or ended with a checkpoint and a name."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
import threading

import msgspec
import pytest
import torch

from coterie import api
from coterie.checkpoint.store import CheckpointStore
from coterie.cluster.messages import CONTROL, Hello, Refused, control, unpack
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference, run_on_one_device
from coterie.coordinator.run import checkpoint_folder
from coterie.errors import (
    CheckpointError,
    DoesNotFitError,
    InterruptedRunError,
    JoinRefusedError,
    NetworkError,
    NonFiniteLossError,
    OutOfMemoryError,
    StorageError,
    UsageError,
)
from coterie.ids import RunId
from coterie.metrics.records import FaultRecord, StepRecord
from coterie.transport.connect import connect
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.join_link import JoinLink
from coterie.units import MIB
from coterie.worker.settings import WorkerSettings


def run(recipe, watcher):
    try:
        return api.train(recipe, watcher)
    finally:
        watcher.wait()


def checkpoints(recipe):
    return CheckpointStore(checkpoint_folder(recipe.run.output)).steps()


def changed(recipe, section, **values):
    part = msgspec.structs.replace(getattr(recipe, section), **values)
    return msgspec.structs.replace(recipe, **{section: part})


def alone(recipe, steps):
    return run_on_one_device(prepare_job(recipe, RunId("alone"), lambda _text: None), 2, steps).losses


# ---- devices and memory


def test_when_nothing_fits_every_device_is_named_with_what_it_lacks(tmp_path, make_recipe, cluster):
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


def test_a_device_too_small_for_anything_is_left_out_by_name(tmp_path, make_recipe, cluster):
    recipe = make_recipe(tmp_path / "run", workers=2, min_workers=1, max_steps=1)
    watcher = cluster(WorkerSettings(name="desktop"), WorkerSettings(name="watch", memory_bytes=20 * MIB))
    result = run(recipe, watcher)
    assert [stage.device_name for stage in result.plan.stages] == ["desktop"]
    assert [device.device_name for device in result.plan.left_out] == ["watch"]
    assert "Left out: watch, cannot hold even one unit" in watcher.explanation


def test_memory_that_runs_out_in_mid_run_names_the_device_and_keeps_the_checkpoint(
    tmp_path, make_recipe, cluster, monkeypatch
):
    backward = torch.autograd.backward
    watcher = cluster()

    def run_out(*arguments, **options):
        if len(watcher.losses) > 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory")
        backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", run_out)
    recipe = make_recipe(tmp_path / "run", epochs=3, checkpoint_every=2)
    with pytest.raises(OutOfMemoryError, match=r"device-[abc]: memory ran out on stage \d \(device-[abc]\)") as caught:
        run(recipe, watcher)
    assert caught.value.exit_code == 14
    assert "predicted peak" in caught.value.message
    assert checkpoints(recipe)
    assert len(watcher.failures) == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, make_recipe, cluster):
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


def test_workers_without_direct_links_go_through_the_coordinator_to_the_same_losses(tmp_path, make_recipe, cluster):
    recipe = make_recipe(tmp_path / "run", max_steps=5)
    settings = [WorkerSettings(name=f"device-{letter}", direct_links=False) for letter in "abc"]
    watcher = cluster(*settings)
    result = run(recipe, watcher)
    assert largest_difference(result.losses, alone(recipe, 5)) < 1e-6
    assert {link.path for link in result.summary.links} == {"relayed"}
    assert any("goes through the coordinator" in note for note in watcher.notices)


def test_hostile_and_lost_peers_are_refused_while_a_run_waits_and_while_it_trains(tmp_path, make_recipe, cluster):
    watcher = cluster()
    knocked = threading.Event()
    outcomes: list[str] = []

    def knock_once(record):
        if isinstance(record, StepRecord) and record.step == 2:
            guests = threading.Thread(target=lambda: outcomes.extend(asyncio.run(hostile(watcher.join_link))))
            guests.start()
            watcher.threads.append(guests)
            knocked.set()

    watcher.on_record = knock_once
    join = watcher.joinable

    def disturbed(link):
        outcomes.extend(asyncio.run(hostile(link)))
        join(link)

    # From a thread of its own: an observer must not block the event loop that is to answer.
    watcher.joinable = lambda link: threading.Thread(target=disturbed, args=(link,)).start()
    recipe = make_recipe(tmp_path / "run", epochs=10)
    result = run(recipe, watcher)
    assert knocked.is_set()
    assert len(outcomes) == 2 * len(HOSTILE)
    assert set(outcomes) == {"refused"}
    assert len(result.losses) == 90
    assert watcher.failures == {}


async def hostile(link_text):
    """Every bad guest once; each must be turned away soon."""
    join = JoinLink.from_text(link_text)
    outcomes = []
    for guest in HOSTILE:
        try:
            async with asyncio.timeout(15):
                outcomes.append(await guest(join))
        except TimeoutError:
            outcomes.append(f"{guest.__name__} was not turned away")
    return outcomes


async def wrong_token(join):
    return await _greeted(join, control(_hello(token="a-token-from-elsewhere")))


async def used_token(join):
    """A token of a run that is full, or none at all, is as good as a wrong one."""
    return await _greeted(join, control(_hello(token="")))


async def wrong_version(join):
    return await _greeted(join, control(_hello(token=join.token, wire_version=999)))


async def pickled(join):
    return await _greeted(join, Frame(FrameHeader(kind=CONTROL, body=b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00.")))


async def wrong_fingerprint(join):
    try:
        await connect(msgspec.structs.replace(join, fingerprint="ab" * 32))
    except JoinRefusedError:
        return "refused"
    return "taken"


async def huge_length(join):
    return await _raw(join, b"COTR" + (1).to_bytes(2, "little") + bytes(2) + b"\xff" * 12)


async def garbage(join):
    return await _raw(join, secrets.token_bytes(4096))


async def over_http(join):
    """The same port answers a browser, and tells it nothing of the run."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return "refused" if b"coordinator" in answer and join.token.encode() not in answer else "told too much"


async def no_tls(join):
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    try:
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    writer.close()
    return "refused" if b"HTTP" not in answer else "answered"


async def hang_up(join):
    with socket.create_connection((join.hosts[0], join.port)):
        return "refused"


HOSTILE = (
    wrong_token,
    used_token,
    wrong_version,
    pickled,
    wrong_fingerprint,
    huge_length,
    garbage,
    over_http,
    no_tls,
    hang_up,
)


def _hello(**changes):
    fields = {
        "wire_version": WIRE_VERSION,
        "package_version": "0",
        "name": "guest",
        "device_type": "cpu",
        "threads": 1,
        "memory_bytes": 1,
        "host_id": "",
        "hosts": (),
        "port": 0,
        "fingerprint": "",
    }
    return Hello(**(fields | changes))


async def _greeted(join, frame):
    link = await connect(join)
    await link.send(frame)
    answer = unpack((await link.receive()).header.body)
    await link.close()
    return "refused" if isinstance(answer, Refused) else "taken"


async def _raw(join, content):
    """Bytes on the frame stream that are no frame."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["coterie/1"])
    reader, writer = await asyncio.open_connection(join.hosts[0], join.port, ssl=context)
    writer.write(content)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await reader.read()
    writer.close()
    return "refused"


# ---- folders and resuming


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, make_recipe, cluster):
    """A run that ended at its third checkpoint, as a kill would have left it."""
    recipe = make_recipe(tmp_path_factory.mktemp("stopped") / "run", workers=1, epochs=1, checkpoint_every=3)
    watcher = cluster(WorkerSettings(name="only"))

    def fail(record):
        if isinstance(record, StepRecord) and record.step == 7:
            raise StorageError("the test's disk is full")

    watcher.on_record = fail
    with pytest.raises(StorageError, match="disk is full"):
        run(recipe, watcher)
    assert checkpoints(recipe) == (3, 6)
    return recipe


def test_a_new_run_does_not_fall_into_an_old_ones_folder(stopped, cluster):
    with pytest.raises(UsageError, match="checkpoints of an earlier run") as caught:
        api.train(stopped, cluster())
    assert "--resume" in caught.value.hint
    assert "--output" in caught.value.hint


def test_resuming_with_other_settings_names_all_of_them(stopped, cluster):
    other = changed(changed(stopped, "train", learning_rate=1e-4, seed=5, schedule="gpipe"), "run", resume=True)
    with pytest.raises(CheckpointError) as caught:
        api.train(other, cluster())
    for setting in ("learning_rate", "seed", "schedule"):
        assert setting in caught.value.message


def test_resuming_where_nothing_was_kept_says_so(tmp_path, make_recipe, cluster):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        api.train(make_recipe(tmp_path / "nothing", resume=True), cluster())


def test_a_folder_that_cannot_be_written_is_refused_before_workers_are_asked(tmp_path, make_recipe, cluster):
    (tmp_path / "file").write_text("in the way")
    watcher = cluster()
    with pytest.raises(StorageError, match="cannot write") as caught:
        api.train(make_recipe(tmp_path / "file" / "run"), watcher)
    assert "--output" in caught.value.hint
    assert not watcher.threads


def test_a_folder_with_somebody_elses_model_is_refused_before_anything_is_trained(tmp_path, make_recipe, cluster):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "precious.bin").write_bytes(b"not ours")
    watcher = cluster()
    with pytest.raises(StorageError, match=r"precious\.bin"):
        api.train(make_recipe(tmp_path / "run"), watcher)
    assert not watcher.threads


def test_a_resumed_run_ends_as_the_undisturbed_one(stopped, cluster):
    watcher = cluster(WorkerSettings(name="only"))
    result = run(changed(stopped, "run", resume=True), watcher)
    assert len(result.losses) == 3
    assert largest_difference(result.losses, alone(stopped, 9)[6:]) < 1e-6
    assert result.summary.steps == 3


def test_a_port_that_is_taken_is_refused_before_workers_are_started(tmp_path, make_recipe, cluster):
    watcher = cluster()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=f"127.0.0.1 port {port}") as caught:
            api.train(make_recipe(tmp_path / "run", port=port), watcher)
    assert caught.value.exit_code == 16
    assert not watcher.threads


def test_a_run_stopped_in_its_last_step_is_finished_by_a_resume(tmp_path, make_recipe, cluster):
    recipe = make_recipe(tmp_path / "run", workers=1)
    watcher = cluster(WorkerSettings(name="only"))

    def stop(record):
        if isinstance(record, StepRecord) and record.step == 8:
            signal.raise_signal(signal.SIGINT)

    watcher.on_record = stop
    with pytest.raises(InterruptedRunError, match="during an evaluation"):
        run(recipe, watcher)
    assert checkpoints(recipe)[-1] == 9
    assert not (tmp_path / "run" / "model").exists()
    again = cluster(WorkerSettings(name="only"))
    result = run(changed(recipe, "run", resume=True), again)
    assert result.losses == ()
    assert {record.split for record in result.quality} == {"dev", "test"}
    assert (result.model_folder / "model.safetensors").is_file()


def test_a_stop_before_the_first_step_leaves_no_checkpoint_and_says_nothing_of_one(tmp_path, make_recipe, cluster):
    recipe = make_recipe(tmp_path / "run", workers=1)
    watcher = cluster(WorkerSettings(name="only"))
    planned = watcher.planned

    def stop(*facts):
        planned(*facts)
        signal.raise_signal(signal.SIGINT)

    watcher.planned = stop
    with pytest.raises(InterruptedRunError, match="the run was stopped") as caught:
        run(recipe, watcher)
    assert caught.value.hint == ""
    assert not checkpoints(recipe)
    assert watcher.failures == {}


# ---- secrets


def test_no_file_and_no_log_line_holds_a_token(tmp_path, make_recipe, cluster, monkeypatch, caplog):
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
    assert len(tokens) == 2, "the join token and the one that workers show each other"
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    texts += [text.encode() for text in (caplog.text, *watcher.said, *watcher.notices)]
    for token in tokens:
        assert not any(token.encode() in text for text in texts)
