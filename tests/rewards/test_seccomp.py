from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")


def confined(code: str) -> str:
    """What a process prints that runs this code behind the filter, without Landlock and namespaces."""
    script = "import os, threading\nfrom assay.rewards import seccomp\nseccomp.confine(read_only=True)\n"
    run = subprocess.run([sys.executable, "-c", script + textwrap.dedent(code)], capture_output=True, text=True)
    return run.stdout + run.stderr


def test_filter_alone_refuses_opening_files_for_writing(tmp_path: Path) -> None:
    for mode in ("w", "a", "r+", "x"):
        assert "PermissionError" in confined(f"open({str(tmp_path)!r} + '/file', {mode!r})"), mode
    assert not list(tmp_path.iterdir())


def test_reading_files_threads_and_own_signals_still_work() -> None:
    code = """
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=print, args=("thread",))
        thread.start(); thread.join()
        print(len(open(os.__file__).read()) > 0)
    """
    assert confined(code).split() == ["signal", "signal", "thread", "True"]


def test_abort_still_ends_the_process_by_a_signal() -> None:
    script = "import os\nfrom assay.rewards import seccomp\nseccomp.confine(read_only=False)\nos.abort()"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == -6
