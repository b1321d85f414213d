"""`coterie plan --compare`: ways to fine-tune, for described devices from known facts."""

import json
import subprocess
import sys

import pytest

from coterie.config import load_recipe
from coterie.coordinator.comparing import compared_recipes
from coterie.coordinator.job import prepare_job
from coterie.coordinator.plan_facts import PlanFacts, keep_facts
from coterie.coordinator.run_data import run_data
from coterie.ids import RunId
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.units import MIB

WISHES = {"batch-rows": 2, "micro-batches": 2, "epochs": 5}
DEVICES = (
    *("--device", "name=phone,memory=500MiB,watts=4,network_watts=2"),
    *("--device", "name=old-phone,memory=450MiB,speed=0.5"),
    *("--device", "name=box,speed=4"),
    *("--link", "10Mbit/s"),
)


@pytest.fixture(scope="module")
def base(base_model, data):
    """The words of a comparison, with the facts of both recipes in the cache as measured ones would be."""
    overrides = {"model": str(base_model), "train": str(data), **WISHES}
    device = DeviceProfile(
        worker="x", name="x", memory_bytes=900 * MIB, base_bytes=400 * MIB, flops_per_s=1e8, measured_at_s=1.0
    )
    for recipe in compared_recipes(load_recipe(None, overrides)):
        job = prepare_job(recipe, RunId("plan"), lambda _text: None)
        keep_facts(recipe, PlanFacts(model=job.model_profile, device=device, data=run_data(job)))
    flags = [word for key, value in WISHES.items() for word in (f"--{key}", str(value))]
    return ["plan", "--compare", "--model", str(base_model), "--train", str(data), *flags]


def test_every_way_has_its_time_memory_bytes_energy_and_what_it_exposes(answer, base):
    code, found = answer(*base, *DEVICES)
    ways = {way["name"]: way for way in found["ways"]}
    table = {row["way"]: row for row in found["table"]}
    assert code == 0
    assert (found["owner"], found["server"]) == ("phone", "box")
    assert list(ways) == ["local LoRA", "pipeline LoRA", "side-tuning", "pipeline + side-tuning"]
    assert all(row["fits"] and row["seconds"] > 0 and row["modelled_energy_j"] > 0 for row in table.values())
    assert table["local LoRA"]["network_bytes"] == 0
    assert table["side-tuning"]["device_passes"] == 1
    assert table["pipeline LoRA"]["device_passes"] == 5
    phone = ways["side-tuning"]["devices"][0]
    assert phone["energy_j"] == pytest.approx(4 * phone["compute_s"] + 2 * phone["network_s"])
    assert all(way["exposes"] for way in ways.values())


def test_what_is_uploaded_is_what_the_formula_says(answer, base, data):
    _, found = answer(*base, *DEVICES, "--upload", "float32", "--first-layer", "2", "--side-rank", "4")
    (side,) = [way for way in found["ways"] if way["name"] == "side-tuning"]
    words = sum(bool(line.strip()) for line in data.read_text().splitlines())
    assert side["cache_bytes"] == words * 2 * 16 * 4  # words with a tag, two of three blocks, width 16


def test_the_text_has_a_row_for_each_way_and_says_what_does_not_fit(told, base):
    code, out, _ = told(*base, *DEVICES[2:], "--device", "name=phone,memory=300MiB", "--owner", "phone")
    assert code == 0
    assert "local LoRA" in out
    assert "does not fit: …/" in out
    assert "phone has 285 MiB" in out
    assert "energy (modelled)" in out
    assert "seen by box: " in out


def test_that_this_machine_was_measured_before_is_said_once_for_both_recipes(told, base):
    _, out, err = told(*base, *DEVICES)
    assert (out + err).count("this machine: measured") == 1


def test_where_no_way_fits_the_exit_code_is_7(answer, base):
    code, found = answer(*base, "--device", "name=phone,memory=300MiB")
    assert code == 7
    assert not any(row["fits"] for row in found["table"])
    assert all(row["reason"] for row in found["table"])


def test_a_second_comparison_needs_no_torch(base):
    words = [*base, *DEVICES, "--json"]
    program = (
        "import sys; from coterie.cli.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()), file=sys.stderr); raise SystemExit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert len(json.loads(done.stdout)["ways"]) == 4


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--compare"], 2, "--compare is for devices that are described"),
        (["--server", "a", "--device", "name=a"], 2, "--server is for --compare"),
        (["--compare", "--device", "name=a", "--schedule-grid"], 2, "draws no schedule"),
        (["--device", "name=a,watts=-1"], 2, "watts must be 0 or more"),
    ],
)
def test_flags_that_have_no_meaning_are_named(answer, words, code, message):
    found_code, found = answer("plan", "--model", "m", "--train", "t", *words)
    assert found_code == code
    assert message in found["error"]["message"]


def test_a_side_tuning_recipe_is_compared_and_a_plan_of_it_alone_is_refused(answer, base):
    alone = [word for word in base if word != "--compare"]
    code, found = answer(*alone, "--mode", "side", *DEVICES)
    assert code == 2
    assert "add --compare" in found["error"]["hint"]
    code, found = answer(*base, "--mode", "side", *DEVICES)
    assert code == 0
    assert all(way["fits"] for way in found["table"])


def test_an_owner_or_server_that_is_no_device_is_named(answer, base):
    code, found = answer(*base, *DEVICES, "--server", "laptop")
    assert code == 2
    assert "--server laptop: no --device has this name" in found["error"]["message"]


def test_wrong_settings_of_side_tuning_are_named(answer, base):
    code, found = answer(*base, *DEVICES, "--side-rank", "0")
    assert code == 3
    assert "rank" in found["error"]["message"]
