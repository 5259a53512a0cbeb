"""Supervised programs: log, end, and no orphans when the process that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from process_tree import is_running
from waiting import until

from assay.system.program import SupervisedProgram, free_port, last_error

PARENT = """
import os, sys, time
from pathlib import Path
from assay.system.program import SupervisedProgram
program = SupervisedProgram([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), os.environ)
print(program.pid, flush=True)
time.sleep(600)
"""
PROGRAM = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def run(code: str, log: Path, **environment: str) -> SupervisedProgram:
    return SupervisedProgram([sys.executable, "-c", code], log, {**os.environ, **environment})


def test_output_goes_to_the_log_and_the_end_is_reported(tmp_path: Path) -> None:
    program = run("import os; print(os.environ['WORD']); raise SystemExit(3)", tmp_path / "log", WORD="hello")
    until(lambda: program.ended is not None)
    assert program.ended == "exit code 3" and program.tail() == "hello"
    program.close()


def test_the_last_error_is_the_cause_if_a_later_one_only_points_to_it(tmp_path: Path) -> None:
    cause = "(Worker) ERROR RuntimeError: head_dim=16 is not supported"
    later = "(Server) ERROR EngineDeadError: an issue. See stack trace (above) for the root cause."
    (tmp_path / "log").write_text(f"ValueError: bad\n{cause}\n{later}\nINFO: POST /v1/completions 500 Server Error\n")
    assert last_error(tmp_path / "log") == cause


def test_a_program_that_does_not_exist_ends_with_a_line_in_the_log(tmp_path: Path) -> None:
    program = SupervisedProgram(["/no/such/program"], tmp_path / "log", os.environ)
    until(lambda: program.ended is not None)
    assert program.tail() == "Error: cannot start /no/such/program: No such file or directory"


def test_close_ends_a_program_politely(tmp_path: Path) -> None:
    handler = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (print('term', flush=True), exit(0)))"
    program = run(f"{handler}; print('ready', flush=True); time.sleep(600)", tmp_path / "log")
    until(lambda: program.log.exists() and program.log.read_text() == "ready\n")
    assert program.ended is None and is_running(program.pid)
    program.close()
    assert program.tail() == "term" and not is_running(program.pid)


def test_blocked_sigterm_does_not_reach_a_program_or_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = SupervisedProgram([sys.executable, "-c", PROGRAM], log, os.environ, block_sigterm=True)
    until(lambda: program.tail().isdigit())
    child = int(program.tail())
    for pid in (program.pid, child):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert program.ended is None and is_running(child)
    program.close()
    assert "KeyboardInterrupt" in log.read_text() and not is_running(program.pid) and not is_running(child)


def test_a_program_can_be_restarted(tmp_path: Path) -> None:
    program = run("import time; print('ready', flush=True); time.sleep(600)", tmp_path / "log")
    first = program.pid
    program.restart()
    until(lambda: program.tail() == "ready")
    assert program.ended is None and is_running(program.pid) and program.pid != first and not is_running(first)
    program.close()


def test_no_process_is_left_if_the_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log), PROGRAM], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert is_running(pid) and is_running(grandchild)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not is_running(pid) and not is_running(grandchild))


def test_the_reason_is_known_as_soon_as_the_program_is_dead(tmp_path: Path) -> None:
    """Although its supervisor still kills what the program has started."""
    program = run(PROGRAM, tmp_path / "log")
    until(lambda: program.tail().isdigit())
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not is_running(program.pid))
    assert program.ended == "killed by SIGKILL"
    program.close()


def test_free_ports_can_be_used() -> None:
    assert 1024 <= free_port() < 65536
