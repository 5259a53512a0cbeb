"""A command that torchrun started several times: which of its processes speaks."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.runs.console import Console

# What gloo and NCCL say when another process is gone.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


def many() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    return not many() or os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    from assay.runs.console import Console, nowhere

    return Console() if is_main() else Console(nowhere())


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
