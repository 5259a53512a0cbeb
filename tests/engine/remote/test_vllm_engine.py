"""The engine vllm, with a stand-in for the server: requests, stop strings, updates while requests run, bad servers.

Real vLLM servers are used in tests/real_vllm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import logits_after, small_decoder, small_spec
from http_parts import Answer, SmallServer, small_server
from stepped import Stepped
from vllm_parts import FakeVLLM

from assay.config import VLLMConfig
from assay.engine import make_engine
from assay.engine.base import Finished, Request, SamplingParams
from assay.engine.check import ScaledWeights, check_engine
from assay.engine.client import generate
from assay.engine.remote.http import ServerGarbage
from assay.engine.remote.pausable import sample_seed
from assay.engine.remote.vllm.engine import VLLMEngine
from assay.models.fingerprint import fingerprint
from assay.types import Finish, UserError

POLICY = small_decoder(small_spec())
PROMPT = [3, 1, 4, 1, 5]


def decode(ids: Any) -> str:
    return "".join(chr(ord("A") + int(token)) for token in ids)


@contextmanager
def vllm(*fakes: FakeVLLM, policy: Any = POLICY, **settings: Any) -> Iterator[tuple[VLLMEngine, list[SmallServer]]]:
    options = {"device": "cpu", "dtype": torch.float32, "decode": decode} | settings.pop("options", {})
    with ExitStack() as stack:
        servers = [stack.enter_context(small_server(fake)) for fake in fakes]
        config = VLLMConfig(urls=[f"{server.url}/v1" for server in servers], **settings)
        engine = make_engine("vllm", policy, {"settings": config}, **options)
        stack.callback(engine.close)
        assert isinstance(engine, VLLMEngine)
        yield engine, servers


def test_the_engine_satisfies_the_interface() -> None:
    other = small_decoder(small_spec(), seed=5)  # the first update must replace the server's weights
    with vllm(FakeVLLM(other, decode), FakeVLLM(other, decode)) as (engine, _):
        assert check_engine(Stepped(engine), PROMPT, POLICY, decode, hottest=2.0) == []
        able = engine.info.capabilities
        assert (able.temperature_logprobs, able.truncated_logprobs, able.fingerprint) == (True, False, True)


def test_log_probabilities_are_those_of_the_policy_at_the_sampling_temperature() -> None:
    with vllm(FakeVLLM(POLICY, decode)) as (engine, _):
        params = SamplingParams(n=4, temperature=0.7, max_new_tokens=6)
        for completion in generate(engine, [Request(PROMPT, params, seed=1)])[0]:
            rows = (logits_after(POLICY, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1] / 0.7).log_softmax(-1)
            expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.engine_logprobs), expected, atol=1e-5)


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


def test_tokens_after_a_stop_string_are_removed() -> None:
    class Late(FakeVLLM):
        def sample(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
            return super().sample(prompt, body | {"stop": []})

    with vllm(Late(POLICY, decode)) as (engine, _):
        greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
        ids = generate(engine, [Request(PROMPT, greedy, 0)])[0][0].token_ids
        stop = decode(ids[2:4])
        cut = generate(engine, [Request(PROMPT, replace(greedy, stop=(stop,)), 0)])[0][0]
        assert cut.token_ids == ids[: decode(ids).index(stop) + 2] and cut.finish is Finish.STOP
        assert len(cut.engine_logprobs) == len(cut.token_ids) < 8


def test_a_request_that_an_update_interrupts_is_continued_with_the_new_weights() -> None:
    with vllm(FakeVLLM(POLICY, decode, token_s=0.02)) as (engine, servers):
        params = SamplingParams(n=2, temperature=0.0, max_new_tokens=20)
        running = Stepped(engine)
        running.add(Request(PROMPT, params, 0))
        while not any(path == "/v1/completions" and body["max_tokens"] == 20 for path, body in servers[0].requests):
            time.sleep(0.005)
        time.sleep(0.1)
        engine.update_weights(ScaledWeights(POLICY), 7)
        for event in [event for _ in range(2) for event in running.step()]:
            assert isinstance(event, Finished)
            completion = event.completion
            (first, before), (second, after) = completion.versions
            assert (first, second) == (0, 7) and before + after == 20 and 0 < before < 20
            old, new = rows_of(POLICY, completion.token_ids), rows_of(scaled(), completion.token_ids)
            expected = torch.cat((old[:before], new[before:]))
            assert torch.allclose(torch.tensor(completion.engine_logprobs), expected, atol=1e-4)


def rows_of(model: Any, ids: list[int]) -> torch.Tensor:
    rows = logits_after(model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0]


def scaled() -> Any:
    model = small_decoder(small_spec())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


def test_the_fingerprint_is_that_of_the_policy_and_names_a_server_that_differs() -> None:
    fakes = [FakeVLLM(POLICY, decode), FakeVLLM(POLICY, decode)]
    with vllm(*fakes) as (engine, _):
        assert engine.fingerprint() == fingerprint(POLICY.weights(), torch.float32)
        with torch.no_grad():
            next(fakes[1].model.parameters()).view(-1)[0] += 1e-3
        assert engine.fingerprint() != fingerprint(POLICY.weights(), torch.float32)


def test_scores_of_each_server_show_which_one_differs() -> None:
    fakes = [FakeVLLM(POLICY, decode), FakeVLLM(POLICY, decode)]
    with vllm(*fakes) as (engine, servers):
        with torch.no_grad():
            next(fakes[1].model.parameters()).mul_(1.1)
        scores = engine.score_each([PROMPT])
        assert list(scores) == [server.url for server in servers]
        expected = logits_after(POLICY, PROMPT)[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        close = [torch.allclose(torch.tensor(scores[server.url][0]), expected, atol=1e-5) for server in servers]
        assert close == [True, False]


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


@pytest.mark.parametrize("other", [{"hidden": 16}, {"vocab_size": 64}])
def test_a_server_with_another_model_is_refused_at_the_first_update(other: dict[str, int]) -> None:
    model = small_decoder(small_spec(**other))
    with (
        pytest.raises(UserError, match=r"cannot load the weights in .*size mismatch.*same model"),
        vllm(FakeVLLM(model, decode)),
    ):
        pass


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for settings, message in (
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"transport": "ipc"}, "needs a GPU: use 'folder'"),
        ({"model": "other"}, "serves policy: set vllm.model to one of them"),
        ({"options": {"dtype": torch.float64}}, "vLLM has no float64"),
    ):
        with pytest.raises(UserError, match=message), vllm(FakeVLLM(POLICY, decode), **settings):
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

    with pytest.raises(ServerGarbage) as error, vllm(broken):  # type: ignore[arg-type]
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


def test_a_failed_update_resumes_the_servers() -> None:
    fake = FakeVLLM(POLICY, decode)
    with vllm(fake) as (engine, _):
        wrong = small_decoder(small_spec(intermediate=64))
        with pytest.raises(UserError, match="size mismatch"):
            engine.update_weights(wrong, 1)
        assert not fake.paused and engine.info.version == 0
        waiting = threading.Thread(target=lambda: generate(engine, [Request(PROMPT, SamplingParams(), 0)]))
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
