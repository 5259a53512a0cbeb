"""What a run and `assay info` record of their surroundings: versions, machine, command, commit, optional extras."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import assay
from assay.types import DISTRIBUTION, extra_commands

PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "math-verify"),
    *("huggingface-hub", "vllm", "sglang"),
)


def describe_environment() -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "versions": versions(),
        "git": _git_state(),
        "machine": {**machine(), "gpus": _gpu_names()},
    }


def versions() -> dict[str, str]:
    """Versions of assay, Python and the packages that are installed, without importing them."""
    found = {name: version for name in PACKAGES if (version := version_of(name)) is not None}
    return {"assay": assay.__version__, "python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": memory_gib(digits=1),
    }


@cache
def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed. Read once per process: it takes milliseconds."""
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


def extras() -> dict[str, Any]:
    """All optional extras by name, from the metadata of the installed package; none if it runs from a folder without
    metadata. `packages`: installed versions, None for those that are missing; `outdated`: requirements that the
    installed versions do not meet; `install`: the command.
    """
    from packaging.requirements import Requirement

    try:
        names = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return {}
    optional = [
        requirement for requirement in requirements if requirement.marker and "extra" in str(requirement.marker)
    ]
    found = {}
    command = extra_commands("{}")[0 if _is_editable() else 1]
    for name in names:
        needed = [r for r in optional if r.marker and r.marker.evaluate({"extra": name})]
        packages = {requirement.name: version_of(requirement.name) for requirement in needed}
        outdated = [
            f"{requirement.name}{requirement.specifier}"
            for requirement in needed
            if (version := packages[requirement.name]) and not requirement.specifier.contains(version, prereleases=True)
        ]
        installed = None not in packages.values() and not outdated
        found[name] = {"installed": installed, "packages": packages, "outdated": outdated}
        found[name]["install"] = command.format(name)
    return found


def _is_editable() -> bool:
    """Whether the package is installed from a checkout (pip install -e)."""
    text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
