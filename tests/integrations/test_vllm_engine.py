"""What is special about the engine vllm (see also test_pausable.py), with a stand-in for the server."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from http_parts import Answer
from pausable_parts import POLICY, PROMPT, connected, decode
from vllm_parts import FakeVLLM

from assay.engine.base import Request, SamplingParams
from assay.engine.client import generate
from assay.engine.remote.http import ServerGarbage
from assay.engine.remote.pausable import sample_seed
from assay.models.fingerprint import fingerprint
from assay.types import UserError

vllm = partial(connected, "vllm")


def test_every_sampling_parameter_is_sent_so_that_no_default_of_the_model_applies() -> None:
    with vllm(FakeVLLM(POLICY, decode)) as (engine, servers):
        generate(engine, [Request(PROMPT, SamplingParams(n=2, max_new_tokens=3), seed=9)])
        bodies = [body for path, body in servers[0].requests if path == "/v1/completions"][-2:]
        expected = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        expected |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "max_tokens": 3}
        for body in bodies:
            assert {name: body[name] for name in expected} == expected
        assert sorted(body["seed"] for body in bodies) == sorted(sample_seed(9, sample, 0) for sample in range(2))


def test_seeds_can_be_left_out() -> None:
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
        (
            {"device": "cpu", "extension": ""},
            r"does not reload a tied head: restart it with --worker-ext",
        ),
        ({"development": False}, r"does not accept weights: start it with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_the_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), vllm(FakeVLLM(POLICY, decode, **changes)):
        pass


def test_a_server_with_a_smaller_vocabulary_is_refused() -> None:
    other = small_decoder(small_spec(vocab_size=60))
    with (
        pytest.raises(UserError, match="its vocabulary is smaller than the policy's 61 tokens"),
        vllm(FakeVLLM(other, decode)),
    ):
        pass


def test_a_server_with_a_larger_vocabulary_is_refused_at_the_first_update() -> None:
    model = small_decoder(small_spec(vocab_size=64))
    with pytest.raises(UserError, match=r"size mismatch.*same model"), vllm(FakeVLLM(model, decode)):
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
        ("/v1/models", {"data": [{"id": "policy", "max_model_len": float("inf")}]}),
        ("/v1/models", b"[" * 100_000),
        ("/server_info", {"vllm_config": "text"}),
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
