import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.jobs.model_spec import ModelSpec
from coterie.measure.cached import cached_model_profile, refreshed_device_profile
from coterie.measure.keys import device_profile_key, model_profile_key
from coterie.profiles.cache import ProfileCache
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.profiles.model_profile import ModelProfile

Make = Callable[..., ModelSpec]


def test_a_second_profile_comes_from_the_cache_under_the_new_name(bert: Make, tmp_path: Path) -> None:
    cache, spec = ProfileCache(tmp_path), bert()
    first = cached_model_profile(spec, memory_tokens=8, typical_tokens=8, name="a", cache=cache)
    marked = ModelProfile(**{**{f: getattr(first, f) for f in first.__struct_fields__}, "notes": ("from disk",)})
    cache.write(first.key, marked)
    second = cached_model_profile(spec, memory_tokens=8, typical_tokens=8, name="b", cache=cache)
    assert (second.notes, second.name) == (("from disk",), "b")


def test_a_hit_needs_no_torch(bert: Make, tmp_path: Path) -> None:
    spec = bert()
    cached_model_profile(spec, memory_tokens=8, typical_tokens=8, name="a", cache=ProfileCache(tmp_path))
    code = f"""
import sys
from pathlib import Path
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.cached import cached_model_profile
from coterie.profiles.cache import ProfileCache
spec = ModelSpec(config_json={spec.config_json!r}, auto_class={spec.auto_class!r})
cached_model_profile(spec, memory_tokens=8, typical_tokens=8, name="a", cache=ProfileCache(Path({str(tmp_path)!r})))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_does_not_end_the_run(bert: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = ProfileCache(tmp_path / "file" / "profiles")
    profile = cached_model_profile(bert(), memory_tokens=8, typical_tokens=8, name="a", cache=cache)
    assert profile.name == "a"


def test_the_model_key_changes_with_what_was_measured_and_not_with_the_seed(bert: Make) -> None:
    def key(spec: ModelSpec, memory: int = 8, typical: int = 8) -> str:
        return model_profile_key(spec, memory_tokens=memory, typical_tokens=typical)

    assert key(bert(seed=1)) == key(bert(seed=2))
    changed = {key(bert()), key(bert(), memory=9), key(bert(), typical=7), key(bert(num_hidden_layers=3))}
    assert len(changed | {key(bert(frozen=("classifier.weight",)))}) == 5


@pytest.mark.parametrize(
    "change", [{"threads": 2}, {"throttle_speed": 0.5}, {"rows": (1, 8)}, {"device_type": "cuda"}, {"device_name": "b"}]
)
def test_the_device_key_changes_with_every_setting(change: dict[str, object]) -> None:
    usual: dict[str, object] = {
        "device_type": "cpu", "device_name": "a", "threads": 1, "throttle_speed": None, "rows": (1, 4)
    }  # fmt: skip
    assert device_profile_key("m", **usual) != device_profile_key("m", **{**usual, **change})  # type: ignore[arg-type]


def test_a_cached_device_profile_gets_todays_memory() -> None:
    kept = DeviceProfile(worker="w1", name="old", memory_bytes=1, base_bytes=2, flops_per_s=5.0)
    fresh = refreshed_device_profile(kept, worker="w2", name="new", memory=30, base=20)
    assert (fresh.worker, fresh.name, fresh.memory_bytes, fresh.base_bytes, fresh.flops_per_s) == (
        "w2",
        "new",
        30,
        20,
        5.0,
    )
