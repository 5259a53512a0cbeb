"""Show versions, devices, memory, and which optional packages are installed. Add the output to bug reports."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Callable
from typing import Any

from assay.runs.environment import extras, machine, versions
from assay.runs.files import print_json
from assay.system.memory import free_main_memory
from assay.types import describe_error

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print_json(facts)
        return 0
    for name in ("versions", "machine", "torch"):
        print(f"{name}:")
        for key, value in facts[name].items():
            print(f"  {key:<16} {shown(value)}")
    print("extras:")
    if not facts["extras"]:
        print("  unknown: the package is not installed (pip install -e . in a checkout)")
        return 0
    for name, extra in facts["extras"].items():
        print(f"  {name:<16} {state(extra)}" + ("" if extra["installed"] else f": {extra['install']}"))
    return 0


def collect() -> dict[str, Any]:
    """All facts. What cannot be found out has the reason as its value: a broken installation is when this is needed."""
    found = probed(extras)
    return {
        "versions": probed(versions),
        "machine": probed(machine) | probed(memory_and_compiler),
        "torch": probed(torch_facts),
        "extras": {} if "error" in found else found,  # damaged metadata of packages
    }


def probed(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except Exception as error:  # whatever it is
        return {"error": describe_error(error)}


def memory_and_compiler() -> dict[str, Any]:
    free = free_main_memory()
    compiler = os.environ.get("CC", "cc")  # as `engine.native.compiled` calls it
    words = shlex.split(compiler)
    return {
        "free_gib": None if free is None else round(free / GIB, 1),
        "c_compiler": shutil.which(words[0]) if words else None,
    }


def torch_facts() -> dict[str, Any]:
    """Threads and devices, as torch sees them; importing it takes a second or two."""
    import torch

    from assay.models.device import pick_device

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "memory_gib": round(total / GIB, 1), "free_gib": round(free / GIB, 1)})
    return {
        "cuda": torch.version.cuda,
        "default_device": str(pick_device("auto")),
        "threads": torch.get_num_threads(),
        "gpus": devices,
    }


def state(extra: dict[str, Any]) -> str:
    """Versions of the packages, or what is missing."""
    if extra["installed"]:
        return ", ".join(f"{name} {version}" for name, version in extra["packages"].items())
    missing = [f"{name} is missing" for name, version in extra["packages"].items() if version is None]
    return ", ".join([*missing, *(f"{text} is needed" for text in extra["outdated"])])


def shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return "; ".join(f"{gpu['name']}, {gpu['memory_gib']} GiB, {gpu['free_gib']} GiB free" for gpu in value)
    return str(value)
