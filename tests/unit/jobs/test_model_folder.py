"""What the name of a model means: a folder, a GGUF file, or a name on the hub."""

import pytest

from coterie.errors import ModelError
from coterie.jobs.model_folder import local_model


def test_a_folder_with_a_config_means_itself_even_beside_a_gguf_file(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "a.gguf").touch()
    assert local_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_means_itself_and_so_does_the_folder_that_holds_nothing_else(tmp_path):
    path = tmp_path / "a.gguf"
    path.touch()
    assert local_model(str(path)) == path
    assert local_model(str(tmp_path)) == path


def test_a_folder_of_several_gguf_files_is_refused_naming_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\)"):
        local_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_what_looks_like_a_path_must_be_there(name):
    with pytest.raises(ModelError, match="there is no model folder"):
        local_model(name)


def test_an_absent_gguf_file_is_not_looked_for_on_the_hub():
    with pytest.raises(ModelError, match=r"no GGUF file model.gguf"):
        local_model("model.gguf")


def test_other_names_are_names_on_the_hub():
    assert local_model("someone/model") is None
