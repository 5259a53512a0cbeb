from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process_tree import descendants, ended, gone

from assay.rewards import FunctionJudge, JudgePool, MathJudge
from assay.rewards.pool import Item
from assay.types import Status, UserError, Verdict

GSM8K = Path(os.environ.get("ASSAY_GSM8K", Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k"))


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str], FunctionJudge]:
    def judge(code: str) -> FunctionJudge:
        file = tmp_path / "mine.py"
        file.write_text(
            "import os, time\nanswers = []\ndef reward(completion, answer, **fields):\n"
            + textwrap.indent(textwrap.dedent(code), "    ")
        )
        return FunctionJudge(f"{file}:reward")

    return judge


def test_order_and_reuse() -> None:
    with JudgePool(MathJudge("hash"), workers=2) as pool:
        assert pool.judge([]) == []
        for size in (1, 3, 500):
            verdicts = pool.judge([(f"#### {i}", str(i if i % 3 else -i - 1), {}) for i in range(size)])
            assert [v.parsed for v in verdicts] == [str(i) for i in range(size)]
            assert [v.correct for v in verdicts] == [bool(i % 3) for i in range(size)]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K folder: set ASSAY_GSM8K")
def test_all_gsm8k_golds_score_one_and_quickly() -> None:
    lines = [line for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()]
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == 7473 + 1319
    items: list[Item] = [(answer, answer.rpartition("####")[2].strip(), {}) for answer in answers]
    boxed: list[Item] = [(rf"\boxed{{{gold.replace(',', '')}}}", gold, {}) for _, gold, _ in items]
    with JudgePool(MathJudge("hash"), workers=2) as pool:
        pool.judge(items[:2])
        started = time.perf_counter()
        pool.judge(items[:1024])
        seconds = time.perf_counter() - started
        assert all(v.reward == 1.0 and v.correct for v in pool.judge(items))
    assert seconds < 1.0
    assert all(MathJudge()(*item).correct for item in boxed)


HOSTILE = [
    r"\boxed{9**9**9**9}",
    r"\boxed{" + "9" * 10_000_000 + "}",
    "9" * 10_000_000,
    r"\boxed{" + r"\frac{1}{" * 100_000 + "1" + "}" * 100_000 + "}",
    r"\boxed{" + "(" * 20 + "1" + ")" * 20 + "^{999}" * 1 + "}",
    r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}",
    r"\boxed{((9^{999})^{999})^{999}}",
    r"\boxed{\binom{99999999}{44444444}}",
    r"\boxed{\sum_{i=1}^{\infty} \frac{\sin(i^{7})}{\cos(i) + i^{9}}}",
    r"\boxed{1e999999999}",
    r"\boxed{1/0}",
    r"\boxed" * 1_000_000,
    "{" * 5_000_000 + r"\boxed{" + "{" * 5_000_000,
]


def test_hostile_answers_are_judged_by_their_size_and_not_by_the_clock() -> None:
    with JudgePool(MathJudge(), workers=2, timeout_s=30) as pool:
        pool.judge([(r"\boxed{\sqrt{4}}", "2", {})] * 2)  # loads math-verify in both
        started = time.perf_counter()
        verdicts = pool.judge([(text, "5", {}) for text in HOSTILE])
        seconds = time.perf_counter() - started
        assert pool.judge([(r"\boxed{5}", "5", {})])[0].correct
    assert {v.status for v in verdicts} <= {Status.UNPARSABLE, Status.NO_ANSWER, Status.WRONG}, verdicts
    assert [v.status for v in verdicts[:4]] == [Status.UNPARSABLE] * 2 + [Status.NO_ANSWER, Status.UNPARSABLE]
    assert all(v.reward == 0.0 and (v.detail or v.status is Status.WRONG) for v in verdicts)
    assert seconds < 30


def test_a_slow_answer_times_out_alone(function: Callable[[str], FunctionJudge]) -> None:
    judge = function("""
        if completion == "slow":
            time.sleep(60)
        if completion == "loop":
            while True: pass
        return 1
    """)
    texts = ["a", "slow", "b", "loop", *"cdefghijkl"]
    with JudgePool(judge, workers=2, timeout_s=0.5) as pool:
        started = time.perf_counter()
        verdicts = pool.judge([(text, "", {}) for text in texts])
        seconds = time.perf_counter() - started
    assert [v.status for v in verdicts] == [Status.TIMEOUT if len(t) > 1 else Status.OK for t in texts]
    assert "0.5 s" in verdicts[1].detail
    assert seconds < 10


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_ask_the_run_to_stop_change_no_verdict(
    function: Callable[[str], FunctionJudge], signum: signal.Signals
) -> None:
    """A terminal and a scheduler send them to the whole group: a worker that obeyed would fail an innocent answer."""
    judge = function('answers.append(completion)\nreturn {"reward": 1, "parsed": len(answers)}')
    with JudgePool(judge, workers=1) as pool:
        pool.judge([("", "", {})])
        processes = descendants(os.getpid())
        assert len(processes) >= 2  # a worker and its supervisor
        for pid in processes:
            os.kill(pid, signum)
        time.sleep(0.2)
        (after,) = pool.judge([("", "", {})])
    assert after.correct and after.parsed == "2"  # the same worker


def test_processes_that_a_reward_forks_obey_sigterm(function: Callable[[str], FunctionJudge]) -> None:
    """multiprocessing.Pool ends its processes that way, and waits for them."""
    judge = function("""
        import signal
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"started")
            signal.pause()
        os.read(reading, 7)
        os.kill(child, signal.SIGTERM)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
    """)
    with JudgePool(judge, workers=1, timeout_s=10) as pool:
        (verdict,) = pool.judge([("", "", {})])
    assert verdict.correct, verdict


def test_a_dying_worker_fails_that_answer_alone(function: Callable[[str], FunctionJudge]) -> None:
    judge = function("""
        if completion == "exit": os._exit(3)
        if completion == "sys.exit": raise SystemExit(4)
        if completion == "segfault": os.kill(os.getpid(), 11)
        if completion == "memory": return len(bytearray(64 << 30))
        return 1
    """)
    texts = ["a", "exit", "b", "segfault", "c", "memory", "d", "sys.exit", "e"]
    with JudgePool(judge, workers=2) as pool:
        verdicts = pool.judge([(text, "", {}) for text in texts])
    by_text = dict(zip(texts, verdicts, strict=True))
    assert all(by_text[t].status is (Status.OK if len(t) == 1 else Status.ERROR) for t in texts)
    assert "exit code 3" in by_text["exit"].detail
    assert "SIGSEGV" in by_text["segfault"].detail
    assert "MemoryError" in by_text["memory"].detail
    assert "SystemExit" in by_text["sys.exit"].detail


def test_from_many_threads() -> None:
    results: dict[int, list[str | None]] = {}
    with JudgePool(MathJudge("hash"), workers=2) as pool:

        def work(thread: int) -> None:
            results[thread] = [v.parsed for v in pool.judge([(f"#### {thread}{i:03d}", "1", {}) for i in range(100)])]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == {n: [f"{n}{i:03d}" for i in range(100)] for n in range(1, 9)}


def test_math_verify_works_from_threads() -> None:
    found: list[Verdict] = []
    with JudgePool(MathJudge(), workers=1) as pool:
        thread = threading.Thread(target=lambda: found.extend(pool.judge([(r"\boxed{\sqrt{12}}", r"2\sqrt{3}", {})])))
        thread.start()
        thread.join(60)
    assert found and found[0].correct


def test_lone_surrogates_and_odd_fields_survive(function: Callable[[str], FunctionJudge]) -> None:
    judge = function("return {'reward': 1, 'parsed': completion + answer + fields['note'][0]}")
    with JudgePool(judge, workers=1) as pool:
        assert (
            pool.judge([("a\ud800", "\udfff\u2028", {"note": ["\ud83d", None, {"x": 1.5}]})])[0].parsed
            == "a\ud800\udfff\u2028\ud83d"
        )


def test_in_this_process() -> None:
    with JudgePool(MathJudge("hash"), workers=0) as pool:
        assert [v.correct for v in pool.judge([("#### 5", "5", {}), ("#### 5", "6", {})])] == [True, False]


@dataclass(frozen=True)
class Raises:
    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        raise ValueError("no good")


def test_a_raising_judge_is_an_error() -> None:
    assert JudgePool(Raises(), workers=0).judge([("", "", {})])[0].detail == "ValueError: no good"


def test_judges_that_cannot_travel() -> None:
    with pytest.raises(UserError, match="worker processes"):
        JudgePool(lambda completion, answer, fields: Verdict(1.0, Status.OK), workers=1)


def test_a_judge_that_breaks_in_the_worker_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion, answer): return 1")
    judge = FunctionJudge(f"{file}:reward")
    file.write_text("raise RuntimeError('changed my mind')")
    with JudgePool(judge, workers=2) as pool, pytest.raises(UserError, match="changed my mind"):
        pool.judge([("", "", {})] * 10)


@pytest.mark.parametrize("settings", [{"workers": -1}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        JudgePool(MathJudge(), **settings)


def test_closing() -> None:
    pool = JudgePool(MathJudge("hash"), workers=1)
    pool.judge([("#### 1", "1", {})])
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.judge([("#### 1", "1", {})])


def test_closing_while_a_thread_waits(function: Callable[[str], FunctionJudge]) -> None:
    pool = JudgePool(function("time.sleep(60)"), workers=1, timeout_s=50)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.judge([("", "", {})] * 9)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    pool.close()
    thread.join(10)
    assert not thread.is_alive() and "closed" in str(errors[0])


SCRIPT = """
import os, sys
from assay.rewards import JudgePool, FunctionJudge
print("script starts", flush=True)
pool = JudgePool(FunctionJudge(sys.argv[1]), workers=2)
print(all(v.correct for v in pool.judge([("", "", {})] * 20)), flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def run_script(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    (tmp_path / "mine.py").write_text(
        "import os, time\ndef reward(completion, answer):\n    time.sleep(0.02)\n    return 1"
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), f"{tmp_path / 'mine.py'}:reward", mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_plain_scripts_work_and_leave_no_workers(tmp_path: Path) -> None:
    """No `if __name__ == "__main__"`, and no close: the script runs once and its workers end with it."""
    script = run_script(tmp_path, "end")
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 0 and output.splitlines() == ["script starts", "True"]
    assert gone(str(tmp_path))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = run_script(tmp_path, "wait")
    assert script.stdout is not None and script.stdin is not None
    assert [script.stdout.readline() for _ in range(2)][1] == "True\n"
    processes = descendants(script.pid)
    assert len(processes) >= 4  # two workers with their supervisors
    script.send_signal(signal.SIGKILL)
    script.wait()
    assert ended(processes)
    script.stdin.close()
    script.stdout.close()


def test_verdicts_are_plain_data() -> None:
    verdict = MathJudge()(r"\boxed{5}", "5", {})
    assert pickle.loads(pickle.dumps(verdict)) == verdict
