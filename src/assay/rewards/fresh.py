"""Fresh interpreters that work for us over their pipes.

There is no fork of a process that may hold torch, and no second import of the user's script.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress

_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


def command(module: str, *arguments: str) -> list[str]:
    """Runs `main` of a module, with the modules that can be imported here. `sys.argv[2:]` are the arguments."""
    path = json.dumps([str(place) or os.getcwd() for place in sys.path])
    return [sys.executable, "-P", "-c", _BOOTSTRAP.format(module), path, *arguments]


def take_pipes() -> tuple[int, int]:
    """Over there: keep the pipes for ourselves; whatever users' functions print goes to stderr.

    Programs that users' functions start do not inherit these descriptors.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return incoming, outgoing


def ending(code: int) -> str:
    """How a process came to its end, in words. Codes above 128 are a shell's way to say: killed by a signal."""
    signum = -code if code < 0 else code - 128
    with suppress(ValueError):
        if signum > 0:
            return f"killed by {signal.Signals(signum).name}"
    return f"exit code {code}"
