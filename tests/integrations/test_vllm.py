"""The engine vllm, with a stand-in for the server (see also test_pausable.py): requests, weights, started servers."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from http_parts import Answer
from pausable_parts import POLICY, PROMPT, connected, decode, launched_servers
from vllm_parts import FakeVLLM

from assay.config import VLLMConfig
from assay.engine.base import Request, SamplingParams
from assay.engine.client import generate
from assay.engine.remote.http import ServerGarbage
from assay.engine.remote.pausable import sample_seed
from assay.engine.remote.server_side import KEY
from assay.engine.remote.transport import FolderTransport, NcclTransport
from assay.integrations.vllm import ServedModel
from assay.integrations.vllm_worker import EXTENSION, KeyCheck
from assay.models.fingerprint import fingerprint
from assay.types import UserError

vllm = partial(connected, "vllm")
servers = partial(launched_servers, "vllm")


def test_every_sampling_parameter_is_sent_so_that_no_default_of_the_model_applies() -> None:
    with vllm(FakeVLLM(POLICY, decode)) as (engine, servers):
        generate(engine, [Request(PROMPT, SamplingParams(n=2, max_new_tokens=3), seed=9)])
        bodies = [body for path, body in servers[0].requests if path == "/v1/completions"][-2:]
        expected = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        expected |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "max_tokens": 3}
        for body in bodies:
            assert {name: body[name] for name in expected} == expected
        assert sorted(body["seed"] for body in bodies) == sorted(sample_seed(9, sample, 0) for sample in range(2))
    with vllm(FakeVLLM(POLICY, decode), seeds=False) as (engine, servers):
        generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), seed=9)])
        assert "seed" not in servers[0].requests[-1][1]


def test_the_fingerprint_is_that_of_the_policy_and_names_a_server_that_differs() -> None:
    fakes = [FakeVLLM(POLICY, decode), FakeVLLM(POLICY, decode)]
    with vllm(*fakes) as (engine, _):
        assert engine.fingerprint() == fingerprint(POLICY.weights(), torch.float32)
        with torch.no_grad():
            next(fakes[1].model.parameters()).view(-1)[0] += 1e-3
        assert engine.fingerprint() != fingerprint(POLICY.weights(), torch.float32)


def test_a_server_without_the_extension_has_no_fingerprint_and_loads_folders() -> None:
    other = small_decoder(small_spec(), seed=5)
    fake = FakeVLLM(other, decode, extension="")
    with vllm(fake) as (engine, servers):
        assert engine.fingerprint() is None and not engine.info.capabilities.fingerprint
        methods = [body["method"] for path, body in servers[0].requests if path == "/collective_rpc"]
        assert methods == ["reload_weights"]
        assert fingerprint(fake.model.weights()) == fingerprint(POLICY.weights())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 50}, r"serves 50 tokens per sequence and the run needs 96: restart it with --max-model-len 96"),
        ({"logprobs_mode": "raw_logprobs"}, r"restart it with --logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, r"computes in bfloat16 and engine.dtype is float32: set engine.dtype to bfloat16"),
        ({"device": "cpu", "extension": ""}, r"does not reload a tied head: restart it with --worker-ext"),
        ({"development": False}, r"does not accept weights: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"model": small_decoder(small_spec(vocab_size=60))}, "its vocabulary is smaller than the policy's 61 tokens"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), vllm(FakeVLLM(**{"model": POLICY, "decode": decode} | changes)):
        pass


def test_an_unknown_model_is_refused() -> None:
    with (
        pytest.raises(UserError, match=r"serves policy: set vllm.model to one of them"),
        vllm(FakeVLLM(POLICY, decode), model="other"),
    ):
        pass


def test_garbage_in_completions_fails_the_request_alone() -> None:
    class Broken(FakeVLLM):
        def complete(self, body: dict[str, Any]) -> Any:
            status, answer = super().complete(body)
            choice = answer["choices"][0]
            match body.get("max_tokens"):
                case 3:
                    del choice["token_ids"]
                case 4:
                    choice["finish_reason"] = ["stop"]
                case 5:
                    choice["logprobs"]["token_logprobs"] = -1
                case 6:
                    answer["choices"] *= 2
                case 7:
                    choice["token_ids"] = "tokens"
            return status, answer

    with vllm(Broken(POLICY, decode)) as (engine, _):
        for length, message in (
            (3, "no token ids or no log-probabilities"),
            (4, "the finish reason"),
            (5, "not one log-probability for each of"),
            (6, "no token ids or no log-probabilities"),
            (7, "not a list of tokens"),
        ):
            with pytest.raises(UserError, match=message):
                generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=length), 0)])
        assert generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", {"data": [-1]}),
        ("/v1/models", b"[" * 100_000),
        ("/server_info", {"vllm_config": {"parallel_config": 61}}),
        ("/is_sleeping", [True]),
    ],
)
def test_garbage_at_the_start_is_one_line(path: str, answer: Any) -> None:
    fake = FakeVLLM(POLICY, decode)

    def broken(at: str, body: Any) -> Answer:
        return (200, answer) if at.startswith(path) else fake(at, body)

    with pytest.raises(ServerGarbage) as error, vllm(broken):
        pass
    assert "\n" not in str(error.value)


def test_sleeping_servers_are_woken_for_an_update_and_paused_around_it() -> None:
    fake = FakeVLLM(POLICY, decode, sleep_mode=True)
    with vllm(fake, sleep_level=2, options={"sleep_while_training": True}) as (engine, _):
        engine.sleep()
        assert fake.sleeping
        with pytest.raises(UserError, match=r"dropped by vllm.sleep_level = 2"):
            engine.wake()
        fake.calls.clear()
        engine.update_weights(POLICY, 1)
        kept = [call for call in fake.calls if "rpc" not in call]
        expected = ["/pause?mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]
        assert kept == [*expected, "/resume"]
        assert not fake.sleeping and generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=2), 0)])


# -- weights


def served(extension: str = EXTENSION, **parallel: int) -> ServedModel:
    return ServedModel("policy", 97, {"parallel_config": {"worker_extension_cls": extension, **parallel}})


def test_workers_are_those_of_all_parallel_dimensions() -> None:
    assert served().workers == 1 and served(tensor_parallel_size=4, pipeline_parallel_size=2).workers == 8
    assert served().has_extension and not served("other.Worker").has_extension


def test_shared_memory_needs_the_extension() -> None:
    with vllm(FakeVLLM(POLICY, decode, extension="")) as (engine, _):
        engine.options = replace(engine.options, device="cuda")
        folder = engine.choose_transport()
        assert isinstance(folder, FolderTransport)
        folder.close()
        engine.settings = VLLMConfig(transport="ipc")
        with pytest.raises(UserError, match=r"vllm.transport = 'ipc' needs servers with --worker-ext.*: use 'folder'"):
            engine.choose_transport()


class BlockedTransport(NcclTransport):
    """Its broadcasts wait for workers that never join."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32, "127.0.0.1")
        self.aborted = threading.Event()

    def broadcast(self, chunk: Any) -> None:
        assert self.aborted.wait(60)
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.aborted.set()


def test_errors_of_a_broadcast_are_reported_at_once() -> None:
    fake, released = FakeVLLM(POLICY, decode), threading.Event()

    def refuse(path: str, body: Any) -> Answer:
        match path:
            case "/update_weights":
                return 500, {"error": {"message": "no memory"}}
            case "/init_weight_transfer_engine":
                released.wait(60)  # until the trainer joins
        return fake(path, body) if "weight" not in path else (200, {})

    with vllm(refuse) as (engine, _):
        engine.transport = BlockedTransport()
        with pytest.raises(UserError, match="/update_weights answered 500: no memory"):
            engine.send(iter(POLICY.weights()), 1)
        assert "assay-collective" not in {thread.name for thread in threading.enumerate()}
        engine.settings = VLLMConfig(transport="nccl")
        with pytest.raises(UserError, match="transport 'nccl' needs vLLM in this environment"):
            engine.choose_transport()
        released.set()


# -- servers that the engine starts


def test_arguments_follow_the_options() -> None:
    launched = servers({"device": "cpu"}, args=["--swap-space", "1"], transport="nccl")
    text = " ".join(launched._arguments(1234, 96))
    for part in ("--port 1234", "--max-num-seqs 7", "--max-model-len 97", "--dtype float32", "--load-format dummy"):
        assert part in text
    assert "--logprobs-mode processed_logprobs" in text and text.endswith("--enforce-eager --swap-space 1")
    cuda = servers({"device": "cuda", "sleep_while_training": True, "kv_cache_gib": 2.0}, gpu_memory=0.3)
    text = " ".join(cuda._arguments(1, 96))
    assert "--gpu-memory-utilization 0.3" in text and "--enable-sleep-mode" in text and "--enforce-eager" not in text
    assert "--kv-cache-memory-bytes 2147483648" in text


def test_the_key_is_in_the_environment_and_checked_by_a_middleware() -> None:
    launched = servers()
    words = launched._arguments(1234, 96)
    assert words[words.index("--middleware") + 1] == f"{KeyCheck.__module__}.{KeyCheck.__qualname__}"
    environment = launched._environment(0)
    assert environment[KEY] == launched.key and launched.key not in " ".join(words)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
