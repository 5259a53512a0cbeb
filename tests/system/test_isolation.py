from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from assay.system.isolation import import_folders

linux = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")


def run_filtered(code: str, read_only: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code in a process with the filter of system calls, but without Landlock and namespaces."""
    script = f"""
        import os, signal, threading
        from assay.system import isolation
        isolation.filter_system_calls(read_only={read_only})
    """
    command = [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True)


@linux
def test_filter_refuses_opening_files_for_writing(tmp_path: Path) -> None:
    code = f"""
        for mode in ("w", "a", "r+", "x"):
            try: open({str(tmp_path)!r} + "/file", mode)
            except PermissionError: print(mode)
    """
    assert run_filtered(code).stdout.split() == ["w", "a", "r+", "x"]
    assert not list(tmp_path.iterdir())


@linux
def test_filter_allows_reading_files_threads_and_own_signals() -> None:
    code = """
        signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=print, args=("thread",))
        thread.start(); thread.join()
        print(len(open(os.__file__).read()) > 0)
    """
    assert run_filtered(code).stdout.split() == ["signal", "signal", "thread", "True"]


@linux
def test_filter_refuses_to_act_on_other_processes_without_signals() -> None:
    """Without a PID namespace, a process could end, pin or renice all others of the same user."""
    code = """
        import fcntl, socket, struct
        reading, writing = os.pipe()
        ends = socket.socketpair()
        parent = os.getppid()
        attacks = {
            "F_SETOWN": lambda: fcntl.fcntl(reading, fcntl.F_SETOWN, parent),
            "F_SETOWN_EX": lambda: fcntl.fcntl(reading, 15, struct.pack("ii", 1, parent)),
            "FIOSETOWN": lambda: fcntl.ioctl(ends[0], 0x8901, struct.pack("i", parent)),
            "SIOCSPGRP": lambda: fcntl.ioctl(ends[0], 0x8902, struct.pack("i", parent)),
            "affinity": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
            "scheduler": lambda: os.sched_setscheduler(parent, os.SCHED_OTHER, os.sched_param(0)),
            "priority": lambda: os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent)),
        }
        for name, attack in attacks.items():
            try: attack()
            except PermissionError: continue
            print(name, "was not refused")
        os.set_blocking(reading, False)
        fcntl.fcntl(reading, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        print("descriptors", os.get_blocking(reading), os.isatty(reading))
    """
    assert run_filtered(code).stdout.splitlines() == ["descriptors False False"]


@linux
def test_filter_allows_abort() -> None:
    assert run_filtered("os.abort()", read_only=False).returncode == -6


def test_folders_of_installed_packages_can_be_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, project = tmp_path / "target", tmp_path / "project"
    (installed / "some_package-1.0.dist-info").mkdir(parents=True)  # as by pip install --target
    project.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed), str(project)])
    assert str(installed) in import_folders(user_code=False)
    assert str(project) not in import_folders(user_code=False)
    assert str(project) in import_folders(user_code=True)
