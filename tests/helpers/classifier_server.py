"""A random classification model behind a real server, and the comparison of a judge's scores with transformers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from reward_model_parts import COMMON, WORDS, save_classifier, transformers_logits

from assay.config import JudgeConfig
from assay.engine.remote.launch import plain_environment
from assay.rewards.reward_model import RewardModelJudge
from assay.system.program import SupervisedProgram, free_port
from assay.types import Prompt, Status

NAME = "reward"  # of the served model
MAX_LENGTH = 128  # tokens
START_S = 600.0
QUESTION, REPLY = {"role": "user", "content": "what is two plus"}, {"role": "assistant", "content": "nice five"}
PROMPTS = [Prompt("one", (QUESTION,), "4"), Prompt("two", (QUESTION, REPLY, QUESTION), "4")]
ANSWERS = [" ".join(COMMON[-size:]) for size in range(1, 9)] + ["very " * 80]
CASES = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]


def save_served_classifier(folder: Path, labels: int) -> Path:
    """A Llama with heads of size 64, which all servers can serve."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = MAX_LENGTH
    return save_classifier(folder, labels, family="llama", scale=0.12, eos_token_id=WORDS.index("<end>"), **sizes)


@contextmanager
def running(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that is ready. `command`: without host and port; the log is written to `folder`."""
    port = free_port()
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    program = SupervisedProgram(words, folder / "server.log", plain_environment() | dict(environment))
    try:
        wait_until_ready(program, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        program.close()


def wait_until_ready(program: SupervisedProgram, url: str) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while True:
            assert program.ended is None, f"{program.ended}: {program.log.read_text(errors='replace')[-4000:]}"
            assert time.monotonic() < deadline, program.tail()
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)


def judge_of(url: str, **settings: Any) -> RewardModelJudge:
    values = {"kind": "reward_model", "model": NAME, "url": url, "cache": "", "retries": 0, "timeout_s": 300}
    return RewardModelJudge(JudgeConfig(**values | settings))


def judged_outputs(url: str, labels: int, **settings: Any) -> torch.Tensor:
    """All outputs of the served model for each case, from judges that select one label each."""
    columns = []
    for label in range(labels):
        with judge_of(url, label=label, **settings) as judge:
            verdicts = judge.judge([(answer, prompt.answer, judge.fields(prompt)) for prompt, answer in CASES])
            assert all(one.status in (Status.OK, Status.WRONG) for one in verdicts), verdicts
            assert judge.usage.requests == len(CASES) and judge.usage.prompt_tokens > 10 * len(CASES)
        columns.append([one.parts["score"] for one in verdicts])
    return torch.tensor(columns).T


def check_outputs(outputs: torch.Tensor, folder: Path, dtype: str) -> None:
    """Compare with transformers in float32. In another dtype, its own rounding is the limit."""
    talks = [[*map(dict, prompt.messages), {"role": "assistant", "content": answer}] for prompt, answer in CASES]
    expected = torch.tensor(transformers_logits(folder, talks))
    noise = (torch.tensor(transformers_logits(folder, talks, dtype)) - expected).abs().mean()
    limit = max(2e-5, 2 * float(noise))
    gap = (outputs - expected).abs()
    print(f"gap: mean {gap.mean():.2g}, largest {gap.max():.2g}; rounding of transformers: mean {noise:.2g}")
    assert gap.mean() < limit and gap.max() < 10 * limit
    assert (expected.roll(1, 0) - expected).abs().mean() > 10 * limit  # another order would be noticed


def check_long_answer(url: str, message: str, **settings: Any) -> None:
    """A conversation that the model cannot read fails alone; `message`: of the server."""
    with judge_of(url, **settings) as judge:
        fields = judge.fields(PROMPTS[0])
        failed, good = judge.judge([("very " * 2 * MAX_LENGTH, "4", fields), ("four", "4", fields)])
    assert failed.status is Status.ERROR and "answered 400" in failed.detail, failed
    assert re.search(message, failed.detail), failed.detail
    assert good.status in (Status.OK, Status.WRONG)
