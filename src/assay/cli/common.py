"""A command that torchrun started several times: which of its processes speaks.

What a run's checkpoint brings along when it is named as a model: the run's own settings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import TrainConfig
from assay.runs import checkpoints
from assay.runs.resolve import PREFIX, SETTINGS, describe_changes, find_run, run_settings, saved_settings, split_tag
from assay.terminal import one_line

if TYPE_CHECKING:
    from assay.runs.console import Console

# What gloo and NCCL say when another process is gone.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


def many() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    return not many() or os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    from assay.runs.console import Console, null_stream

    return Console() if is_main() else Console(null_stream())


def may_tell() -> bool:
    """Whether this process should say what went wrong: not where another has said it already.

    Before the processes know of each other they all read the same settings, and one a node is enough.
    """
    mesh = sys.modules.get("assay.mesh")
    if mesh is not None and mesh.dist.is_initialized():
        return mesh.first_to_fail()
    return not many() or os.environ.get("LOCAL_RANK", "0") == "0"


def lost_another(error: BaseException) -> bool:
    """Whether this is no more than the end of another process, as this one sees it."""
    return many() and isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


SECTIONS = ("task", "env", "prompt", "reward", "eval")


def inherited_settings(
    models: Sequence[str], runs_dir: Path, overrides: Mapping[str, Any], trust: bool = False
) -> dict[str, Any]:
    """The settings of these sections of the first model that is a run's checkpoint, as dotted overrides.

    Code that they name is imported only with the user's consent: `trust`, or naming it in `overrides`.
    """
    from assay.train.trust import guard_run, strings

    for model in models:
        if model.startswith(PREFIX):
            name, _ = split_tag(model.removeprefix(PREFIX))
            folder = find_run(name, runs_dir)
            cfg = run_settings(folder)
            warn_of_changes(cfg, folder)
            guard_run(cfg, folder, typed=strings(dict(overrides)), trust=trust, ask=asker())
            tree = cfg.model_dump()
            for key in ("max_new_tokens", "stop"):
                tree["eval"][key] = tree["eval"][key] or tree["sampling"][key]
            found = {f"{s}.{key}": value for s in SECTIONS for key, value in tree[s].items()}
            return found | {"seed": tree["seed"], "model.max_length": tree["model"]["max_length"]}
    return {}


def warn_of_changes(cfg: TrainConfig, folder: Path) -> None:
    """Warn where the settings that are inherited are no longer those of the last checkpoint."""
    last = checkpoints.last(folder)
    saved = None if last is None else saved_settings(folder, last)
    for key, change in describe_changes(saved, cfg).items() if saved else ():
        if key.partition(".")[0] in (*SECTIONS, "sampling", "seed"):
            warnings.warn(f"{folder / SETTINGS}: {key} changed since step {last}: {change}", stacklevel=2)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="import Python code that the run's settings name")


def asker() -> Callable[[str], bool] | None:
    """How to put a question to the person at the terminal; None where there is nobody, or several processes ask."""
    if many() or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return ask_person


def ask_person(question: str) -> bool:
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
