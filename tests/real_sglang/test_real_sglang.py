"""The engine sglang with real servers on a GPU: samples, log-probabilities, weight updates, memory, training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_server import FEW, MEAN_GAP, ROOT, TEXT, check_killed_server, finish, gap_of_scores, hf_scores, scores
from small_run import SmallRuns
from stepped import Stepped

from assay.engine.base import Finished, Request, SamplingParams
from assay.engine.client import generate
from assay.engine.remote.transport import CHUNK_BYTES, FolderTransport, IpcTransport
from assay.integrations.sglang import SGLangEngine
from assay.models import Decoder
from assay.text import Tokenizer
from assay.types import Finish

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.gpu]


def test_log_probabilities_at_temperature_0_7_are_those_of_the_trainer(
    engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer, model_folder: Path
) -> None:
    engine.update_weights(policy, 1)
    exact, rounded = (hf_scores(model_folder, dtype) for dtype in (torch.float32, engine.info.dtype))
    prompt = tokenizer.encode(TEXT)
    params = SamplingParams(n=8, temperature=0.7, max_new_tokens=24)
    completions = generate(engine, [Request(prompt, params, seed=3)])[0]
    assert len({tuple(one.token_ids) for one in completions}) > 1
    for completion in completions:
        ids = [*prompt, *completion.token_ids]
        noise = float((rounded(ids, 0.7) - exact(ids, 0.7)).abs().mean())
        limit = max(MEAN_GAP, 2 * noise)  # what transformers itself has in this dtype
        expected = scores(policy, ids, 0.7)[len(prompt) - 1 :]
        gap = (torch.tensor(completion.engine_logprobs) - expected).abs()
        assert gap.mean() < limit and gap.max() < 10 * limit
        cold = scores(policy, ids)[len(prompt) - 1 :]  # at temperature 1: must fit worse
        assert (cold - expected).abs().mean() > 2 * gap.mean()


def test_stop_tokens_stop_strings_and_forbidden_tokens(
    engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer
) -> None:
    engine.update_weights(policy, 3)
    prompt = tokenizer.encode(TEXT)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    ids = generate(engine, [Request(prompt, greedy, 0)])[0][0].token_ids
    (cut,) = generate(engine, [Request(prompt, replace(greedy, stop_token_ids=(ids[3],)), 0)])[0]
    assert cut.token_ids == ids[: ids.index(ids[3]) + 1] and cut.finish is Finish.STOP
    stop = tokenizer.decode(ids[2:4])
    (cut,) = generate(engine, [Request(prompt, replace(greedy, stop=(stop,)), 0)])[0]
    assert stop in tokenizer.decode(cut.token_ids) and cut.token_ids == ids[: len(cut.token_ids)]
    assert stop not in tokenizer.decode(cut.token_ids[:-1]) and cut.finish is Finish.STOP
    (other,) = generate(engine, [Request(prompt, replace(greedy, forbidden_token_ids=(ids[0],)), 0)])[0]
    assert ids[0] not in other.token_ids
    (late,) = generate(engine, [Request(prompt, replace(greedy, stop_token_ids=(ids[0],), min_new_tokens=5), 0)])[0]
    assert len(late.token_ids) >= 5


def checksums(engine: SGLangEngine) -> dict[str, str]:
    """SGLang's own checksums of the weights in the server's memory, where q, k and v, or gate and up, are one."""
    answer = engine.call(engine.servers[0], "POST", "/weights_checker", {"action": "checksum"})
    (rank,) = answer["ranks"]
    return rank["checksums"]


@contextmanager
def using(engine: SGLangEngine, kind: str) -> Iterator[None]:
    """Send weights through GPU memory in many chunks, some of which end within a fused layer, or through a folder."""
    chosen = engine.transport
    assert isinstance(chosen, IpcTransport)  # by "auto": the server is on the trainer's GPU
    folder = FolderTransport("", torch.bfloat16)
    engine.transport = chosen if kind == "ipc" else folder
    chosen.chunk_bytes = 2**18
    try:
        yield
    finally:
        folder.close()
        engine.transport, chosen.chunk_bytes = chosen, CHUNK_BYTES


@pytest.mark.parametrize("kind", ["folder", "ipc"])
def test_every_weight_is_replaced_by_an_update(
    engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer, kind: str
) -> None:
    """A changed weight changes exactly one checksum: a stale weight would change none."""
    with using(engine, kind):
        engine.update_weights(policy, 10)
        before = checksums(engine)
        for version, (name, weight) in enumerate(policy.weights(), start=11):
            with torch.no_grad():
                weight.view(-1)[-1] += 0.5  # the last element: also the end of each part of a fused weight
            engine.update_weights(policy, version)
            after = checksums(engine)
            changed = [one for one in after if after[one] != before[one]]
            assert len(changed) == 1, (name, changed)
            before = after
        assert gap_of_scores(engine, policy, tokenizer) < 5 * MEAN_GAP


@pytest.mark.parametrize("backup", [True, False])
def test_memory_is_released_while_the_engine_sleeps(
    engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer, backup: bool
) -> None:
    """The server has a copy of its weights in CPU memory. Without `backup`, new ones are sent all the same."""
    engine.update_weights(policy, 30)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    released = torch.cuda.mem_get_info()[0] - free
    assert released > 2**30, released  # the KV cache
    if backup:
        engine.wake()
    else:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.01)
        engine.update_weights(policy, 31)
    assert gap_of_scores(engine, policy, tokenizer) < 5 * MEAN_GAP
    assert generate(engine, [Request(tokenizer.encode(TEXT), SamplingParams(max_new_tokens=4), 0)])


def test_an_update_interrupts_running_requests_which_are_continued(
    engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer
) -> None:
    engine.update_weights(policy, 40)
    prompt = tokenizer.encode(TEXT)
    running = Stepped(engine)
    running.add(Request(prompt, SamplingParams(n=8, max_new_tokens=240 - len(prompt)), 0))
    time.sleep(0.15)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.05)
    engine.update_weights(policy, 41)
    completions = []
    while len(completions) < 8:
        completions += [event.completion for event in running.step() if isinstance(event, Finished)]
    print("version spans:", [one.versions for one in completions])
    assert all(len(one.token_ids) == 240 - len(prompt) for one in completions)
    for one in completions:
        new = one.versions[-1]
        if new[0] == 41 and new[1] > 8:
            expected = scores(policy, [*prompt, *one.token_ids])[-new[1] :]
            assert (torch.tensor(one.engine_logprobs[-new[1] :]) - expected).abs().mean() < 2 * MEAN_GAP


def test_aborted_requests_leave_the_server(engine: SGLangEngine, policy: Decoder, tokenizer: Tokenizer) -> None:
    engine.update_weights(policy, 50)
    prompt = tokenizer.encode(TEXT)
    running = Stepped(engine)
    request = running.add(Request(prompt, SamplingParams(n=8, max_new_tokens=240 - len(prompt)), 0))
    time.sleep(0.1)
    running.abort([request])
    engine.reset_prefix_cache()  # an error if requests are running
    assert generate(engine, [Request(prompt, SamplingParams(max_new_tokens=4), 0)])


def test_training_through_the_command_line_uses_a_running_server(
    engine: SGLangEngine, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SmallRuns(tmp_path)
    monkeypatch.setenv("KEY_OF_THE_SERVER", engine.launched.key)
    words = ("--model", model_folder, "--model.max_length", 256, "--sft.steps", 0, "--optim.lr", 1e-4)
    words = (*words, "--sglang.urls", engine.servers[0].url, "--sglang.api_key_env", "KEY_OF_THE_SERVER")
    run = small.process("train", ROOT / "configs/demo.toml", *FEW, "--engine", "sglang", *words)
    finish(run, small)


def test_training_starts_and_stops_its_own_server(
    engine: SGLangEngine, sglang_python: str, sglang_args: list[str], model_folder: Path, tmp_path: Path
) -> None:
    """With updates through GPU memory, and sleeping during updates."""
    small = SmallRuns(tmp_path)
    words = ["--model", model_folder, "--model.max_length", 256, "--sft.steps", 0, "--optim.lr", 1e-4]
    words += ["--sglang.python", sglang_python, "--sglang.gpu_memory", 0.3, "--engine.sleep_while_training", "true"]
    words += [f"--sglang.args={sglang_args}".replace("'", '"'), "--sglang.transport", "ipc"]
    run = small.process("train", ROOT / "configs/demo.toml", *FEW, "--engine", "sglang", *words)
    finish(run, small)


def test_a_server_that_dies_is_named_with_its_log(engine: SGLangEngine, tokenizer: Tokenizer) -> None:
    check_killed_server(engine, tokenizer)  # last: no server is left
