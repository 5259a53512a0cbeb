"""What `cluster`, `learners` and `servers` of the Ray integration do without Ray (see tests/ray)."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from small_run import SmallRuns
from waiting import comes_true

from assay.build.run import new_run
from assay.checks.settings import check_settings
from assay.config import ClusterConfig, TrainConfig
from assay.config.settings import load_settings, parse_overrides
from assay.integrations.ray import cluster, judges, learners, servers
from assay.runs.console import make_console
from assay.system.program import free_port
from assay.types import UserError

ROOT = Path(__file__).parents[2]


def settings(*words: str) -> TrainConfig:
    pairs = dict(word.removeprefix("--").split("=", 1) for word in words)
    return load_settings(
        TrainConfig, None, {"cluster.kind": "ray", "cluster.engines": 2, "engine.name": "assay"} | pairs
    )


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "no servers": (["--engine.name=native"], "engine native has no servers"),
        "running ones": (['--server.urls=["http://n1:8000"]'], "server.urls names running ones"),
        "a port": (["--server.port=8000"], "server.port is for servers on the trainer's node"),
        "nobody to make room for": (["--engine.sleep_while_training=true"], "sleep_while_training has no use"),
        "several GPUs": (["--cluster.gpus_per_engine=2"], "a server of the engine assay uses one GPU"),
    }.values(),
)
def test_settings_that_contradict_the_cluster_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(settings(*words))


def test_settings_of_a_cluster_are_accepted() -> None:
    check_settings(settings())
    check_settings(settings("--cluster.place=colocated", "--engine.sleep_while_training=true"))


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert SmallRuns(tmp_path).train("--cluster.kind", "ray") == 2
    assert "cluster.kind = 'ray' needs the ray extra" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_ray_neither_reports_its_use_nor_connects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_AUTO_CONNECT"):
        monkeypatch.setenv(name, "")  # for the end of the test
        monkeypatch.delenv(name)
    cluster.ray_package()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0"


def test_a_ray_of_one_run_is_private_and_joining_another_one_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    context, services = SimpleNamespace(gcs_address="127.0.0.1:6379"), SimpleNamespace()
    private = SimpleNamespace(services=services)
    given: list[dict[str, Any]] = []
    lines: list[str] = []

    def init(**settings: Any) -> None:
        given.append(settings)

    fake = SimpleNamespace(_private=private, is_initialized=bool, get_runtime_context=lambda: context, init=init)
    monkeypatch.setattr(cluster, "ray_package", lambda: fake)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
    cluster.connect("", lines.append)
    assert not lines and given[0]["address"] == "local" and given[0]["_node_ip_address"] == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    context.gcs_address = "10.0.0.1:6379"
    cluster.connect("auto", lines.append)
    assert given[1]["address"] == "auto" and "_node_ip_address" not in given[1]
    cluster.connect("", lines.append)  # of a version of Ray that does not stay on the loopback address
    assert len(lines) == 2 and all("can run programs as you on its machines" in line for line in lines)


def test_the_files_for_clusters_fit_this_package() -> None:
    """Their schemas are those of Ray and KubeRay (see docs/guides/many-nodes.md)."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    spec = yaml.safe_load((ROOT / "deploy/rayjob.yaml").read_text())["spec"]
    assert spec["rayClusterSpec"]["rayVersion"] == pins["ray"]
    program, command, _, *words = spec["entrypoint"].split()
    cfg = load_settings(TrainConfig, ROOT / "configs/gsm8k.toml", parse_overrides(words))
    check_settings(cfg)
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = workers["replicas"] * int(limits["nvidia.com/gpu"])
    assert (program, command) == ("assay", "train") and gpus == cfg.cluster.learners + cfg.cluster.engines


def test_a_run_in_python_is_not_one_of_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is for the command line"):
        new_run(load_settings(TrainConfig, SmallRuns(tmp_path).config, {"cluster.kind": "ray"}), make_console())


def test_resources_of_learners_and_servers() -> None:
    apart = ClusterConfig(learners=2, engines=3, cpus_per_learner=4, gpus_per_learner=1, gpus_per_engine=2)
    assert learners.bundles(apart) == [{"CPU": 4, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 2}] * 3
    beside = apart.model_copy(update={"place": "colocated"})
    assert learners.bundles(beside) == [{"CPU": 6, "GPU": 1}, {"CPU": 5, "GPU": 1}]
    assert cluster.describe_resources({"CPU": 6.0, "GPU": 1.0}) == "6 CPUs and 1 GPU"


@pytest.mark.parametrize(
    ("ending", "requested", "code"),
    [("exit code 0", [], 0), ("exit code 2", [], 2), ("killed by SIGTERM", [], 143), ("killed by SIGKILL", [2], 130)],
)
def test_exit_codes(ending: str, requested: list[int], code: int) -> None:
    stop = learners.Stop()
    stop.requested = requested
    assert learners.exit_code(ending, stop) == code


def test_an_actor_that_cannot_be_created_is_an_error_of_the_installation() -> None:
    text = (
        "The actor died because of an error raised in its creation task\nModuleNotFoundError: No module named 'assay'"
    )
    with pytest.raises(UserError, match=r"No module named 'assay'.*install the same assay on all nodes"):
        learners.lost(RuntimeError(text))
    assert learners.lost(RuntimeError("its node\nis gone")) == "its node or its process was lost: its node is gone"


def test_a_hosted_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "logs_folder", lambda: tmp_path)
    hosted = cluster.HostedProgram("run-server-0")
    key_file = tmp_path / "new" / "key.yaml"
    code = "import os, time; print(os.environ['KEY'], os.environ['MORE'], flush=True); time.sleep(60)"
    key = hosted.start([sys.executable, "-c", code], {"MORE": "more"}, key="KEY", key_file=str(key_file))
    assert len(key) > 10 and json.loads(key_file.read_text()) == {"api-key": key}
    assert comes_true(lambda: bool(hosted.state()[1]), 20)
    expected = f"{key} more\n".encode()
    assert hosted.state() == (None, expected) and hosted.state(len(expected) - 3) == (None, b"re\n")
    hosted.signal(signal.SIGKILL)
    assert comes_true(lambda: hosted.ended() == "killed by SIGKILL", 20)
    assert (tmp_path / "assay-run-server-0.log").read_bytes() == expected
    hosted.program.close()


def test_files_are_written_where_a_node_lacks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "logs_folder", lambda: tmp_path)
    hosted, folder = cluster.HostedProgram("one"), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "part").mkdir()
    (folder / "part" / "file").write_bytes(b"\0\1")
    files = servers.read_files(folder)
    hosted.write(str(tmp_path / "copy"), files)
    assert servers.read_files(tmp_path / "copy") == files == {"config.json": b"{}", "part/file": b"\0\1"}
    hosted.write(str(folder), {"config.json": b"other"})  # it is there: on this node
    assert servers.read_files(folder) == files
    assert hosted.enter(str(tmp_path / "missing")) != ""
    hosted.remove(str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_a_batch_goes_to_the_least_loaded_actor_unless_all_have_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = judges.ClusterPool.__new__(judges.ClusterPool)
    pool._changed = threading.Condition()
    monkeypatch.setattr(pool, "_find_actors", lambda: None)
    loads = {"a": (True, 1, 1), "b": (True, 0, 9), "full": (True, judges.IN_FLIGHT, 0), "starting": (False, 0, 0)}
    pool._actors = {name: judges._JudgeActor(name, "", None, None, False, *load) for name, load in loads.items()}
    chosen = [pool._reserve(wait=False) for _ in range(4)]
    assert [actor and actor.node for actor in chosen] == ["b", "a", "b", None]


def test_the_number_of_servers_is_that_of_the_running_run(tmp_path: Path) -> None:
    found = servers.RayServers.__new__(servers.RayServers)
    found.member, found.slots, found.refused = {"run": str(tmp_path)}, dict.fromkeys(range(2)), 0  # type: ignore
    lines: list[str] = []
    for text, wanted in (("", 2), ("[cluster]\nengines = 3", 3), ("[cluster]\nengines = 0", 2), ("[cluster", 2)):
        (tmp_path / "config.toml").write_text(text)
        assert found.wanted() == wanted
    (tmp_path / "config.toml").write_text("[cluster]\nengines = 3")
    for _ in range(2):
        found.refuse_changes(lines.append)
    assert len(lines) == 1 and "cluster.engines = 3 is not applied: with the transport nccl" in lines[0]


def test_an_address_that_leads_nowhere_is_an_error_at_once() -> None:
    for address, message in (
        (f"127.0.0.1:{free_port()}", "no Ray cluster answers at 127.0.0.1:"),
        ("127.0.0.1:99999", "no Ray cluster answers"),
        ("ray://head:10001", "give host:port of the cluster's head, without a scheme"),
    ):
        with pytest.raises(UserError, match=message):
            cluster.check_reachable(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster.check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
    cluster.check_reachable("auto")
