"""Main memory that is free, of the machine and of the container or job of this process."""

from __future__ import annotations

from itertools import accumulate, product
from pathlib import Path

from assay.types import UserError

RESERVE = 256 * 2**20  # bytes that data must leave free


def free_main_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process can still use; None if unknown. `root`: of the file system."""
    return min((left for left, _ in memory_limits(root)), default=None)


def host_memory_use(root: Path = Path("/")) -> float | None:
    """Fraction of main memory in use, of the machine or of this process's container if that is fuller; None if unknown.

    File cache that can be dropped counts as free.
    """
    return max((1 - left / limit for left, limit in memory_limits(root) if limit), default=None)


def check_data_fits(path: Path, rows: int, needed: int = 0) -> None:
    """Raise a UserError if data needs more than the free memory. `needed`: bytes; 0: the rows are already read."""
    free = free_main_memory()
    if free is not None and free - needed < RESERVE:
        size = f"{rows:,} rows need {needed / 2**30:,.1f} GiB" if needed else f"after {rows:,} rows"
        left = f"{free / 2**30:,.1f} GiB are free"
        raise UserError(f"{path} does not fit into memory ({size}, {left}): use fewer rows or more memory")


def memory_limits(root: Path) -> list[tuple[int, int]]:
    """Bytes left and in total: of the machine, and of each cgroup with a limit. Empty if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    machine = [(sizes["MemAvailable"] * 1024, sizes["MemTotal"] * 1024)] if "MemAvailable" in sizes else []
    return machine + cgroup_limits(root)


# Limit, usage, and the key of reclaimable file cache in memory.stat, of cgroups version 2 and 1.
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Bytes left and the limit of each cgroup of this process with a memory limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounts, names = (("memory",), CGROUP_V1) if controllers else (("", "unified"), CGROUP_V2)
        # In a container, the path may be a path of the host; the container's own cgroup is then the mounted one.
        parents = [
            *accumulate((part for part in path.split("/") if part not in ("", "..")), "{}/{}".format, initial="")
        ]
        for mount, parent in product(mounts, parents):
            limits += cgroup_left(root / "sys/fs/cgroup" / mount / parent.lstrip("/"), *names)
    return limits


def cgroup_left(folder: Path, limit: str, usage: str, reclaimable: str) -> list[tuple[int, int]]:
    """The bytes that are left in one cgroup, and its limit; empty if it does not exist or has no limit."""
    try:
        most, used = ((folder / name).read_text().strip() for name in (limit, usage))
        if not most.isdecimal():  # "max"
            return []
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    return [(max(int(most) - int(used) + int(stat.get(reclaimable, 0)), 0), int(most))]
