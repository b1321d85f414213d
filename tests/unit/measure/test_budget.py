from pathlib import Path

import psutil
import pytest
import torch

from coterie.measure.budget import MemoryFiles, cgroup_limits, limit_accelerator_memory, memory_budget
from coterie.measure.process_memory import current_rss_bytes
from coterie.units import GIB, MIB

HUGE = 9223372036854771712


def files(tmp_path: Path, membership: str, contents: dict[str, str]) -> MemoryFiles:
    """A made-up /proc/self/cgroup and /sys/fs/cgroup."""
    root = tmp_path / "cgroup"
    root.mkdir()
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(membership)
    return MemoryFiles(membership=tmp_path / "self", cgroup_root=root)


def limits(where: MemoryFiles) -> list[int]:
    return sorted(option.bytes for option in cgroup_limits(where))


def test_a_v2_container_limit_below_the_hosts_memory_is_the_budget(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/app\n", {"app/memory.max": str(700 * MIB), "app/memory.current": "0"})
    budget = memory_budget(None, files=where)
    assert budget.bytes == 700 * MIB < psutil.virtual_memory().total
    assert "700 MiB" in budget.why
    assert "cgroup v2" in budget.why


def test_a_v1_container_limit_below_the_hosts_memory_is_the_budget(tmp_path: Path) -> None:
    where = files(
        tmp_path,
        "5:devices:/\n4:cpu,memory:/docker/ab\n0::/\n",
        {"memory/docker/ab/memory.limit_in_bytes": str(600 * MIB), "memory/memory.limit_in_bytes": str(HUGE)},
    )
    budget = memory_budget(None, files=where)
    assert budget.bytes == 600 * MIB
    assert "cgroup v1" in budget.why


def test_the_least_limit_from_the_own_group_up_to_the_root_holds(tmp_path: Path) -> None:
    where = files(
        tmp_path,
        "0::/a/b\n",
        {"a/b/memory.max": "max\n", "a/memory.max": f"{500 * MIB}\n", "memory.max": f"{900 * MIB}\n"},
    )
    assert limits(where) == [500 * MIB, 900 * MIB]
    assert memory_budget(None, files=where).bytes == 500 * MIB


def test_a_path_that_only_the_host_sees_falls_back_to_the_visible_root(tmp_path: Path) -> None:
    where = files(tmp_path, "4:memory:/kubepods/pod1/ctr\n", {"memory/memory.limit_in_bytes": str(300 * MIB)})
    assert limits(where) == [300 * MIB]


def test_dots_in_a_namespaced_path_do_not_leave_the_root(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/../../x\n", {"x/memory.max": str(300 * MIB)})
    assert limits(where) == [300 * MIB]


@pytest.mark.parametrize("text", ["max", str(HUGE), str(2**63 - 1), "", "-1"])
def test_no_limit_is_no_limit(tmp_path: Path, text: str) -> None:
    where = files(tmp_path, "0::/\n3:memory:/\n", {"memory.max": text, "memory/memory.limit_in_bytes": text})
    assert limits(where) == []


def test_the_soft_limit_of_v2_counts_because_the_kernel_stalls_whoever_exceeds_it(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/a\n", {"a/memory.max": str(800 * MIB), "a/memory.high": str(500 * MIB)})
    assert limits(where) == [500 * MIB, 800 * MIB]


def test_v2_beside_v1_is_found_under_unified(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/a\n", {"unified/a/memory.max": str(500 * MIB)})
    assert limits(where) == [500 * MIB]


def test_what_other_processes_of_the_group_use_is_taken_off_but_not_their_cached_files(tmp_path: Path) -> None:
    usage = current_rss_bytes() + 1000 * MIB
    where = files(
        tmp_path,
        "0::/a\n",
        {
            "a/memory.max": str(2 * GIB),
            "a/memory.current": str(usage),
            "a/memory.stat": f"anon 5\ninactive_file {400 * MIB}\n",
        },
    )
    (found,) = limits(where)
    assert found == pytest.approx(2 * GIB - 600 * MIB, abs=64 * MIB)


def test_the_users_limit_wins_when_it_is_the_least(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/\n", {})
    budget = memory_budget(64 * MIB, files=where)
    assert budget.bytes == 64 * MIB
    assert "owner" in budget.why


def test_a_users_limit_above_what_is_free_changes_nothing(tmp_path: Path) -> None:
    where = files(tmp_path, "0::/\n", {})
    budget = memory_budget(1 << 50, files=where)
    free = psutil.virtual_memory().available + current_rss_bytes()
    assert budget.bytes == pytest.approx(free, rel=0.1)
    assert budget.bytes < psutil.virtual_memory().total * 1.01


def test_without_control_groups_free_memory_is_the_budget(tmp_path: Path) -> None:
    where = MemoryFiles(membership=tmp_path / "absent", cgroup_root=tmp_path)
    assert "free" in memory_budget(None, files=where).why


def test_an_accelerators_limit_is_its_share_of_that_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    assert limit_accelerator_memory("cuda", 2 * GIB)
    assert limit_accelerator_memory("cuda", 9 * GIB)
    assert shares == [0.25, 1.0]
    assert not limit_accelerator_memory("cpu", GIB)
