"""Free main memory of machines and containers."""

from __future__ import annotations

import pytest

from assay.system import memory as module

GIB = 2**30


def write_cgroup(folder, limit, used, reclaimable=0, version=2) -> None:
    names = {1: module.CGROUP_V1, 2: module.CGROUP_V2}[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {reclaimable}\nfile 9\n")


def write_membership(root, text) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(text)


def bytes_left(root):
    return [left for left, _ in module.cgroup_limits(root)]


def test_memory_limits_of_cgroups_version_2_include_those_of_parents(tmp_path):
    write_membership(tmp_path, "0::/user/job\n")
    groups = tmp_path / "sys/fs/cgroup"
    write_cgroup(groups / "user/job", "max", 3 * GIB)
    assert bytes_left(tmp_path) == []
    write_cgroup(groups / "user", 8 * GIB, 5 * GIB, reclaimable=GIB)
    assert bytes_left(tmp_path) == [4 * GIB]
    write_cgroup(groups / "user/job", 4 * GIB, 3 * GIB)
    assert min(bytes_left(tmp_path)) == GIB
    write_cgroup(groups / "user/job", 4 * GIB, 5 * GIB)  # a limit that was lowered
    assert min(bytes_left(tmp_path)) == 0


def test_memory_limits_of_cgroups_version_1_and_of_both_versions(tmp_path):
    write_membership(tmp_path, "5:cpuset:/job\n4:cpu,memory:/docker/abc\n0::/\n")
    groups = tmp_path / "sys/fs/cgroup"
    write_cgroup(groups / "memory", 6 * GIB, 2 * GIB, reclaimable=GIB, version=1)  # as a container sees its own cgroup
    assert bytes_left(tmp_path) == [5 * GIB]
    write_cgroup(groups / "memory/docker/abc", 3 * GIB, GIB, version=1)
    write_cgroup(groups / "cpuset/job", 1, 0, version=1)
    write_cgroup(groups / "unified", 9 * GIB, GIB)
    assert sorted(bytes_left(tmp_path)) == [2 * GIB, 5 * GIB, 8 * GIB]


def test_a_system_without_cgroups_has_no_limits(tmp_path):
    assert bytes_left(tmp_path) == []


def test_used_and_free_main_memory_are_those_of_the_machine_or_of_a_fuller_container(tmp_path):
    assert module.host_memory_use(tmp_path) is None
    assert module.free_main_memory(tmp_path) is None
    write_membership(tmp_path, "0::/user/job\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages: 0\n")
    assert module.host_memory_use(tmp_path) == pytest.approx(0.6)
    write_cgroup(tmp_path / "sys/fs/cgroup/user/job", 8 * GIB, 7 * GIB, reclaimable=GIB)
    assert module.host_memory_use(tmp_path) == pytest.approx(0.75)
    assert module.free_main_memory(tmp_path) == 400 * 1024
    write_cgroup(tmp_path / "sys/fs/cgroup/user", GIB, GIB - 1234)
    assert module.free_main_memory(tmp_path) == 1234
