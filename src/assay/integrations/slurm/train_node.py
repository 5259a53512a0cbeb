"""torchrun on a node of a Slurm job, with an exit code that distinguishes a requested stop from an error."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence

STOPPED = 143  # exit code of a process that saved and stopped after SIGTERM
FAILED = 200  # above all others: srun returns the highest exit code of all nodes
PAUSE_S = 3.0  # srun kills the other nodes as soon as one ends: time for them to end or to print their errors


def launch(words: Sequence[str]) -> int:
    code = run_torchrun(words)
    if code and os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        time.sleep(PAUSE_S)
    return code


def run_torchrun(words: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Not SIGTERM: torchrun would stop the processes and allow them only 30 seconds.
    handled = "SIGINT,SIGHUP,SIGQUIT"
    try:
        torchrun(["--node-rank", os.environ["SLURM_NODEID"], "--signals-to-handle", handled, *words])
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
    raise SystemExit(launch(sys.argv[1:]))
