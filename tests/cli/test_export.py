"""`coterie export`: folders that plain transformers and PEFT load, from any checkpoint of a run."""

import itertools
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification

from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.store import CheckpointStore
from coterie.ids import RunId
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import FolderWeights, describe, make_model_spec, open_model

LABELS = ("O", "B-LOC", "B-PER")
# PEFT asks transformers for an attribute by its old name; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
INPUTS = {"input_ids": torch.tensor([[2, 5, 6, 7, 3]])}


@pytest.fixture(scope="module")
def make_run(base_model, tmp_path_factory):
    """Makes the folder of a run whose trained parameters differ from step to step."""

    def make(method: str, steps: tuple[int, ...] = (10, 20)) -> Path:
        folder = tmp_path_factory.mktemp(f"run-{method}")
        source = open_model(base_model)
        names = dict(enumerate(LABELS))
        spec = make_model_spec(
            source,
            auto_class="AutoModelForTokenClassification",
            config_overrides={"id2label": names, "label2id": {name: index for index, name in names.items()}},
            seed=0,
            method=method,
        )
        anatomy, weights = describe(spec), FolderWeights(source, spec)
        store = CheckpointStore(folder / "checkpoints")
        terms = RunTerms(
            run_id=RunId("r"),
            model=spec,
            optimizer=OptimizerSpec(),
            seed=0,
            batch_rows=4,
            micro_batches=2,
            schedule="flush",
        )
        for step in steps:
            units = {
                unit: {name: anatomy.shapes[name] for name in trained}
                for unit, trained in enumerate(anatomy.trainable)
                if trained
            }
            with store.begin(step, units) as writer:
                for unit, shapes in units.items():
                    generator = torch.Generator().manual_seed(step)
                    values = weights.get(shapes)
                    writer.write_unit(
                        unit,
                        {n: v + torch.randn(v.shape, generator=generator) * 0.1 for n, v in values.items()},
                        {},
                    )
                writer.commit(
                    Manifest(
                        terms=terms,
                        global_step=step,
                        epoch=0,
                        data_position=step,
                        samples_seen=step * 4,
                        base_model=str(base_model),
                    )
                )
        return folder

    return make


@pytest.fixture(scope="module")
def full_run(make_run):
    return make_run("full")


@pytest.fixture(scope="module")
def lora_run(make_run):
    return make_run("lora")


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForTokenClassification.from_pretrained(folder).eval()(**INPUTS).logits


def adapted_logits_of(folder: Path, base: Path) -> torch.Tensor:
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForTokenClassification.from_pretrained(base, config=config)
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(plain, folder).eval()(**INPUTS).logits


def test_the_last_step_goes_to_the_runs_own_model_folder(answer, full_run):
    code, found = answer("export", full_run)
    assert code == 0
    assert found == {"model": str(full_run / "model"), "step": 20, "adapter": False, "dtype": "float32"}
    assert logits_of(full_run / "model").shape == (1, 5, len(LABELS))
    assert AutoConfig.from_pretrained(full_run / "model").id2label == dict(enumerate(LABELS))


def test_an_earlier_step_goes_to_a_folder_of_its_own(answer, full_run):
    answer("export", full_run)
    code, found = answer("export", full_run, "--step", "10")
    assert (code, found["step"]) == (0, 10)
    assert found["model"] == str(full_run / "model-step-10")
    assert not torch.allclose(logits_of(full_run / "model"), logits_of(full_run / "model-step-10"))


def test_weights_can_be_saved_in_half_the_size(answer, full_run):
    _, found = answer("export", full_run, "--dtype", "bfloat16")
    assert found["model"] == str(full_run / "model-bfloat16")
    assert AutoModelForTokenClassification.from_pretrained(found["model"], dtype="auto").dtype == torch.bfloat16


def test_under_lora_the_adapter_and_the_merged_model_answer_alike(answer, lora_run, base_model):
    _, adapter = answer("export", lora_run)
    code, merged = answer("export", lora_run, "--merge")
    assert code == 0
    assert (adapter["adapter"], merged["adapter"]) == (True, False)
    assert (lora_run / "model" / "adapter_model.safetensors").is_file()
    expected = adapted_logits_of(lora_run / "model", base_model)
    assert torch.allclose(logits_of(Path(merged["model"])), expected, atol=1e-5)


def test_what_was_exported_can_be_evaluated_as_it_is(answer, lora_run, data):
    answer("export", lora_run)
    answer("export", lora_run, "--merge")
    _, adapter = answer("evaluate", lora_run / "model", "--data", data)
    code, merged = answer("evaluate", lora_run / "model-merged", "--data", data)
    assert code == 0
    assert adapter["metrics"] == merged["metrics"]
    assert adapter["loss"] == pytest.approx(merged["loss"], rel=1e-5)


def test_a_folder_with_other_files_is_left_alone_unless_told_otherwise(answer, full_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    code, found = answer("export", full_run, "--output", tmp_path / "out")
    assert code == 15
    assert "diary.txt" in found["error"]["message"]
    code, _ = answer("export", full_run, "--output", tmp_path / "out", "--overwrite")
    assert code == 0
    assert (tmp_path / "out.old" / "diary.txt").read_text() == "mine"
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_export_is_replaced_by_the_next(answer, full_run, tmp_path):
    for step in (10, 20):
        code, _ = answer("export", full_run, "--output", tmp_path / "out", "--step", step)
        assert code == 0
    answer("export", full_run)
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(full_run / "model"))


def test_nothing_but_one_line_is_printed(told, full_run, tmp_path):
    code, out, err = told("export", full_run, "--output", tmp_path / "out")
    assert code == 0
    assert out == f"step 20 exported to {tmp_path / 'out'}: a Hugging Face folder, float32\n"
    assert err == ""


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--step", "11"], 12, "no checkpoint of step 11; it has 10, 20"),
        (["--merge"], 2, "--merge is for runs with LoRA"),
        (["--base", "/no/such/base"], 5, "/no/such/base"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--dtype", "q8_0"], 2, "q8_0 is a type of GGUF files"),
        (["--gguf", "a.gguf", "--output", "b"], 2, "--output is for folders"),
        (["--gguf", "a.gguf"], 2, "GGUF files are for models that generate text"),
    ],
)
def test_wrong_wishes_are_named(answer, full_run, flags, code, message):
    found_code, found = answer("export", full_run, *flags)
    assert found_code == code
    assert message in found["error"]["message"]


def test_a_folder_without_a_run_is_named(answer, tmp_path):
    assert answer("export", tmp_path / "nowhere")[0] == 12
    code, found = answer("export", tmp_path)
    assert code == 12
    assert "holds no checkpoints" in found["error"]["message"]


def test_a_damaged_last_checkpoint_is_skipped(answer, make_run):
    folder = make_run("full")
    shards = (folder / "checkpoints" / "step-000020").glob("unit-*.safetensors")
    (shard,) = itertools.islice(shards, 1)
    shard.write_bytes(b"\0" * shard.stat().st_size)
    code, found = answer("export", folder)
    assert (code, found["step"]) == (0, 10)
