"""Judging in worker processes, and the rewards of a model added to those of verifiers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_tree import descendants, gone
from stub_endpoint import Fault, message, stub_endpoint

from assay.config import JudgeConfig
from assay.rewards import CodeJudge, FunctionJudge, JudgePanel, JudgePool, MathJudge, RewardMix
from assay.rewards.model_judge import ModelJudge
from assay.rewards.pool import parse_verdict
from assay.system.spawn import BadMessage
from assay.types import Prompt, Status, UserError, Verdict


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


def test_verdicts_have_the_order_of_the_items() -> None:
    with JudgePool(MathJudge("hash"), workers=2) as pool:
        assert pool.judge([]) == []
        for size in (1, 3, 500):
            verdicts = pool.judge([(f"#### {i}", str(i if i % 3 else -i - 1), {}) for i in range(size)])
            assert [v.parsed for v in verdicts] == [str(i) for i in range(size)]
            assert [v.correct for v in verdicts] == [bool(i % 3) for i in range(size)]


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


def test_hostile_answers_are_rejected_by_their_size_not_by_the_time_limit() -> None:
    with JudgePool(MathJudge(), workers=2, timeout_s=30) as pool:
        verdicts = pool.judge([(text, "5", {}) for text in HOSTILE])
        assert pool.judge([(r"\boxed{5}", "5", {})])[0].correct
    assert {v.status for v in verdicts} <= {Status.UNPARSABLE, Status.NO_ANSWER, Status.WRONG}, verdicts
    assert [v.status for v in verdicts[:4]] == [Status.UNPARSABLE] * 2 + [Status.NO_ANSWER, Status.UNPARSABLE]
    assert all(v.reward == 0.0 and (v.detail or v.status is Status.WRONG) for v in verdicts)


def test_timeout_affects_only_its_item(function: Callable[[str], FunctionJudge]) -> None:
    judge = function("""
        if completion == "slow":
            time.sleep(60)
        if completion == "loop":
            while True: pass
        return 1
    """)
    texts = ["a", "slow", "b", "loop", *"cdefghijkl"]
    with JudgePool(judge, workers=2, timeout_s=0.5) as pool:
        verdicts = pool.judge([(text, "", {}) for text in texts])
    assert [v.status for v in verdicts] == [Status.TIMEOUT if len(t) > 1 else Status.OK for t in texts]
    assert "0.5 s" in verdicts[1].detail


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stop_signals_do_not_end_workers(function: Callable[[str], FunctionJudge], signum: signal.Signals) -> None:
    """A terminal or a scheduler sends them to all processes of a run."""
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


def test_processes_forked_by_rewards_receive_sigterm(function: Callable[[str], FunctionJudge]) -> None:
    """multiprocessing.Pool ends its processes with SIGTERM."""
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


def test_worker_that_dies_affects_only_its_item(function: Callable[[str], FunctionJudge]) -> None:
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


def test_pool_is_thread_safe() -> None:
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


def test_lone_surrogates_and_nested_fields_are_preserved(function: Callable[[str], FunctionJudge]) -> None:
    judge = function("return {'reward': 1, 'parsed': completion + answer + fields['note'][0]}")
    with JudgePool(judge, workers=1) as pool:
        assert (
            pool.judge([("a\ud800", "\udfff\u2028", {"note": ["\ud83d", None, {"x": 1.5}]})])[0].parsed
            == "a\ud800\udfff\u2028\ud83d"
        )


@pytest.mark.parametrize("settings", [{"workers": -1}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_invalid_pool_settings_and_judges_are_user_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        JudgePool(MathJudge(), **settings)
    lock = threading.Lock()
    with pytest.raises(UserError, match="worker processes"):
        JudgePool(lambda completion, answer, fields: Verdict(float(lock.locked()), Status.OK), workers=1)


def test_judging_on_the_nodes_of_ray_needs_workers_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"reward.pool = 'ray' needs judge processes .* set reward.workers to at least 1"
    ):
        JudgePool(MathJudge(), workers=0, pool="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"reward.pool = 'ray' needs the ray extra: "):
        JudgePool(MathJudge(), workers=1, pool="ray")


def test_judging_on_the_nodes_of_ray_without_a_cluster_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, say: Any) -> None:
        assert address == "auto"
        raise UserError("for cluster.kind") from ConnectionError("no cluster\nis running")

    monkeypatch.delenv("ASSAY_RAY", raising=False)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr("assay.integrations.ray.judges.connect", refuse)
    with pytest.raises(UserError) as raised:
        JudgePool(MathJudge(), workers=1, pool="ray")
    assert str(raised.value) == (
        "reward.pool = 'ray' finds no Ray cluster (ConnectionError: no cluster is running): start one with "
        "`ray start --head`, set RAY_ADDRESS, or set reward.pool = 'local'"
    )


def test_judge_that_cannot_be_loaded_in_the_worker_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion, answer): return 1")
    judge = FunctionJudge(f"{file}:reward")
    file.write_text("raise RuntimeError('no longer valid')")
    with JudgePool(judge, workers=2) as pool, pytest.raises(UserError, match="no longer valid"):
        pool.judge([("", "", {})] * 10)


def test_close_fails_waiting_calls(function: Callable[[str], FunctionJudge]) -> None:
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
    for _ in range(2):
        pool.close()
    thread.join(10)
    assert not thread.is_alive() and "closed" in str(errors[0])
    with pytest.raises(RuntimeError, match="closed"):
        pool.judge([("", "", {})])


SCRIPT = """
import os, sys
from assay.rewards import JudgePool, FunctionJudge
print("script starts", flush=True)
pool = JudgePool(FunctionJudge(sys.argv[1]), workers=2)
print(all(v.correct for v in pool.judge([("", "", {})] * 20)), flush=True)
"""


def test_scripts_need_no_main_guard_and_leave_no_workers(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__"` and close(), the script runs once and its workers end with it."""
    (tmp_path / "mine.py").write_text("import time\ndef reward(c, a):\n    time.sleep(0.02)\n    return 1")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), f"{tmp_path / 'mine.py'}:reward"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["script starts", "True"]
    assert gone(str(tmp_path))


VALID = {"reward": 1.0, "status": "ok", "parsed": None, "parts": {"accuracy": 1.0}, "detail": ""}


@pytest.mark.parametrize(
    "change",
    [
        *({"reward": value} for value in (float("nan"), "1", 1)),
        *(
            {"status": "splendid"},
            {"status": []},
            {"parts": [1.0]},
            {"parts": {"a": "b"}},
            {"detail": 1},
            {"parsed": 5},
        ),
        None,
    ],
)
def test_invalid_verdict_messages_are_rejected(change: dict[str, Any] | None) -> None:
    with pytest.raises(BadMessage):
        parse_verdict(change if change is None else VALID | change)


def test_the_time_limit_of_programs_must_fit_into_that_of_judging():
    code = CodeJudge(timeout_s=4.0)
    for judge in (code, RewardMix(code), RewardMix(MathJudge(), others=(code,))):
        with pytest.raises(UserError, match=r"at least 6 s, not 5: raise reward\.timeout_s") as raised:
            JudgePool(judge, workers=1, timeout_s=5.0)
        assert "\n" not in str(raised.value)
        JudgePool(judge, workers=1, timeout_s=6.0).close()
        JudgePool(judge, workers=0, timeout_s=5.0).close()  # has no time limit


PROMPT = Prompt("p", ({"role": "user", "content": "2 + 2?"},), "4")


def reply(body: dict[str, Any]) -> Any:
    text = body["messages"][0]["content"].partition("<answer>")[2]
    return Fault(400, message("no")) if "fail" in text else "5" if "nice" in text else "2"


def judged(texts: list[str], panel: Callable[[ModelJudge], JudgePanel]) -> list[Verdict]:
    with stub_endpoint(reply) as server:
        model = ModelJudge(JudgeConfig(url=server.url, model="m", rubric="Be nice.", cache="", retries=0))
        with panel(model) as judges:
            (verdicts,) = judges.judge_groups([(texts, PROMPT.answer, judges.fields(PROMPT))])
            alone = judges.judge([(text, PROMPT.answer, judges.fields(PROMPT)) for text in texts])
            for single, grouped in zip(alone, verdicts, strict=True):
                assert single == grouped if single.status is not Status.ERROR else single.reward == 0.0
            return verdicts


def verifiers(weight: float = 1.0) -> JudgePool:
    judge = RewardMix(MathJudge("hash"), wrong=-1.0, weights=(weight,), names=("task",))
    return JudgePool(judge, workers=0)


def test_the_verifier_decides_the_status_and_the_model_adds_to_the_reward() -> None:
    texts = ["nice #### 4", "rude #### 4", "nice #### 5", "fail #### 4"]
    right, rude, wrong, failed = judged(texts, lambda model: JudgePanel(model, 0.5, verifiers(2.0)))
    assert (right.reward, rude.reward, wrong.reward) == (2 + 0.5, 2 + 0.5 * 0.25, -2 + 0.5)
    assert [v.status for v in (right, rude, wrong)] == [Status.OK, Status.OK, Status.WRONG]
    assert right.parsed == "4" and (right.parts["task"], right.parts["judge"], right.parts["score"]) == (1, 1, 5)
    assert failed.status is Status.ERROR and failed.detail.startswith("judge: ") and "judge" not in failed.parts
    assert failed.parts["task"] == 1.0
    assert failed.reward == 0.0  # which no rollout is trained with


class BrokenJudge:
    def __call__(self, completion: str, answer: str, fields: Any) -> Verdict:
        raise ValueError("boom")


def test_a_verifier_that_fails_is_a_status() -> None:
    (verdict,) = judged(["nice"], lambda model: JudgePanel(model, 1.0, JudgePool(BrokenJudge(), workers=0)))
    assert verdict.status is Status.ERROR and "boom" in verdict.detail and verdict.reward == 0.0
