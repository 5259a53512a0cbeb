"""Shared by commands: output in distributed runs, and settings that a checkpoint inherits from its run."""

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

# Messages of gloo and NCCL after another process has ended.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    from assay.runs.console import Console, null_stream

    return Console() if is_main() else Console(null_stream())


def should_report() -> bool:
    """Whether this process should print an error, because no other rank has printed one.

    Before the process group exists, all ranks read the same settings, and one message per node is enough.
    """
    mesh = sys.modules.get("assay.mesh")
    if mesh is not None and mesh.dist.is_initialized():
        return mesh.first_to_fail()
    return not is_distributed() or os.environ.get("LOCAL_RANK", "0") == "0"


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another process has ended."""
    return is_distributed() and isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


INHERITED = ("task", "env", "prompt", "reward", "eval")  # sections


def inherited_settings(
    models: Sequence[str], runs_dir: Path, overrides: Mapping[str, Any], trust: bool = False
) -> dict[str, Any]:
    """Settings of the first model that is a run's checkpoint, as dotted overrides.

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
            values = {f"{s}.{key}": value for s in INHERITED for key, value in tree[s].items()}
            return values | {"seed": tree["seed"], "model.max_length": tree["model"]["max_length"]}
    return {}


def warn_of_changes(cfg: TrainConfig, folder: Path) -> None:
    """Warn if inherited settings have changed since the last checkpoint."""
    last = checkpoints.last(folder)
    saved = None if last is None else saved_settings(folder, last)
    for key, change in describe_changes(saved, cfg).items() if saved else ():
        if key.partition(".")[0] in (*INHERITED, "sampling", "seed"):
            warnings.warn(f"{folder / SETTINGS}: {key} changed since step {last}: {change}", stacklevel=2)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="import Python code that the run's settings name")


def asker() -> Callable[[str], bool] | None:
    """A function that asks the user at the terminal; None without a terminal, or in a distributed run."""
    if is_distributed() or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return ask_user


def ask_user(question: str) -> bool:
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
