"""Description of the environment of a run: versions, machine, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import assay

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "math-verify", "vllm", "sglang")


def describe_environment() -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "versions": {"python": platform.python_version(), "assay": assay.__version__, **_package_versions()},
        "git": _git_state(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "memory_gib": memory_gib(digits=1),
            "gpus": _gpu_names(),
        },
    }


def _package_versions() -> dict[str, str]:
    versions = {name: version_of(name) for name in _PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory, and whether files differ from it; None outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory_gib(digits: int | None = None) -> float | None:
    """Main memory, rounded to `digits` decimals; without, to an integer, which does not change from boot to boot."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, digits)
    except (ValueError, OSError, AttributeError):
        return None


def _gpu_names() -> list[str]:
    """Empty unless torch is loaded already: importing it takes seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
