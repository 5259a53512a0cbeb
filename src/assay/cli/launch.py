"""torchrun on one node of a batch job; its exit code tells processes that stopped as they were asked from an error."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence

STOPPED = 143  # that of a process which was sent SIGTERM, and has saved
FAILED = 200  # above all others: srun gives the highest of all nodes
PAUSE_S = 3.0  # srun kills the other nodes as soon as one ends: time for them to end too, or to say what went wrong


def main(words: Sequence[str]) -> int:
    code = launch(words)
    if code and os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        time.sleep(PAUSE_S)
    return code


def launch(words: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # SIGTERM is left out: torchrun would stop the processes, and give them 30 seconds only.
    heeded = "SIGINT,SIGHUP,SIGQUIT"
    try:
        torchrun(["--node-rank", os.environ["SLURM_NODEID"], "--signals-to-handle", heeded, *words])
    except ChildFailedError as error:
        if all(failure.exitcode == STOPPED for failure in error.failures.values()):
            return STOPPED
        print(error, file=sys.stderr, flush=True)
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
