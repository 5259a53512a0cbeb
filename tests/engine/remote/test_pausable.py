"""Engines whose servers are paused for updates, with strict stand-ins for vLLM and SGLang servers.

What differs is in test_vllm.py and test_sglang.py of tests/integrations. Real servers are used in tests/real_vllm and
tests/real_sglang.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import logits_after, small_decoder, small_spec
from pausable_parts import FAKES, POLICY, PROMPT, connected, decode, launched_servers, logprobs_of
from stepped import Stepped

from assay.engine.base import Finished, Request, SamplingParams
from assay.engine.client import generate
from assay.engine.completions import StopStrings
from assay.engine.remote.pausable import first_stop, sample_seed
from assay.testing.engine import ScaledWeights, check_engine
from assay.types import Finish, UserError

both = pytest.mark.parametrize("backend", ["vllm", "sglang"])


@both
def test_the_engine_satisfies_the_interface(backend: str) -> None:
    other = small_decoder(small_spec(), seed=5)  # the first update must replace the server's weights
    hottest = {"hottest": 2.0} if backend == "vllm" else {}
    with connected(backend, *(FAKES[backend](other, decode) for _ in range(2))) as (engine, _):
        assert check_engine(Stepped(engine), PROMPT, POLICY, decode, **hottest) == []
        able = engine.info.capabilities
        assert (able.temperature_logprobs, able.truncated_logprobs) == (True, False)
        assert able.fingerprint is (backend == "vllm")


@both
def test_tokens_after_a_stop_string_are_removed(backend: str) -> None:
    fake = FAKES[backend](POLICY, decode)
    sample = fake.sample
    fake.sample = lambda *given: sample(*given[:-1], given[-1] | {"stop": []})  # notices stop strings late
    with connected(backend, fake) as (engine, _):
        greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
        ids = generate(engine, [Request(PROMPT, greedy, 0)])[0][0].token_ids
        stop = decode(ids[2:4])
        cut = generate(engine, [Request(PROMPT, replace(greedy, stop=(stop,)), 0)])[0][0]
        assert cut.token_ids == ids[: decode(ids).index(stop) + 2] and cut.finish is Finish.STOP
        assert len(cut.engine_logprobs) == len(cut.token_ids) < 8


@both
def test_a_request_that_an_update_interrupts_is_continued_with_the_new_weights(backend: str) -> None:
    with connected(backend, FAKES[backend](POLICY, decode, token_s=0.02)) as (engine, servers):
        running, before_it = Stepped(engine), servers[0].paths().count(engine.path)
        running.add(Request(PROMPT, SamplingParams(n=2, temperature=0.0, max_new_tokens=20), 0))
        while servers[0].paths().count(engine.path) < before_it + 2:
            time.sleep(0.005)
        time.sleep(0.1)
        engine.update_weights(ScaledWeights(POLICY), 7)
        new = small_decoder(small_spec())
        with torch.no_grad():
            for (_, target), (_, weight) in zip(new.weights(), ScaledWeights(POLICY).weights(), strict=True):
                target.copy_(weight)
        for event in [event for _ in range(2) for event in running.step()]:
            assert isinstance(event, Finished)
            ids = event.completion.token_ids
            (first, before), (second, after) = event.completion.versions
            assert (first, second) == (0, 7) and before + after == 20 and 0 < before < 20
            expected = torch.cat((logprobs_of(POLICY, ids)[:before], logprobs_of(new, ids)[before:]))
            assert torch.allclose(torch.tensor(event.completion.engine_logprobs), expected, atol=1e-4)


@both
def test_scores_of_each_server_show_which_one_differs(backend: str) -> None:
    fakes = [FAKES[backend](POLICY, decode) for _ in range(2)]
    with connected(backend, *fakes) as (engine, servers):
        with torch.no_grad():
            next(fakes[1].model.parameters()).mul_(1.1)
        ids = [*PROMPT, POLICY.vocab_size - 1, PROMPT[0]]  # SGLang reports the last token of the vocabulary as 0
        scores = engine.score_each([ids])
        assert list(scores) == [server.url for server in servers]
        expected = logits_after(POLICY, ids)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        close = [torch.allclose(torch.tensor(scores[server.url][0]), expected, atol=1e-5) for server in servers]
        assert close == [True, False]


@both
def test_a_server_with_another_model_is_refused_at_the_first_update(backend: str) -> None:
    fake = FAKES[backend](small_decoder(small_spec(hidden=16)), decode)
    with (
        pytest.raises(UserError, match=r"cannot load the weights \(.*size mismatch.*same model"),
        connected(backend, fake),
    ):
        pass


@both
def test_settings_that_cannot_work_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"transport": "ipc"}, "needs a GPU: use 'folder'"),
        ({"options": {"dtype": torch.float64}}, "has no float64"),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message), connected(backend, FAKES[backend](POLICY, decode), **settings):
            pass


@both
def test_a_failed_update_resumes_the_servers(backend: str) -> None:
    fake = FAKES[backend](POLICY, decode)
    with connected(backend, fake) as (engine, _):
        with pytest.raises(UserError, match="size mismatch"):
            engine.update_weights(small_decoder(small_spec(intermediate=64)), 1)
        assert not fake.paused and engine.info.version == 0
        waiting = threading.Thread(
            target=lambda: generate(engine, [Request(PROMPT, SamplingParams(max_new_tokens=4), 0)])
        )
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()


@pytest.mark.parametrize(("stops", "expected"), [(("CD",), 4), (("D", "B"), 2), (("x",), 0)])
def test_the_first_stop_string_ends_the_tokens(stops: tuple[str, ...], expected: int) -> None:
    assert first_stop([0, 1, 2, 3, 4], stops, StopStrings(decode)) == expected


def test_seeds_of_samples_differ_and_fit_into_64_bits() -> None:
    seeds = {sample_seed(seed, sample, place) for seed in range(3) for sample in range(3) for place in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)


@both
def test_servers_without_an_interpreter_or_package_are_reported(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of servers that did not start are kept
    for settings, message in (
        ({"python": "/no/python"}, f"{backend}.python = '/no/python' is not a program"),
        ({}, f"is not installed in this environment: set {backend}.python"),
    ):
        with pytest.raises(UserError, match=message):
            launched_servers(backend, **settings).start(POLICY, lambda folder: None)


@both
def test_servers_get_their_devices_and_no_variables_of_torchrun(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    for name in variables:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    environment = launched_servers(backend)._environment(0)
    assert not set(variables) & set(environment) and environment["PATH"] == os.environ["PATH"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert launched_servers(backend, {"device": "cuda:2"})._environment(0)["CUDA_VISIBLE_DEVICES"] == "6"
    assert launched_servers(backend, devices=["1", "2,3"])._environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
