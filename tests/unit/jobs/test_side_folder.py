"""The config of a folder with a side network."""

from pathlib import Path

import msgspec
import pytest

from coterie.errors import ModelError
from coterie.jobs.side_folder import BACKBONE, SIDE_CONFIG, SideConfig, read_side_config, write_side_config
from coterie.jobs.side_spec import SideSpec

CONFIG = SideConfig(backbone="some/model", auto_class="A", blocks="b", layers=3, width=8, side=SideSpec(rank=4))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_side_config(tmp_path, CONFIG)
    assert read_side_config(tmp_path) == CONFIG


def test_other_folders_have_none(tmp_path: Path) -> None:
    assert read_side_config(tmp_path) is None
    assert read_side_config(tmp_path / "nowhere") is None


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / SIDE_CONFIG).write_text('{"backbone": 3}')
    with pytest.raises(ModelError, match="cannot be read") as refused:
        read_side_config(tmp_path)
    assert "--resume" in refused.value.hint


def test_one_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_side_config(tmp_path, msgspec.structs.replace(CONFIG, format=99))
    with pytest.raises(ModelError, match="format 99"):
        read_side_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "some/model"),
        ({"gguf_file": "m.gguf"}, "some/model/m.gguf"),
        ({"backbone": BACKBONE}, "/folder/backbone"),
        ({"backbone": BACKBONE, "gguf_file": "m.gguf"}, "/folder/backbone/m.gguf"),
    ],
)
def test_the_backbone_is_a_hub_name_a_folder_a_file_or_a_copy(settings: dict[str, str], place: str) -> None:
    assert msgspec.structs.replace(CONFIG, **settings).backbone_path(Path("/folder")) == place
