"""Cheap mistakes are told before anything heavy is imported, in the words of what would refuse them later."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.checkpoint.names import checkpoint_folder, saved_steps, step_name
from coterie.config.loading import load_recipe
from coterie.coordinator.preflight import check_forward, check_planning, check_run_folder, check_training
from coterie.errors import CheckpointError, DataError, ModelError, NetworkError, StorageError, UsageError


@pytest.fixture
def recipe_of(tmp_path):
    data = tmp_path / "train.conll"
    data.write_text("Ada\tB-PER\n")
    (tmp_path / "model").mkdir()

    def make(**options):
        known = {"model.name": str(tmp_path / "model"), "data.train": str(data), "output": str(tmp_path / "run")}
        return load_recipe(None, known | options)

    return make


def test_a_recipe_without_mistakes_passes_and_nothing_is_made(recipe_of, tmp_path):
    check_training(recipe_of())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_missing_file_of_any_split_is_named(recipe_of, tmp_path, split):
    with pytest.raises(DataError, match=r"absent\.conll: cannot be read"):
        check_planning(recipe_of(**{f"data.{split}": str(tmp_path / "absent.conll")}))


def test_a_data_folder_without_the_split_is_refused(recipe_of, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no train data"):
        check_planning(recipe_of(**{"data.train": str(tmp_path / "folder")}))
    with pytest.raises(DataError, match="holds no test data"):
        check_forward(recipe_of(), tmp_path / "folder", "test")


def test_rows_in_memory_are_not_looked_for_on_the_disk(recipe_of):
    check_forward(recipe_of(), [{"tokens": ["Ada"], "ner_tags": ["B-PER"]}], "test")
    check_forward(recipe_of(), None, "test")


def test_a_model_folder_that_is_not_there_is_refused_but_a_hub_name_may_be_right(recipe_of, tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        check_planning(recipe_of(**{"model.name": str(tmp_path / "nowhere")}))
    check_planning(recipe_of(**{"model.name": "somebody/some-model"}))


def test_an_old_run_s_folder_wants_resume_and_resume_wants_an_old_run(recipe_of):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        check_run_folder(recipe_of(resume=True))
    folder = checkpoint_folder(recipe_of().run.output)
    (folder / step_name(7)).mkdir(parents=True)
    (folder / "step-000009.partial").mkdir()
    assert saved_steps(folder) == (7,)
    check_run_folder(recipe_of(resume=True))
    with pytest.raises(UsageError, match="checkpoints of an earlier run"):
        check_run_folder(recipe_of())


def test_an_output_below_a_file_cannot_be_written(recipe_of, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file"):
        check_run_folder(recipe_of(output=str(tmp_path / "file" / "run")))


def test_a_taken_port_is_refused_and_a_free_one_stays_free(recipe_of):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=f"port {port}"):
            check_planning(recipe_of(port=port))
    check_planning(recipe_of(port=port))
    check_planning(recipe_of(port=port))


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--model", "m/o/d", "--train", "absent.conll"),
        ("plan", "--model", "m/o/d", "--train", "absent.conll"),
        ("evaluate", "m/o/d", "--data", "absent.conll"),
        ("predict", "m/o/d", "--data", "absent.conll"),
    ],
)
def test_no_torch_is_imported_before_a_missing_file_is_told(words, tmp_path: Path):
    script = (
        "import sys\nfrom coterie.cli.main import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'\nsys.exit(code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 4, ended.stderr
    assert "absent.conll" in ended.stderr
