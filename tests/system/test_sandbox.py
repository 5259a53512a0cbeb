"""Attacks on sandboxed workers: by code that a reward function runs, and by messages that it forges."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process_tree import alive, descendants, gone, started, zombies

from assay.rewards import FunctionJudge, JudgePool, MathJudge, RewardMix, latex
from assay.rewards.pool import is_user_code, level_for
from assay.system import spawn
from assay.system.sandbox import environment
from assay.system.worker_pool import SUPPORT
from assay.types import Status, UserError, Verdict

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux isolates processes; other systems kill groups")

Reward = Callable[[str], FunctionJudge]


@pytest.fixture
def reward(tmp_path: Path) -> Reward:
    def judge(code: str) -> FunctionJudge:
        file = tmp_path / "mine.py"
        body = textwrap.indent(textwrap.dedent(code), "    ")
        file.write_text(f"import os, signal, subprocess, sys, time\ndef reward(completion, answer, **fields):\n{body}")
        return FunctionJudge(f"{file}:reward")

    return judge


def judge_one(judge: Any, completion: str = "", **settings: Any) -> Verdict:
    with JudgePool(judge, workers=1, **settings) as pool:
        return pool.judge([(completion, "", {})])[0]


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for the command lines of processes that a test starts; those that are left afterwards are killed."""
    word = f"sandboxtest{os.getpid()}x{time.monotonic_ns()}"
    yield word
    for pid in alive(word):
        os.kill(pid, signal.SIGKILL)


SLEEPERS = """
sleeper = [sys.executable, "-c", "import time; time.sleep(300)", {mark!r}]
subprocess.Popen(sleeper)
subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:  # a daemon: in its own session, adopted by another process
    os.setsid()
    if os.fork() == 0:
        os.execv(sleeper[0], sleeper)
    os._exit(0)
os.wait()
open(fields["ready"], "w").close()
"""


@linux
@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_closing_the_pool_kills_processes_that_rewards_started(
    reward: Reward, mark: str, sandbox: Any, tmp_path: Path
) -> None:
    judge = reward(SLEEPERS.format(mark=mark) + "return 1")
    with JudgePool(judge, workers=1, timeout_s=60.0, sandbox=sandbox) as pool:
        assert pool.judge([("", "", {"ready": str(tmp_path / "ready")})])[0].correct
        assert started(mark, 3)
    assert gone(mark)
    assert not zombies()


SCRIPT = """
import os, sys
from assay.rewards import FunctionJudge, JudgePool
pool = JudgePool(FunctionJudge(sys.argv[1]), workers=1, timeout_s=60.0, sandbox=sys.argv[3])
print(pool.judge([("", "", {"ready": sys.argv[2]})])[0].status, flush=True)
if sys.argv[4] == "wait":
    sys.stdin.read()
"""


@linux
@pytest.mark.parametrize(("sandbox", "how"), [("auto", "killed"), ("off", "exits")])
def test_end_of_the_parent_kills_processes_that_rewards_started(
    reward: Reward, mark: str, tmp_path: Path, sandbox: str, how: str
) -> None:
    judge = reward(SLEEPERS.format(mark=mark) + "return 1")
    mode = "wait" if how == "killed" else "end"
    command = [sys.executable, "-c", SCRIPT, judge.path, str(tmp_path / "ready"), sandbox, mode]
    script = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None and script.stdin is not None
    assert script.stdout.readline().strip() == "ok"
    if how == "killed":
        assert started(mark, 3)
        script.kill()
    script.wait(30)
    assert gone(mark)
    script.stdin.close()
    script.stdout.close()


def test_item_of_a_worker_that_was_killed_is_judged_again(reward: Reward, tmp_path: Path) -> None:
    """As the kernel's out-of-memory killer does."""
    flag = tmp_path / "flag"
    judge = reward(f"""
        if completion == "victim" and not os.path.exists({str(flag)!r}):
            open({str(flag)!r}, "w").close()
            time.sleep(60)
        return 1
    """)
    others = set(descendants(os.getpid()))  # of other tests
    with JudgePool(judge, workers=1, timeout_s=40.0) as pool:
        verdicts: list[Verdict] = []
        items: list[Any] = [(text, "", {}) for text in ("a", "victim", "b", "c")]
        thread = threading.Thread(target=lambda: verdicts.extend(pool.judge(items)))
        thread.start()
        while not flag.exists():
            time.sleep(0.02)
        os.kill([pid for pid in descendants(os.getpid()) if pid not in others][-1], signal.SIGKILL)
        thread.join(60)
    assert [v.status for v in verdicts] == [Status.OK] * 4


FORGED = {
    "framed pickle": "frame(pickle.dumps(Evil()))",
    "other index": "result(999, 'x')",
    "NaN reward": "verdict(reward=float('nan'))",
    "second start": 'frame(b\'{"kind": "ready", "missing": []}\')',
    "resumed first": 'frame(b\'{"kind": "resumed"}\')',
    "clock stopped twice": 'frame(b\'{"kind": "paused"}\') * 2',
    "many verdicts": "verdict() * 50",
}


def test_forged_messages_never_run_code_or_affect_other_items(reward: Reward, tmp_path: Path) -> None:
    """Code in the worker writes to every descriptor; the parent must not trust it."""
    proof = tmp_path / "proof"
    judge = reward(f"""
        import json, pickle, struct
        class Evil:
            def __reduce__(self): return os.system, ("touch {proof}",)
        def frame(payload): return struct.pack("<Q", len(payload)) + payload
        def verdict(**changed):
            value = dict(reward=1.0, status="ok", parsed=None, parts={{}}, detail="forged") | changed
            return result(index, value)
        def result(index, value):
            return frame(json.dumps(dict(kind="result", index=index, value=value)).encode())
        index = fields["index"]
        if completion:
            message = eval(completion)
            for descriptor in range(3, 64):
                try: os.write(descriptor, message)
                except OSError: pass
        return {{"reward": 0.5, "detail": "honest"}}
    """)
    texts = ["", *(text for forged in FORGED.values() for text in (forged, ""))]
    with JudgePool(judge, workers=1, timeout_s=20.0) as pool:
        verdicts = pool.judge([(text, "", {"index": index}) for index, text in enumerate(texts)])
    assert not proof.exists()
    assert {(verdict.reward, verdict.detail) for verdict in verdicts[::2]} == {(0.5, "honest")}
    for name, verdict in zip(FORGED, verdicts[1::2], strict=True):
        if name != "many verdicts":  # the first one cannot be distinguished from a true one
            assert verdict.status is Status.ERROR and "invalid message" in verdict.detail, name


def test_limits_of_rewards_and_what_their_programs_inherit(reward: Reward, tmp_path: Path) -> None:
    """In one worker, because starting workers takes most of the time."""
    judge = reward(f"""
        import resource
        if completion == "not finite":
            return {{"reward": 1, "parts": {{"a": float("nan"), "b": float("-inf")}}}}
        if completion == "limits":
            kinds = ("CPU", "CORE", "NPROC")
            limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + kind))[0] for kind in kinds]
            return {{"reward": 1, "parts": dict(zip(kinds, limits))}}
        if completion == "pipes":
            listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False)
            return {{"reward": 1, "parsed": listed.stdout}}
        with open({str(tmp_path / "big")!r}, "wb") as file:
            file.seek(5 << 30)
            file.write(b"x")
        return 1
    """)
    with JudgePool(judge, workers=1, timeout_s=30.0) as pool:
        odd, limits, pipes, big = pool.judge([(one, "", {}) for one in ("not finite", "limits", "pipes", "big")])
    assert str(odd.parts) == "{'a': nan, 'b': -inf}"
    assert 0 < limits.parts["CPU"] < 10_000 and limits.parts["CORE"] == 0 and 0 < limits.parts["NPROC"] < 1_000_000
    assert "File too large" in big.detail
    if sys.platform == "linux":
        listing = pipes.parsed or ""
        open_pipes = [line.split("->")[0].split()[-1] for line in listing.splitlines() if "pipe:" in line]
        assert open_pipes and set(open_pipes) <= {"1", "2"}, listing  # stdout of `run`, and stderr
    assert "File too large" not in judge_one(judge, sandbox="off").detail
    (tmp_path / "big").unlink(missing_ok=True)


READ_TOKEN = """
    seen = dict(os.environ)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try: seen[name] = open(f"/proc/{name}/environ", errors="replace").read()
        except OSError: pass
    return {"reward": 1, "parsed": str([name for name, value in seen.items() if "s3cret" in value])}
"""


@linux
def test_rewards_cannot_read_tokens_of_the_parent(reward: Reward) -> None:
    judge = reward(READ_TOKEN)
    script = textwrap.dedent("""
        import sys
        from assay.rewards import FunctionJudge, JudgePool
        with JudgePool(FunctionJudge(sys.argv[1]), workers=1, timeout_s=30.0, pass_env=sys.argv[2:]) as pool:
            print(pool.judge([("", "", {})])[0].parsed)
    """)
    command = [sys.executable, "-c", script, judge.path]
    secrets = {"HF_TOKEN": "s3cret", "MY_OTHER": "s3cret too"}
    run = subprocess.run(command, env={**os.environ, **secrets}, capture_output=True, text=True, timeout=60)
    if "without a process namespace" in run.stderr:
        pytest.skip("no process namespaces on this system: /proc shows the parent's environment")
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
    run = subprocess.run([*command, "MY_OTHER"], env={**os.environ, **secrets}, capture_output=True, text=True)
    assert "MY_OTHER" in run.stdout and "HF_TOKEN" not in run.stdout


def test_error_for_a_missing_variable_names_pass_env(reward: Reward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    judge = reward("return float(os.environ['MY_API_KEY'] == 's3cret')")
    verdict = judge_one(judge)
    assert verdict.status is Status.ERROR and 'reward.pass_env = ["MY_API_KEY"]' in verdict.detail
    assert judge_one(judge, pass_env=["MY_API_KEY"]).correct
    assert judge_one(judge, sandbox="off").correct


def test_pass_env_of_an_unset_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    with pytest.raises(UserError, match="NOT_SET_ANYWHERE"):
        JudgePool(MathJudge(), pass_env=["NOT_SET_ANYWHERE"])


def test_environment_of_workers_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for level in ("strict", "basic"):
        passed = environment(level, [])
        assert "s3cret" not in str(passed) and passed["LC_ALL"] == "C.UTF-8" and passed["PATH"] == os.environ["PATH"]
        assert passed["PYTHONHASHSEED"] == "0"  # sets of strings have the same order in every worker
    assert environment("strict", [])["HOME"] == "/"


ATTACKS = {
    "network": """
        import socket
        socket.create_connection(("127.0.0.1", int(answer)), 5)
    """,
    "unix socket": """
        import socket
        socket.socket(socket.AF_UNIX).connect(answer)
    """,
    "write": "open(answer + '/written', 'w').write('x')",
    "append": "open(answer + '/there', 'a').write('x')",
    "truncate": "os.truncate(answer + '/there', 0)",
    "delete": "os.remove(answer + '/there')",
    "rename": "os.rename(answer + '/there', answer + '/moved')",
    "mkdir": "os.mkdir(answer + '/made')",
    "link": "os.symlink('/etc/passwd', answer + '/link')",
    "chmod": "os.chmod(answer + '/there', 0o777)",
    "touch": "os.utime(answer + '/there', (1, 1))",
    "program": "subprocess.run(['true'])",
    "fork": "os.fork() or os._exit(0)",
    "exec": "os.execv('/bin/true', ['true'])",
    "kill": "os.kill(1, 0)",
    "kill all": "os.kill(-1, 0)",
    "parent": "os.kill(os.getppid(), 0)",
    "read secret": "open(answer + '/there').read()",
    "list files": "os.listdir(answer)",
    "passwords": "open('/etc/passwd').read()",
    "other environments": "open('/proc/1/environ').read()",
    "memory of others": "open('/proc/1/mem', 'rb').read(1)",
    "namespace": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x10000000): raise PermissionError(ctypes.get_errno(), "Permission denied")
    """,
    "trace": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, os.getppid(), 0, 0): raise PermissionError(ctypes.get_errno(), "Permission denied")
    """,
    "io_uring": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(425, 8, ctypes.create_string_buffer(200)) < 0: raise PermissionError("Permission denied")
    """,
}


def files_in(folder: Path) -> dict[str, tuple[float, str]]:
    return {path.name: (path.stat().st_mtime, path.read_text() if path.is_file() else "") for path in folder.iterdir()}


@linux
def test_strict_sandbox_refuses_attacks_which_change_nothing(tmp_path: Path) -> None:
    """All attacks run in one worker: a refused attack leaves it running."""
    folder, code = tmp_path / "private", tmp_path / "code" / "attacks.py"
    for own in (folder, code.parent):
        own.mkdir()
    (folder / "there").write_text("secret")
    os.utime(folder / "there", (1000, 1000))
    functions = [textwrap.indent(textwrap.dedent(attack), "        ") for attack in ATTACKS.values()]
    cases = "".join(f"    if completion == {name!r}:\n{body}\n" for name, body in zip(ATTACKS, functions, strict=True))
    code.write_text(f"import os, subprocess\ndef reward(completion, answer):\n{cases}    return 1")
    with pytest.MonkeyPatch.context() as patch, socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        patch.setattr(sys, "path", [path for path in sys.path if not folder.is_relative_to(path or os.getcwd())])
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind(str(folder / "socket"))
        local.listen()
        answers = {"network": str(server.getsockname()[1]), "unix socket": str(folder / "socket")}
        before = files_in(folder)
        judge = FunctionJudge(f"{code}:reward")
        with warnings.catch_warnings(record=True), JudgePool(judge, 1, timeout_s=30.0, sandbox="strict") as pool:
            verdicts = pool.judge([(name, answers.get(name, str(folder)), {}) for name in ATTACKS])
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # nothing has connected
            server.accept()
    assert files_in(folder) == before
    for name, verdict in zip(ATTACKS, verdicts, strict=True):
        assert verdict.status is Status.ERROR and "PermissionError" in verdict.detail, (name, verdict)
        assert "reward.sandbox" in verdict.detail


def test_basic_sandbox_allows_files_network_and_programs(reward: Reward, tmp_path: Path) -> None:
    judge = reward("""
        import socket, threading
        socket.create_connection(("127.0.0.1", int(answer)), 5).close()
        said = subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout
        open(fields["folder"] + "/out", "w").write(said)
        thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
        return float(open(fields["folder"] + "/out").read() == "hi\\n" and os.getuid() == fields["user"])
    """)
    with socket.socket() as server, JudgePool(judge, workers=1, timeout_s=30.0) as pool:
        server.bind(("127.0.0.1", 0))
        server.listen()
        fields = {"folder": str(tmp_path), "user": os.getuid()}
        verdict = pool.judge([("", str(server.getsockname()[1]), fields)])[0]
    assert verdict.correct, verdict


@linux
def test_rewards_in_a_namespace_cannot_signal_the_parent(reward: Reward) -> None:
    judge = reward("os.kill(fields['parent'], 0)\nreturn 1")
    with warnings.catch_warnings(record=True) as caught, JudgePool(judge, workers=1) as pool:
        verdict = pool.judge([("", "", {"parent": os.getpid()})])[0]
    if any("process namespace" in str(warning.message) for warning in caught):
        pytest.skip("no process namespaces on this system")
    assert "ProcessLookupError" in verdict.detail


@dataclass(frozen=True)
class OwnJudge:
    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return Verdict(float("nan") if completion == "nan" else 1.0, Status.OK, parsed=completion)


def test_level_is_strict_for_our_judges_and_basic_for_user_code(reward: Reward) -> None:
    own = [OwnJudge(), reward("return 1"), RewardMix(reward("return 1")), RewardMix(OwnJudge())]
    assert all(is_user_code(judge) and level_for(judge, "auto") == "basic" for judge in own)
    assert not is_user_code(RewardMix(MathJudge())) and level_for(RewardMix(MathJudge()), "auto") == "strict"
    assert level_for(OwnJudge(), "strict") == "strict" and level_for(MathJudge(), "off") == "off"


def test_verdicts_that_cannot_be_encoded_are_errors() -> None:
    with JudgePool(OwnJudge(), workers=1, timeout_s=30.0) as pool:
        verdicts = pool.judge([("nan", "", {}), ("x" * (17 << 20), "", {}), ("fine", "", {})])
    assert [v.status for v in verdicts] == [Status.ERROR, Status.ERROR, Status.OK]
    assert "nan" in verdicts[0].detail and "16 MiB" in verdicts[1].detail


def test_output_of_rewards_reaches_stderr_which_they_cannot_truncate(reward: Reward, tmp_path: Path) -> None:
    judge = reward("""
        print("from stdout"); print("from stderr", file=sys.stderr, flush=True); sys.stdout.flush()
        try: os.ftruncate(2, 0)
        except OSError: pass
        return 1
    """)
    log = tmp_path / "log"
    log.write_text("earlier lines\n")
    script = textwrap.dedent("""
        import sys
        from assay.rewards import FunctionJudge, JudgePool
        with JudgePool(FunctionJudge(sys.argv[1]), 1, 30.0) as pool:
            pool.judge([("", "", {})])
    """)
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", script, judge.path], stderr=file, check=True, timeout=60)
    assert log.read_text() == "earlier lines\nfrom stdout\nfrom stderr\n"


REFUSED = """
import sys
from assay.system import isolation
isolation.install_filter(isolation._refusals(("unshare",)))  # as container runtimes do it
from assay.rewards import FunctionJudge, JudgePool, MathJudge
for judge in (FunctionJudge(sys.argv[1]), MathJudge("hash")):
    with JudgePool(judge, workers=2, timeout_s=10.0) as pool:
        print([str(v.status) for v in pool.judge([("#### 1", "1", {"ready": sys.argv[2]})] * 2)])
"""


@linux
def test_refused_namespaces_give_one_warning_and_processes_still_end(reward: Reward, mark: str, tmp_path: Path) -> None:
    judge = reward(SLEEPERS.format(mark=mark) + "if completion: return 1")
    command = [sys.executable, "-c", REFUSED, judge.path, str(tmp_path / "ready")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines() == ["['ok', 'ok']"] * 2, run.stdout + run.stderr
    warned = [line for line in run.stderr.splitlines() if "process namespace" in line]
    assert len(warned) == 2 and "basic" in warned[0] and "strict" in warned[1], run.stderr
    assert gone(mark)


@linux
def test_nothing_is_left_of_a_worker_that_stops_its_supervisor(
    reward: Reward, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a PID namespace it can do so."""
    monkeypatch.setattr(SUPPORT, "namespaces_refused", "as in many containers")
    monkeypatch.setattr(SUPPORT, "warn_missing", lambda *_: None)
    monkeypatch.setattr(spawn, "KILL_LIMIT_S", -0.9)  # the supervisor is given one second more
    judge = reward(SLEEPERS.format(mark=mark) + "os.kill(os.getppid(), signal.SIGSTOP)\nreturn 1")
    with JudgePool(judge, workers=1, timeout_s=30.0) as pool:
        assert pool.judge([("", "", {"ready": str(tmp_path / "ready")})])[0].correct
    assert gone(mark, within=2.0)


@linux
def test_number_of_processes_per_namespace_is_limited(reward: Reward) -> None:
    """Also for root, to whom RLIMIT_NPROC does not apply."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 14):
        pytest.skip("this kernel has only a limit for the whole machine")
    machine = Path("/proc/sys/kernel/pid_max").read_text()
    with warnings.catch_warnings(record=True) as caught:
        verdict = judge_one(reward("return {'reward': 1, 'parsed': open('/proc/sys/kernel/pid_max').read()}"))
    if any("process namespace" in str(warning.message) for warning in caught):
        pytest.skip("no process namespaces on this system")
    assert int(verdict.parsed or 0) == 1024
    assert Path("/proc/sys/kernel/pid_max").read_text() == machine


def test_strict_sandbox_needs_worker_processes() -> None:
    with pytest.raises(UserError, match="workers"):
        JudgePool(MathJudge(), workers=0, sandbox="strict")


def test_bytecode_of_libraries_is_cached_before_confinement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(latex, "_library", lambda: imported.append("math_verify"))
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    for ignored in (True, False):  # no cache is written if the user does not want it
        monkeypatch.setattr(sys, "dont_write_bytecode", ignored)
        MathJudge("hash").prepare()
        assert bool(imported) is not ignored
