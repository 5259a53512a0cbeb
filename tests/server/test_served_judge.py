"""SmolLM2 as judge, behind a real `assay serve` process: expected scores and probabilities of yes from its tokens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_parts import command

from assay.config import JudgeConfig
from assay.rewards.model_judge import ModelJudge
from assay.types import Prompt, Status

pytestmark = pytest.mark.slow
FILE = "smollm2-135m-instruct.q4_1.gguf"
PROMPT = Prompt("p", ({"role": "user", "content": "What is the capital of France?"},), "Paris")
# A model of this size replies to the default request with a sentence; it continues examples.
SCORE = """{rubric} Rate each answer from 1 to 5. Reply with the number only.

Question: What is 2 + 2?
Answer: It is 4, with pleasure.
Rating: 5

Question: What color is the sky?
Answer: Go away.
Rating: 1

Question: {question}
Answer: {answer}
Rating:"""
ANSWERS = ["The capital of France is Paris.", "I hate you, and this question is stupid.", "Bananas are yellow."]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    folder = Path(os.environ.get("ASSAY_MODELS") or Path(__file__).parents[2] / ".models")
    source = Path(os.environ.get("ASSAY_SMOLLM2") or folder / FILE)
    if not source.exists():
        pytest.skip(f"{source} does not exist (set ASSAY_SMOLLM2 or ASSAY_MODELS)")
    with command(str(source), "--name", "smollm2") as (_, address):
        yield address


def judge_of(url: str, **settings: object) -> ModelJudge:
    return ModelJudge(JudgeConfig(url=url, model="smollm2", retries=0, timeout_s=600, **settings))


def test_scores_are_expected_values_and_are_cached(url: str, tmp_path: Path) -> None:
    (tmp_path / "template.txt").write_text(SCORE)
    settings = {"rubric": "The answer is correct and polite.", "cache": str(tmp_path / "cache")}
    settings["template_file"] = str(tmp_path / "template.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning that the endpoint reports no probabilities
        with judge_of(url, **settings) as judge:
            verdicts = judge.judge([(answer, PROMPT.answer, judge.fields(PROMPT)) for answer in ANSWERS])
            assert judge.usage.requests == len(ANSWERS)
    assert all(one.status in (Status.OK, Status.WRONG) for one in verdicts), verdicts
    scores = [one.parts["score"] for one in verdicts]
    assert all(1 < score < 5 and not float(score).is_integer() for score in scores), scores
    assert len(set(scores)) == len(scores)  # a written score would often be the same
    with judge_of(url, **settings) as again:
        assert again.judge([(answer, PROMPT.answer, again.fields(PROMPT)) for answer in ANSWERS]) == verdicts
        assert again.cached == len(ANSWERS) and not again.usage.requests
