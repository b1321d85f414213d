"""`coterie plan`: described devices from known facts without torch, and real workers."""

import json
import subprocess
import sys

import pytest

from coterie.config import load_recipe
from coterie.coordinator.job import prepare_job
from coterie.coordinator.plan_facts import PlanFacts, keep_facts, known_facts
from coterie.ids import RunId
from coterie.measure.model_profile import profile_model
from coterie.models import make_model_spec, open_model
from coterie.planner.side_bytes import TokenCounts
from coterie.planner.way import RunData
from coterie.profiles.cluster_profile import DeviceProfile, plannable_bytes
from coterie.units import MIB

WISHES = ("--batch-rows", "4", "--micro-batches", "2", "--epochs", "2")
TOKENS = TokenCounts(padded=28, real=22, selected=16)
DATA = RunData(rows=4, epoch=TOKENS, largest=TOKENS, steps_per_epoch=1, steps=2)
DEVICES = ("--device", "name=big,memory=500MiB", "--device", "name=small,memory=450MiB,speed=0.5")


@pytest.fixture(scope="module")
def base(base_model, data):
    """The words of a plan command, with facts in the cache as a measured one would leave them."""
    words = ["plan", "--model", str(base_model), "--train", str(data), *WISHES]
    overrides = {"model": str(base_model), "train": str(data), "batch-rows": 4, "micro-batches": 2, "epochs": 2}
    spec = make_model_spec(
        open_model(base_model), auto_class="AutoModelForTokenClassification", config_overrides={}, seed=0
    )
    device = DeviceProfile(
        worker="x", name="x", memory_bytes=900 * MIB, base_bytes=400 * MIB, flops_per_s=1e8, update_bytes_per_s=1e9
    )
    model = profile_model(spec, memory_tokens=8, typical_tokens=7, name="tiny")
    keep_facts(load_recipe(None, overrides), PlanFacts(model=model, device=device, data=DATA))
    return words


def test_described_devices_are_planned_for_with_their_memory_and_speed(answer, base):
    code, found = answer(*base, *DEVICES, "--min-workers", "2")
    stages = {stage["device_name"]: stage for stage in found["plan"]["stages"]}
    assert code == 0
    assert {name: stage["memory_limit"] for name, stage in stages.items()} == {
        "big": plannable_bytes(500 * MIB),
        "small": plannable_bytes(450 * MIB),
    }
    assert found["steps"] == 2
    assert found["predicted_run_s"] == pytest.approx(2 * found["plan"]["predicted_step_s"])


def test_half_the_speed_takes_twice_the_time(answer, base):
    _, fast = answer(*base, "--device", "speed=1")
    _, slow = answer(*base, "--device", "speed=0.5")
    assert slow["plan"]["stages"][0]["forward_s"] == pytest.approx(2 * fast["plan"]["stages"][0]["forward_s"])
    assert slow["plan"]["stages"][0]["update_s"] == pytest.approx(2 * fast["plan"]["stages"][0]["update_s"])


def test_slow_links_are_planned_for(answer, base):
    words = (*base, *DEVICES, "--min-workers", "2", "--link", "1Mbit/s", "--latency", "50ms")
    _, found = answer(*words)
    _, fast = answer(*base, *DEVICES, "--min-workers", "2", "--link", "1Gbit/s")
    assert found["plan"]["stages"][0]["send_s"] == pytest.approx(1000 * fast["plan"]["stages"][0]["send_s"])
    assert found["plan"]["predicted_step_s"] > fast["plan"]["predicted_step_s"] + 0.1


def test_the_text_explains_and_the_grid_has_a_row_per_stage(told, base):
    code, out, _ = told(*base, *DEVICES, "--min-workers", "2", "--schedule-grid")
    assert code == 0
    assert "A step is predicted to take" in out
    assert "2 steps, about " in out
    grid = out.splitlines()[-2:]
    assert [line.split()[:2] for line in grid] == [["stage", "0"], ["stage", "1"]]
    assert grid[0].split()[2:4] == ["F0", "F1"]


def test_what_does_not_fit_ends_with_7_and_the_missing_mib(answer, base):
    code, found = answer(*base, "--device", "name=tiny,memory=300MiB")
    assert code == 7
    assert "tiny has 285 MiB" in found["error"]["message"]


def test_a_second_plan_needs_no_torch(base):
    words = [*base, *DEVICES, "--json"]
    program = (
        "import sys; from coterie.cli.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()), file=sys.stderr); raise SystemExit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert len(json.loads(done.stdout)["plan"]["stages"]) >= 1


@pytest.mark.usefixtures("base")
def test_facts_are_forgotten_when_the_data_change_and_kept_when_the_learning_rate_does(base_model, data, tmp_path):
    wishes = {"model": str(base_model), "train": str(data), "batch-rows": 4, "micro-batches": 2, "epochs": 2}
    assert known_facts(load_recipe(None, wishes)) is not None
    assert known_facts(load_recipe(None, wishes | {"learning-rate": 1e-3, "schedule": "stash"})) is not None
    assert known_facts(load_recipe(None, wishes | {"method": "lora"})) is None
    other = tmp_path / data.name
    other.write_text(data.read_text().replace("Anna", "Hannah"))
    assert known_facts(load_recipe(None, wishes | {"train": str(other)})) is None
    assert known_facts(load_recipe(None, wishes | {"model": "some/hub-name"})) is None


def test_a_worker_joins_is_measured_and_let_go(answer, base_model, data):
    code, found = answer("plan", "--model", base_model, "--train", data, *WISHES, "--local-worker", "name=a")
    (stage,) = found["plan"]["stages"]
    assert code == 0
    assert stage["device_name"] == "a"
    assert stage["forward_s"] > 0
    assert stage["memory"]["base"] > 100 * MIB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "memory=lots"], "'lots' is not a size"),
        (["--device", "speed=fast"], "fast"),
        (["--device", "speed=0"], "above 0"),
        (["--device", "colour=red"], "expected name=…, memory=…, speed=…, watts=…, network_watts=…"),
        (["--device", "name=a b"], "a name has letters"),
        (["--device", "name=a", "--device", "name=a"], "two devices are named 'a'"),
        (["--link", "100Mbit/s"], "between --device devices"),
        (["--device", "name=a", "--latency", "5ms"], "--latency needs --link"),
        (["--device", "name=a", "--link", "fast"], "'fast' is not a rate"),
        (["--device", "name=a", "--link", "1Mbit/s", "--latency", "soon"], "'soon' is not a time"),
    ],
)
def test_wrong_devices_and_links_are_named(answer, words, message):
    code, found = answer("plan", "--model", "m", "--train", "t", *words)
    assert code == 2
    assert message in found["error"]["message"]


def test_more_stages_than_described_devices_is_a_mistake_of_the_recipe(answer):
    code, found = answer("plan", "--model", "m", "--train", "t", "--device", "name=a", "--min-workers", "2")
    assert code == 3
    assert "min" in found["error"]["message"]


def test_what_is_known_of_the_data_is_said_once(base_model, tmp_path):
    train = tmp_path / "train.csv"
    train.write_text("text,label\na,bad\nb,good\n")
    overrides = {"model": str(base_model), "train": str(train), "task": "sequence-classification"}
    lines: list[str] = []
    job = prepare_job(load_recipe(None, overrides), RunId("r"), lines.append)
    said = "\n".join([*lines, *job.notes])
    assert said.count("texts from the column text, answers from label") == 1


# ---- what a slower device would change


def test_a_device_that_slows_down_is_told_with_what_would_move(answer, base):
    code, found = answer(*base, *DEVICES, "--min-workers", "2", "--slower", "small=8")
    assert code == 0
    (forecast,) = found["slower"]
    before = {stage["device_name"]: stage for stage in found["plan"]["stages"]}["small"]
    assert (forecast["device"], forecast["times"]) == ("small", 8.0)
    assert forecast["reason"].startswith(("moving ", "no other split is better"))
    assert not forecast["worth"]  # one step is left: nothing pays
    after = {stage["device_name"]: stage for stage in forecast["stages"]}["small"]
    assert after["stop_unit"] - after["first_unit"] <= before["stop_unit"] - before["first_unit"]


def test_without_json_it_is_one_line(told, base):
    code, out, _ = told(*base, *DEVICES, "--slower", "big=1.5")
    assert code == 0
    assert "big 1.5 times as slow half way: layers would " in out


@pytest.mark.parametrize("wish", ["small", "small=", "small=-1", "small=often", "tablet=2"])
def test_a_slower_device_that_makes_no_sense_is_refused(told, base, wish):
    code, _, error = told(*base, *DEVICES, "--slower", wish)
    assert code == 2
    assert f"--slower {wish}" in error
