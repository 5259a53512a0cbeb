"""Judging on the nodes of a real Ray cluster on this machine, whose actors and nodes are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from process_tree import descendants, ended, table
from ray_nodes import KEY, SECRET, Nodes
from small_run import SmallRuns
from waiting import until

from assay.integrations.ray import judges as module
from assay.integrations.ray.cluster import connect, hosted_program
from assay.integrations.ray.judges import ClusterPool
from assay.rewards import FunctionJudge, JudgePool, MathJudge, RewardMix
from assay.rewards.functions import register_function
from assay.rewards.judge import judged_fields
from assay.tasks.registry import make_task
from assay.types import Prompt, Status, UserError, Verdict

pytestmark = pytest.mark.ray
ray: Any = pytest.importorskip("ray", reason="needs the package ray")

CODE = """
import asyncio, os, time
def reward(completion, answer, **fields):
    if completion == "slow": time.sleep(60)
    if completion == "exit": os._exit(3)
    if completion == "segfault": os.kill(os.getpid(), 11)
    if completion == "raise": raise KeyError("no")
    if completion == "nan": return float("nan")
    if completion == "sys.exit": raise SystemExit(4)
    if completion == "key": return os.environ["ASSAY_TEST_JUDGE_KEY"] == fields["key"]
    return {"reward": len(completion) / 10, "parsed": completion, "parts": {"level": fields.get("level", 0.5)}}
async def waits(completion, answer):
    await asyncio.sleep(0.01)
    return float(completion == answer)
def group(completions, prompts, **columns):
    return [len(set(completions)) / 10 if text != "none" else None for text in completions]
def log(completion, answer):
    with open(os.path.join(os.path.dirname(__file__), "log"), "a") as file:
        file.write(completion + "\\n")
    time.sleep(0.02)
    return {"reward": int(completion) % 7 / 7, "parsed": completion}
def supervisor(completion, answer):
    time.sleep(0.05)
    return {"reward": 1, "parsed": os.environ["PLACE"]}
def prints(completion, answer):
    print("judged", completion)
    return 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def small_runs(tmp_path: Path) -> SmallRuns:
    return SmallRuns(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.2)


def test_files_reach_a_node_through_the_object_store(nodes: Nodes, tmp_path: Path) -> None:
    connect("auto")
    content, folder = os.urandom(3 << 20), tmp_path / "weights"
    actor = hosted_program("copy", num_cpus=1)  # on a node that is not the driver's
    ray.get(actor.write.remote(str(folder), {"model.safetensors": ray.put(content)}))
    assert (folder / "model.safetensors").read_bytes() == content
    ray.get(actor.remove.remote(str(folder)))
    assert not folder.exists()
    ray.kill(actor)


@pytest.mark.parametrize("way", ["ended", "killed"])
def test_what_a_program_has_started_ends_with_its_actor(nodes: Nodes, tmp_path: Path, way: str) -> None:
    """vLLM starts processes that do not end when the server is killed."""
    connect("auto")
    actor = hosted_program("parent", num_cpus=1)
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(f'{{os.getppid()}} {{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pids')!r})\n"
        "time.sleep(600)"
    )
    ray.get(actor.start.remote([sys.executable, "-c", code], {}))
    until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if way == "ended":
        ray.kill(actor)
    else:
        parent, _, _ = table()[pids[0]]  # of the supervisor: the process of the actor
        os.kill(parent, signal.SIGKILL)
    assert ended(pids)


def on_nodes(judge: Any, workers: int = 1, **settings: Any) -> tuple[JudgePool, ClusterPool[list[Verdict]]]:
    pool = JudgePool(judge, workers, pool="ray", **settings)
    inner: Any = pool._pool
    assert isinstance(inner, ClusterPool)
    return pool, inner


def equal_on_nodes(judge: Any, items: list[Any], **settings: Any) -> list[list[Verdict]]:
    with JudgePool(judge, 2, **settings) as local:
        expected = local.judge_groups(items)
    pool, inner = on_nodes(judge, **settings)
    with pool:
        assert pool.judge_groups(items) == expected
        if len(items) > 1:
            assert len(inner._actors) == 2 and all(actor.total for actor in inner._actors.values())
    return expected


@pytest.mark.parametrize("name", ["abacus", "countdown", "code", "math"])
def test_verdicts_of_builtin_judges_equal_those_of_the_local_pool(nodes: Nodes, name: str) -> None:
    """Correct, wrong, unreadable and missing answers."""
    if name == "math":
        judge, prompts = RewardMix(MathJudge(), wrong=-1.0, format=0.5), [Prompt("p", (), r"\frac{1}{2}")]
        texts = [r"\boxed{0.5}", r"\boxed{\sqrt{2}}", r"\boxed{" + "(" * 999 + "}", "#### 1/2"]
    else:
        task = make_task(name)
        judge, prompts = task.judge(), task.prompts("test")[:4]
        texts = [task.gold_completion(prompts[0]), "\\boxed{", "```python\nraise\n```", ""]
    items = [([text], p.answer, judged_fields(judge, p)) for p in prompts for text in texts * 2]
    settings = {"timeout_s": 30.0} if name == "code" else {}
    verdicts = equal_on_nodes(judge, items, **settings)
    assert verdicts[0][0].status is Status.OK and len({verdict.status for (verdict,) in verdicts}) > 1


def test_failures_and_order_equal_those_of_the_local_pool(nodes: Nodes, file: Path) -> None:
    special = ["slow", "exit", "segfault", "raise", "nan", "sys.exit"]
    texts = [special[i // 20] if i % 20 == 0 else "x" * (i % 9) for i in range(len(special) * 20)]
    judged = equal_on_nodes(FunctionJudge(f"{file}:reward"), [([t], "", {"level": 2.0}) for t in texts], timeout_s=1.0)
    found = {text: verdict for text, (verdict,) in zip(texts, judged, strict=True)}
    assert found["slow"].status is Status.TIMEOUT and "1 s" in found["slow"].detail
    assert {found[text].status for text in special[1:]} == {Status.ERROR} and "exit code 3" in found["exit"].detail


def test_groups_async_functions_and_code_sent_by_value(nodes: Nodes, file: Path) -> None:
    groups = [(["a", "b", "none"], "a", {}), (["a", "a"], "b", {})] * 9
    equal_on_nodes(FunctionJudge(f"{file}:group"), groups)
    equal_on_nodes(FunctionJudge(f"{file}:waits"), groups)
    offset = 0.25
    equal_on_nodes(FunctionJudge(register_function(lambda completion, answer: len(completion) * offset)), groups)


def pids(pool: ClusterPool[Any]) -> list[int]:
    """The processes of the actors."""
    actors = [actor.actor for actor in pool._actors.values()]
    return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors])


def kill(pool: ClusterPool[Any], number: int) -> None:
    os.kill(pids(pool)[number], signal.SIGKILL)


def test_lost_actors_and_nodes_cost_retries_and_no_answers(nodes: Nodes, file: Path) -> None:
    extra = nodes.add()
    pool, inner = on_nodes(FunctionJudge(f"{file}:log"))
    log = file.with_name("log")
    log.write_text("")

    def lines() -> list[str]:
        return log.read_text().splitlines()

    def faults() -> None:
        until(lambda: len(lines()) > 60)
        kill(inner, [node != extra.node_id for node in inner._actors].index(True))
        until(lambda: len(lines()) > 200 and inner._actors[extra.node_id].in_flight > 0)
        nodes.cluster.remove_node(extra, allow_graceful=False)

    verdicts: list[Verdict] = []
    thread = threading.Thread(target=faults)
    with pool, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool.judge([("0", "", {})] * 3)
        thread.start()
        verdicts = pool.judge([(str(i), "", {}) for i in range(1, 1201)])
        thread.join()
        assert sum(actor.ready for actor in inner._actors.values()) == 2
    assert [(v.parsed, v.reward) for v in verdicts] == [(str(i), i % 7 / 7) for i in range(1, 1201)]
    lost = [str(w.message) for w in caught if "judge actor is lost" in str(w.message)]
    assert len(lost) == 2, lost
    again = Counter(lines()) - Counter(map(str, range(1, 1201)))
    assert 0 < again.total() - 3 <= 2 * module.IN_FLIGHT * 100  # of batches that were in flight, and "0" three times


def test_nodes_that_join_later_judge_and_the_load_is_spread(nodes: Nodes, file: Path) -> None:
    pool, inner = on_nodes(FunctionJudge(f"{file}:supervisor"), sandbox="off")
    with pool:
        places = {v.parsed for v in pool.judge([("", "", {})] * 40)}
        before = {actor.node: actor.total for actor in inner._actors.values()}
        assert len(places) == 2 and max(before.values()) - min(before.values()) <= 2
        joined = nodes.add()
        try:
            until(lambda: len({v.parsed for v in pool.judge([("", "", {})] * 40)}) == 3)
        finally:
            nodes.cluster.remove_node(joined)
    until(lambda: len(module.nodes()) == 3)


def test_back_pressure_bounds_the_batches_of_every_node(
    nodes: Nodes, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    judged: list[list[Verdict]] = []
    reserve = ClusterPool._reserve

    def noting(self: Any, wait: bool) -> Any:
        actor = reserve(self, wait)
        seen.extend(actor.in_flight for actor in self._actors.values())
        return actor

    monkeypatch.setattr(ClusterPool, "_reserve", noting)
    pool, inner = on_nodes(FunctionJudge(f"{file}:log"))
    with pool:
        items = [(str(i), "", {}) for i in range(200)]
        threads = [threading.Thread(target=lambda: judged.append(pool.judge(items))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [actor.in_flight for actor in inner._actors.values()] == [0, 0]
    assert max(seen) == module.IN_FLIGHT
    assert [[v.parsed for v in verdicts] for verdicts in judged] == [[str(i) for i in range(200)]] * 4


def test_values_of_environment_variables_are_not_sent(
    nodes: Nodes, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of this process would be found if it were sent; the nodes have one of their own."""
    from ray._private.serialization import SerializationContext

    other = "secret-of-the-driver"
    monkeypatch.setenv(KEY, other)
    sent: list[bytes] = []
    serialize = SerializationContext.serialize

    def noting(self: Any, value: Any) -> Any:
        sent.append(cloudpickle.dumps(value))
        return serialize(self, value)

    monkeypatch.setattr(SerializationContext, "serialize", noting)
    pool, inner = on_nodes(FunctionJudge(f"{file}:reward"), pass_env=[KEY])
    assert other in str(pool._settings.environment)
    with pool:
        assert all(v.reward == 1.0 for v in pool.judge([("key", "", {"key": SECRET})] * 20))
    assert sent and any(KEY.encode() in data for data in sent)
    assert not any(other.encode() in data for data in [*sent, cloudpickle.dumps(inner._arguments)])
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert texts and not [path for path, text in texts.items() if other.encode() in text or SECRET.encode() in text]


@pytest.fixture
def joins(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Adds a node to the cluster until the end of the test."""
    added = []
    (tmp_path / "assay").mkdir()
    (tmp_path / "assay" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'assay'\")")

    def join(**variables: str) -> None:
        if "PYTHONPATH" in variables:  # without assay, which may be installed
            variables["PYTHONPATH"] = str(tmp_path)
        added.append(nodes.add(**variables))

    yield join
    for node in added:
        nodes.cluster.remove_node(node)
    until(lambda: len(module.nodes()) == 3)


BAD_NODES = [
    ({"OTHER": "1"}, rf"{KEY}, which is not set on node [\d.]+: set it"),
    ({KEY: "", "PYTHONPATH": ""}, r"cannot start on node [\d.]+ \(ModuleNotFoundError: No module named 'assay'"),
]


@pytest.mark.parametrize(("variables", "error"), BAD_NODES)
def test_a_node_that_cannot_judge_is_an_error_of_the_first_call(
    joins: Any, file: Path, variables: dict[str, str], error: str
) -> None:
    joins(**variables)
    pool, _ = on_nodes(FunctionJudge(f"{file}:reward"), pass_env=[KEY])
    with pool, pytest.raises(UserError, match=error) as raised:
        pool.judge([("a", "", {})])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("variables", "error"), BAD_NODES)
def test_a_node_that_joins_later_and_cannot_judge_is_not_used(
    joins: Any, file: Path, variables: dict[str, str], error: str
) -> None:
    pool, inner = on_nodes(FunctionJudge(f"{file}:reward"), pass_env=[KEY])
    with pool, pytest.warns(UserWarning, match=error):
        pool.judge([("a", "", {})])
        joins(**variables)
        until(lambda: bool(pool.judge([("a", "", {})])[0].reward == 0.1 and inner._refused))
        assert pool.judge([("abc", "", {})] * 9)[0].reward == 0.3 and len(inner._actors) == 2


def test_judge_that_a_node_cannot_load_is_an_error_that_names_the_node(nodes: Nodes, file: Path) -> None:
    judge = FunctionJudge(f"{file}:reward")
    pool, _ = on_nodes(judge)
    file.unlink()
    with pool, pytest.raises(UserError, match=r"cannot run in a worker process: there is no file .*on node [\d.]+\)"):
        pool.judge([("a", "", {})])


def test_without_nodes_there_is_one_error_after_the_limit(
    nodes: Nodes, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, inner = on_nodes(FunctionJudge(f"{file}:reward"))
    with pool:
        pool.judge([("a", "", {})])
        monkeypatch.setattr(module, "nodes", lambda: [])
        monkeypatch.setattr(module, "NODE_LIMIT_S", 1.0)
        with pytest.warns(UserWarning, match="judge actor is lost"):
            for pid in pids(inner):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(
                UserError, match=r"no node of the Ray cluster could judge for 1 s \(node [\d.]+: The actor"
            ):
                pool.judge([("a", "", {})])
        monkeypatch.undo()
        assert pool.judge([("abcde", "", {})])[0].reward == 0.5  # nodes are there again


def test_answers_whose_actors_are_lost_again_and_again_get_status_error(
    nodes: Nodes, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOSSES", 2)
    pool, inner = on_nodes(FunctionJudge(f"{file}:reward"), timeout_s=50)

    def faults() -> None:
        for _ in range(2):
            until(lambda: any(actor.in_flight for actor in [*inner._actors.values()]))
            kill(inner, [actor.in_flight for actor in inner._actors.values()].index(1))
            time.sleep(1)

    thread = threading.Thread(target=faults)
    with pool, pytest.warns(UserWarning, match="judge actor is lost"):
        pool.judge([("a", "", {})])
        thread.start()
        (verdict,) = pool.judge([("slow", "", {})])
        thread.join()
    assert verdict.status is Status.ERROR and "2 judge actors were lost" in verdict.detail


def test_close_ends_actors_and_fails_waiting_calls(nodes: Nodes, file: Path) -> None:
    pool, inner = on_nodes(FunctionJudge(f"{file}:reward"), timeout_s=50)
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="closed") as raised:
            pool.judge([("slow", "", {})] * 9)
        errors.append(str(raised.value))

    pool.judge([("a", "", {})])
    processes = pids(inner)
    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: sum(actor.in_flight for actor in inner._actors.values()) == 4)
    until(lambda: all(len(descendants(pid)) > 1 for pid in processes))  # workers and their supervisors
    processes += [child for pid in processes for child in descendants(pid)]
    pool.close()
    pool.close()
    thread.join(10)
    assert errors and not thread.is_alive() and ended(processes)
    with pytest.raises(RuntimeError, match="closed"):
        pool.judge([("a", "", {})])


@pytest.mark.usefixtures("one_thread", "no_curves")
def test_training_with_judges_on_nodes_equals_training_with_local_judges(nodes: Nodes, small_runs: SmallRuns) -> None:
    for place in ("local", "ray"):
        settings = ("--name", place, "--reward.workers", "1", "--reward.pool", place, "--save.every", "2")
        assert small_runs.train(*settings) == 0
    small_runs.same_run("local", "ray", 2)
