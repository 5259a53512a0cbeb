"""The engine sglang, with a strict stand-in for the server (see also test_pausable.py): requests, weights, servers."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_parts import logits_after, small_decoder, small_spec
from http_parts import Answer, SmallServer
from pausable_parts import POLICY, PROMPT, connected, decode, launched_servers
from sglang_parts import RULES, FakeSGLang, problem_of
from stepped import Stepped

from assay.config import SGLangConfig
from assay.engine.base import Finished, Request, SamplingParams
from assay.engine.client import generate
from assay.engine.remote.http import ServerGarbage
from assay.engine.remote.transport import FolderTransport, IpcTransport
from assay.integrations.sglang import GroupTransport, SGLangServer, weight_group
from assay.models.fingerprint import fingerprint
from assay.types import Finish, UserError

ROOT = Path(__file__).resolve().parents[2]
sglang = partial(connected, "sglang")
servers = partial(launched_servers, "sglang")
CPU = torch.device("cpu")


def bodies(server: SmallServer, path: str = "/generate") -> list[Any]:
    return [body for one, body in server.requests if one.split("?")[0] == path]


def test_every_sampling_parameter_is_sent_so_that_no_default_of_the_server_applies() -> None:
    with sglang(FakeSGLang(POLICY, decode)) as (engine, servers):
        generate(engine, [Request(PROMPT, SamplingParams(n=2, max_new_tokens=3), seed=9)])
        sent = [body["sampling_params"] for body in bodies(servers[0])[-2:]]
        for params in sent:  # test_vllm.py has those that are the same for both
            assert (params["n"], params["top_k"], params["repetition_penalty"]) == (1, -1, 1.0)
            assert (params["max_new_tokens"], params["min_new_tokens"]) == (3, 0)
        assert sent[0]["sampling_seed"] != sent[1]["sampling_seed"]


def test_requests_of_both_servers_are_spread_and_samples_stay_in_order() -> None:
    fakes = [FakeSGLang(POLICY, decode), FakeSGLang(POLICY, decode)]
    with sglang(*fakes) as (engine, servers):
        greedy = SamplingParams(n=2, temperature=0.0, max_new_tokens=4)
        prompts = [[token, 2, 3] for token in range(6)]
        groups = generate(engine, [Request(prompt, greedy, 0) for prompt in prompts])
        for prompt, group in zip(prompts, groups, strict=True):
            ids: list[int] = []
            for _ in range(4):
                ids.append(int(logits_after(POLICY, [*prompt, *ids])[-1].argmax()))
            assert [one.token_ids for one in group] == [ids, ids]
        assert [len(bodies(server)) - 1 for server in servers] == [6, 6]  # and one question about the vocabulary


def test_end_tokens_of_the_server_that_are_not_stop_tokens_do_not_end_a_sample() -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    with sglang(FakeSGLang(POLICY, decode)) as (engine, _):
        ids = generate(engine, [Request(PROMPT, greedy, 0)])[0][0].token_ids
    stop = next(token for token in range(61) if token not in ids)
    with sglang(FakeSGLang(POLICY, decode, end_tokens=(ids[2],))) as (engine, servers):
        (whole,) = generate(engine, [Request(PROMPT, replace(greedy, stop_token_ids=(stop,)), 0)])[0]
        assert whole.token_ids == ids and whole.finish is Finish.LENGTH and len(whole.versions) == 1
        assert len(bodies(servers[0])) > 2  # the sample was continued
        (cut,) = generate(engine, [Request(PROMPT, replace(greedy, stop_token_ids=(ids[2],)), 0)])[0]
        assert cut.token_ids == ids[: ids.index(ids[2]) + 1] and cut.finish is Finish.STOP


def test_an_aborted_sample_is_aborted_on_the_server() -> None:
    fake = FakeSGLang(POLICY, decode, token_s=0.02)
    with sglang(fake) as (engine, servers):
        running = Stepped(engine)
        request = running.add(Request(PROMPT, SamplingParams(n=2, max_new_tokens=40), 0))
        while len(fake.running) < 2:
            time.sleep(0.005)
        running.abort([(request, 0)])
        while not fake.aborted:
            time.sleep(0.005)
        (event,) = running.step()
        assert isinstance(event, Finished) and event.sample == 1 and len(event.completion.token_ids) == 40
        assert fake.aborted == [body["rid"] for body in bodies(servers[0], "/abort_request")]
        assert len(fake.aborted) == 1


@pytest.mark.parametrize(("transport", "dtype"), [("folder", torch.float32), ("shared", torch.bfloat16)])
def test_an_update_replaces_all_weights_of_all_servers(transport: str, dtype: torch.dtype) -> None:
    """The stand-in reads shared memory as SGLang does, and loads only the modules that SGLang allows."""
    other = small_decoder(small_spec(), seed=5)
    fakes = [FakeSGLang(POLICY, decode), FakeSGLang(POLICY, decode)]
    with sglang(*fakes) as (engine, servers):
        if transport == "shared":  # without a GPU, the bytes themselves are sent
            engine.transport = IpcTransport(CPU, dtype, chunk_bytes=3000)
        engine.update_weights(other, 3)
        expected = fingerprint(other.weights(), dtype)
        assert [fingerprint(fake.model.weights(), dtype) for fake in fakes] == [expected, expected]
        assert [fake.version for fake in fakes] == ["3", "3"]
        kept = [call for call in fakes[0].calls if "update_weights" not in call][-3:]
        assert kept == ["/pause_generation", "/flush_cache", "/continue_generation"]
        if transport == "shared":
            assert len(bodies(servers[0], "/update_weights_from_tensor")) > 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 60}, r"prompts of 53 tokens, .* sequences of 96: restart it with --context-length 112"),
        ({"dtype": "bfloat16"}, r"has --dtype bfloat16 and engine.dtype is float32: restart it with --dtype float32"),
        ({"architecture": "OPTForCausalLM"}, r"serves another model \(OPTForCausalLM, and the policy is a Qwen3"),
        ({"model": small_decoder(small_spec(vocab_size=60))}, "its vocabulary has 60 tokens, and the policy's 61"),
        ({"model": small_decoder(small_spec(vocab_size=64))}, "its vocabulary has 64 tokens, and the policy's 61"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_the_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), sglang(FakeSGLang(**{"model": POLICY, "decode": decode} | changes)):
        pass


def test_garbage_in_answers_fails_the_request_alone() -> None:
    class Broken(FakeSGLang):
        def sample(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
            answer = super().sample(rid, prompt, params)
            match params["max_new_tokens"]:
                case 3:
                    del answer["meta_info"]["finish_reason"]
                case 4:
                    answer["meta_info"]["output_token_logprobs"][0][0] = None
                case 5:
                    answer["meta_info"]["output_token_logprobs"] = []
                case 6:
                    answer["meta_info"]["finish_reason"] = {"type": "odd"}
                case 7:
                    answer["meta_info"]["output_token_logprobs"][0][1] = 61
            return answer

    with sglang(Broken(POLICY, decode)) as (engine, _):
        for length, message in (
            (3, "no finish reason or no log-probabilities"),
            (4, "the log-probability None"),
            (5, "0 tokens, where 1 to 5"),
            (6, "the finish reason 'odd'"),
            (7, "tokens, where 0 to 7 of the vocabulary"),
        ):
            with pytest.raises(UserError, match=message):
                generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=length), 0)])
        assert generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])


@pytest.mark.parametrize(
    ("path", "changes"),
    [*(("/server_info", {"tp_size": -1}), ("/model_info", None), ("/server_info", {"max_req_input_len": None}))],
)
def test_garbage_at_the_start_is_one_line(path: str, changes: Any) -> None:
    fake = FakeSGLang(POLICY, decode)

    def broken(at: str, body: Any) -> Answer:
        status, answer = fake(at, body)
        return status, ({**answer, **changes} if changes else [answer]) if at == path else answer

    broken.refused = fake.refused  # type: ignore[attr-defined]
    with pytest.raises(ServerGarbage), sglang(broken):
        pass


@pytest.mark.parametrize("version", ["default", "2"])
def test_weights_of_a_restarted_server_are_not_used(version: str) -> None:
    fake = FakeSGLang(POLICY, decode)
    with sglang(fake) as (engine, _):
        engine.update_weights(POLICY, 3)
        request = Request(PROMPT, SamplingParams(max_new_tokens=2), 0)
        assert generate(engine, [request])
        fake.version = version
        with pytest.raises(UserError, match=f"weights of version {version}, not 3: it was restarted"):
            generate(engine, [request])


@pytest.mark.parametrize("backup", [True, False])
def test_sleeping_servers_are_paused_and_woken_for_an_update_and_at_the_end(backup: bool) -> None:
    fake = FakeSGLang(POLICY, decode, cpu_backup=backup)
    with sglang(fake, options={"sleep_while_training": True}) as (engine, _):
        engine.sleep()
        assert fake.released == {"kv_cache", "weights"}
        assert fake.paused  # the request of another program, such as a health check, would end it
        if backup:
            engine.wake()
            assert not fake.released and generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])
            engine.sleep()
        else:
            with pytest.raises(UserError, match=r"have dropped their weights: update them before sampling"):
                engine.wake()
        fake.calls.clear()
        engine.update_weights(POLICY, 1)
        resume = "/resume_memory_occupation"
        expected = ["/pause_generation", resume, "/update_weights_from_disk", resume, "/flush_cache"]
        assert fake.calls == [*expected, "/continue_generation"]
        assert not fake.released and generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])
        engine.sleep()
        assert fake.released
    assert not fake.released and not fake.paused


def test_a_server_without_memory_saver_cannot_sleep() -> None:
    fake, needed = FakeSGLang(POLICY, decode, memory_saver=False), "needs SGLang servers with --enable-memory-saver"
    with sglang(fake, options={"sleep_while_training": True}) as (engine, _), pytest.raises(UserError, match=needed):
        engine.sleep()


def test_an_update_that_failed_while_servers_slept_can_be_repeated() -> None:
    """SGLang ends if memory is resumed twice; the stand-in refuses it."""
    fake = FakeSGLang(POLICY, decode)
    with sglang(fake, options={"sleep_while_training": True}) as (engine, _):
        engine.sleep()
        with pytest.raises(UserError, match="size mismatch"):
            engine.update_weights(small_decoder(small_spec(intermediate=64)), 1)
        assert fake.released == {"kv_cache"}
        engine.update_weights(POLICY, 2)
        assert not fake.released and generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])


def test_a_process_does_not_wake_servers_that_it_shares_with_others() -> None:
    fake = FakeSGLang(POLICY, decode)
    with sglang(fake, options={"sleep_while_training": True}) as (engine, _):
        engine.sleep()
        fake.calls.clear()
        request = Request(PROMPT, SamplingParams(max_new_tokens=2), 0)
        engine.ranks.world = object()  # type: ignore[assignment]
        with pytest.raises(UserError, match="several processes sleep: update weights or call wake"):
            generate(engine, [request])
        engine.ranks.world = None
        assert "/resume_memory_occupation" not in fake.calls
        assert generate(engine, [request])  # alone, it wakes them


def test_a_server_that_an_earlier_run_has_left_paused_is_continued() -> None:
    fake = FakeSGLang(POLICY, decode)
    fake.paused = True
    with sglang(fake) as (engine, _):
        assert generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])


def test_the_stand_in_refuses_what_sglang_would_not_accept() -> None:
    fields = RULES["endpoints"]["/generate"]["fields"]
    assert problem_of(fields, {"input_ids": [1], "sampling_params": {}, "rid": "a"}) == ""
    assert problem_of(fields, {"input_ids": ["a"]}) and problem_of(fields, {"inputs": [1]})
    disk = RULES["endpoints"]["/update_weights_from_disk"]["fields"]
    assert "'model_path' is missing" in problem_of(disk, {"load_format": "auto"})
    assert problem_of(RULES["endpoints"]["/pause_generation"]["fields"], {"mode": "wait"})
    assert problem_of(RULES["sampling_params"], {"temperature": "1"})


@pytest.mark.skipif("ASSAY_SGLANG_SOURCE" not in os.environ, reason="ASSAY_SGLANG_SOURCE names no source of SGLang")
def test_the_rules_of_the_stand_in_are_those_of_the_source() -> None:
    command = [sys.executable, str(ROOT / "dev" / "sglang_requests.py"), os.environ["ASSAY_SGLANG_SOURCE"]]
    shown = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    assert shown == (ROOT / "tests" / "helpers" / "sglang_requests.json").read_text()


# -- weights


def test_workers_are_those_of_all_parallel_dimensions() -> None:
    workers = [SGLangServer(info, {}).workers for info in ({}, {"tp_size": 4, "pp_size": 2})]
    assert workers == [1, 8]


@pytest.mark.parametrize(
    ("kind", "device", "started", "workers", "expected"),
    [
        ("auto", "cuda", True, 1, IpcTransport),
        ("auto", "cuda", False, 1, FolderTransport),
        ("auto", "cuda", True, 2, FolderTransport),
        ("auto", "cpu", True, 1, FolderTransport),
        ("ipc", "cuda", False, 1, IpcTransport),
        ("folder", "cuda", True, 1, FolderTransport),
        ("ipc", "cuda", True, 2, "needs servers with one worker each: use 'folder'"),
    ],
)
def test_gpu_memory_is_used_for_servers_on_the_same_gpu(
    kind: Any, device: str, started: bool, workers: int, expected: Any
) -> None:
    with sglang(FakeSGLang(POLICY, decode)) as (engine, _):
        engine.served = {"url": SGLangServer({"tp_size": workers}, {})}
        engine.settings, engine.options = SGLangConfig(transport=kind), replace(engine.options, device=device)
        engine.launched = servers() if started else None
        try:
            if isinstance(expected, str):
                with pytest.raises(UserError, match=expected):
                    engine.choose_transport()
                return
            transport = engine.choose_transport()
        finally:
            engine.launched = None
        assert isinstance(transport, expected)
        if isinstance(transport, FolderTransport):
            transport.close()


@pytest.mark.parametrize("status", [400, 200])
def test_a_server_that_refuses_to_join_the_group_is_reported_at_once(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupTransport, "backend", "gloo")
    answer = {"success": False, "message": "no NCCL here"}
    fake = FakeSGLang(POLICY, decode)

    def refuse(path: str, body: Any) -> Answer:
        return (status, answer) if "group" in path else fake(path, body)

    with sglang(refuse) as (engine, _):
        engine.settings = SGLangConfig(transport="nccl")
        with pytest.raises(UserError, match="no NCCL here" if status == 400 else "an update without success"):
            engine.choose_transport()
        assert "assay-collective" not in {thread.name for thread in threading.enumerate()}


def join_group(port: int, results: Any) -> None:
    """A worker of a server: receives all weights through a process group, which it joins as SGLang's workers do."""
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
    group = weight_group(store, 1, 2, "gloo")
    for _ in range(2):
        tensor = torch.zeros(3)
        dist.broadcast(tensor, group=group, group_src=0)
        results.put(tensor.tolist())


def test_a_process_that_is_not_in_the_default_group_receives_broadcasts() -> None:
    transport = GroupTransport(CPU, torch.float32, "127.0.0.1")
    transport.backend = "gloo"
    context = multiprocessing.get_context("fork")  # does not import torch again
    results = context.Queue()
    worker = context.Process(target=join_group, args=(transport.port, results), daemon=True)
    worker.start()
    transport.connect(2)
    (chunk,) = transport.chunks(iter([("a", torch.tensor([1.0, 2.0, 3.0])), ("b", torch.tensor([4.0, 5.0, 6.0]))]))
    transport.broadcast(chunk)
    received = [results.get(timeout=60) for _ in range(2)]
    worker.join(60)
    assert received == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


# -- servers that the engine starts


def test_arguments_follow_the_options_and_exist_in_sglang() -> None:
    launched = servers({"sleep_while_training": True}, args=["--tp-size", "2"], deterministic=True, gpu_memory=0.3)
    words = launched._arguments(1234, 96)
    text = " ".join(words)
    for part in ("--port 1234", "--max-running-requests 7", "--context-length 112", "--dtype float32"):
        assert part in text
    for part in ("--load-format dummy", "--mem-fraction-static 0.3", "--cuda-graph-max-bs-decode 7"):
        assert part in text
    assert text.endswith("--enable-weights-cpu-backup --enable-deterministic-inference --tp-size 2")
    cpu = servers({"device": "cpu", "prefill_tokens": 512, "sleep_while_training": True})._arguments(1, 96)
    assert "--device cpu" in " ".join(cpu) and "--enable-memory-saver" not in cpu
    assert "--enable-weights-cpu-backup" not in servers({"sleep_while_training": True}, keep_weights=False)._arguments(
        1, 9
    )
    for word in [*words, *cpu]:
        if word.startswith("--") and word != "--config":  # not one of the arguments that are fields of a class
            assert word.removeprefix("--").replace("-", "_") in RULES["server_arguments"], word


def test_the_key_is_in_a_file_that_other_users_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    launched, other = servers(), servers()
    words = launched._arguments(1234, 96)
    file = Path(words[words.index("--config") + 1])
    assert json.loads(file.read_text()) == {"api-key": launched.key} and launched.key != other.key
    assert file.stat().st_mode & 0o077 == 0 and launched.key not in " ".join(words)
    assert launched._environment(0)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
