from pathlib import Path

import pytest

from coterie.errors import StorageError
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.profiles import cache as module
from coterie.profiles.cache import ProfileCache, cache_folder, profile_key
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile

LAYER = LayerProfile(
    name="embedding",
    kind="embedding",
    parameter_bytes=40,
    trainable_bytes=20,
    largest_trainable_bytes=12,
    saved=AffineBytes(fixed=3, per_row=5),
    boundary=AffineBytes(per_row=7),
    transient=AffineBytes(),
    forward_flops_per_row=1.5e9,
    backward_flops_per_row=3e9,
)
PROFILE = ModelProfile(
    key="k", name="bert", layers=(LAYER,), tied=False, tied_bytes=0, memory_tokens=128, typical_tokens=40, notes=("n",)
)


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "new")
    cache.write("abc1", PROFILE)
    assert cache.read("abc1", ModelProfile) == PROFILE


def test_an_unknown_key_reads_as_none(tmp_path: Path) -> None:
    assert ProfileCache(tmp_path).read("abc1", ModelProfile) is None


@pytest.mark.parametrize("damage", [b"", b'{"key": "k", "na', b"\xff\xfe", b"[]", b'{"key": 3}'])
def test_a_damaged_file_reads_as_none_and_is_rewritten(tmp_path: Path, damage: bytes) -> None:
    cache = ProfileCache(tmp_path)
    (tmp_path / "abc1.json").write_bytes(damage)
    assert cache.read("abc1", ModelProfile) is None
    cache.write("abc1", PROFILE)
    assert cache.read("abc1", ModelProfile) == PROFILE


def test_writing_leaves_no_temporary_file_behind(tmp_path: Path) -> None:
    ProfileCache(tmp_path).write("abc1", PROFILE)
    assert [path.name for path in tmp_path.iterdir()] == ["abc1.json"]


def test_a_failed_write_keeps_the_old_file_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProfileCache(tmp_path)
    cache.write("abc1", PROFILE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        cache.write("abc1", ModelProfile(**{name: getattr(PROFILE, name) for name in PROFILE.__struct_fields__}))
    assert cache.read("abc1", ModelProfile) == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["abc1.json"]


def test_the_key_changes_with_every_fact() -> None:
    spec = ModelSpec(config_json="{}", auto_class="AutoModel")
    lora = ModelSpec(config_json="{}", auto_class="AutoModel", method="lora", lora=LoraSpec(rank=4))
    keys = {
        profile_key("model", spec=spec, tokens=128),
        profile_key("model", spec=spec, tokens=129),
        profile_key("model", spec=lora, tokens=128),
        profile_key("device", spec=spec, tokens=128),
    }
    assert len(keys) == 4


def test_the_key_changes_with_a_library_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = profile_key("model", tokens=1)
    monkeypatch.setattr(module, "library_versions", lambda: {"torch": "99"})
    assert profile_key("model", tokens=1) != before


def test_the_key_does_not_depend_on_the_order_of_facts() -> None:
    assert profile_key("model", a=1, b={"x": 1, "y": 2}) == profile_key("model", b={"y": 2, "x": 1}, a=1)


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"COTERIE_CACHE": "/c"}, "linux", Path("/c")),
        ({"XDG_CACHE_HOME": "/x"}, "linux", Path("/x/coterie")),
        ({"XDG_CACHE_HOME": "relative"}, "linux", Path.home() / ".cache" / "coterie"),
        ({}, "linux", Path.home() / ".cache" / "coterie"),
        ({}, "darwin", Path.home() / "Library" / "Caches" / "coterie"),
        ({"LOCALAPPDATA": "/l"}, "win32", Path("/l/coterie/cache")),
    ],
)
def test_the_cache_folder_follows_the_platform(environment: dict[str, str], platform: str, expected: Path) -> None:
    assert cache_folder(environment, platform) == expected
