"""The processes of this machine, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from waiting import comes_true


def table() -> dict[int, tuple[int, str, str]]:
    """Process id -> parent, state, command line."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        processes[int(folder.name)] = int(parent), state, command
    return processes


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents first."""
    processes, tree = table(), [pid]
    for parent in tree:
        tree += [child for child, (its_parent, _, _) in processes.items() if its_parent == parent]
    return tree[1:]


def alive(mark: str) -> list[int]:
    """Return processes with the mark in their command line, except zombies."""
    return [pid for pid, (_, state, line) in table().items() if mark in line and state != "Z" and pid != os.getpid()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends between opening and reading
        return False


def gone(mark: str, within: float = 10.0) -> bool:
    """Wait until no process has the mark in its command line; return whether that happened."""
    return comes_true(lambda: not alive(mark), within)


def started(mark: str, count: int, within: float = 20.0) -> bool:
    return comes_true(lambda: len(alive(mark)) == count, within)


def ended(pids: list[int], within: float = 10.0) -> bool:
    return comes_true(lambda: not any(map(is_running, pids)), within)


def zombies() -> list[int]:
    """Return children of this process that were not reaped."""
    return [pid for pid, (parent, state, _) in table().items() if parent == os.getpid() and state == "Z"]
