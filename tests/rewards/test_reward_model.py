"""A reward model as judge: in its own process, behind endpoints, cached, mixed with verifiers; its failures."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from reward_model_parts import ids_of, save_classifier, save_tokenizer, transformers_logits
from stub_endpoint import Fault, message, stub_endpoint

from assay.config import JudgeConfig
from assay.rewards import JudgePanel, JudgePool, MathJudge, RewardMix
from assay.rewards.model_judge import ModelJudge
from assay.rewards.reward_model import (
    RewardModelJudge,
    local_identity,
    make_model_judge,
    outputs_in,
    reward_of,
    score_of,
)
from assay.rewards.reward_model_worker import RewardModelProcess
from assay.types import Prompt, Status, UserError

PROMPT = Prompt("p", ({"role": "user", "content": "what is two plus two"},), "4")
ANSWERS = ["four", "five", "very very nice four"]
USAGE = {"prompt_tokens": 9, "completion_tokens": 0}


def settings(**values: Any) -> JudgeConfig:
    return JudgeConfig(**{"kind": "reward_model", "cache": "", "retries": 0, "device": "cpu"} | values)


def items(judge: RewardModelJudge, answers: list[str] = ANSWERS) -> list[Any]:
    return [(answer, PROMPT.answer, judge.fields(PROMPT)) for answer in answers]


def talk(answer: str) -> list[dict[str, str]]:
    return [dict(PROMPT.messages[0]), {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def logits(folder: Path) -> list[float]:
    return [one[0] for one in transformers_logits(folder, [talk(answer) for answer in ANSWERS])]


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[RewardModelJudge]:
    """One process for several tests: it takes seconds to start."""
    with RewardModelJudge(settings(model=str(folder))) as judge:
        yield judge


def classify_reply(outputs: list[float]) -> dict[str, Any]:
    data = [{"index": 0, "label": "LABEL_0", "probs": outputs, "num_classes": len(outputs)}]
    return {"id": "classify-1", "object": "list", "data": data, "usage": USAGE}


def test_the_reward_is_the_score_of_the_model_in_its_own_process(
    folder: Path, logits: list[float], started: RewardModelJudge, tmp_path: Path
) -> None:
    cfg = settings(model=str(folder), cache=str(tmp_path / "cache"), threshold=sum(sorted(logits)[:2]) / 2)
    judge, reported = RewardModelJudge(cfg), list[int]()
    judge.process = started.process
    verdicts = judge.judge(items(judge, [*ANSWERS, ANSWERS[0]]), lambda done, _: reported.append(done))
    assert [verdict.reward for verdict in verdicts] == pytest.approx([*logits, logits[0]], abs=1e-5)
    assert [verdict.parts["score"] for verdict in verdicts] == [verdict.reward for verdict in verdicts]
    assert sum(verdict.status is Status.OK for verdict in verdicts[:3]) == 2 and judge.judged == 3  # equal ones once
    assert reported == [0, 4]
    with RewardModelJudge(cfg) as again:
        assert again.judge(items(again)) == verdicts[:3]
        assert again.process.worker is None and again.cached == 3  # no process was started
        assert "3 from the cache" in again.describe_usage()
    before = local_identity(str(folder))  # part of the requests by which replies are cached
    os.utime(folder / "model.safetensors")
    assert local_identity(str(folder)) != before  # another model in the same folder


def test_cached_outputs_that_are_not_finite_numbers_are_requested_again(tmp_path: Path) -> None:
    with stub_endpoint(lambda _: classify_reply([0.25]), plain=True) as server:
        for number, outputs in enumerate(("[NaN]", "[1e999]", "[1" + "0" * 400 + "]", '["1"]', "[true]", "[]")):
            with RewardModelJudge(settings(model="rm", url=server.url, cache=str(tmp_path / str(number)))) as judge:
                (first,) = judge.judge(items(judge, ["a"]))
                (file,) = (tmp_path / str(number)).rglob("*.json")
                file.write_text(f'{{"outputs": {outputs}}}')
                with pytest.warns(UserWarning, match="another form"):
                    assert judge.judge(items(judge, ["a"])) == [first]
                assert first.reward == 0.25 and len(server.requests) == 2 * number + 2


def test_offset_factor_and_sigmoid_scale_the_score() -> None:
    assert reward_of(3.0, settings(model="m", offset=1.0, factor=0.5)) == 1.0
    assert reward_of(3.0, settings(model="m", offset=3.0, sigmoid=True)) == 0.5
    for score in (-800.0, -2.0, 2.0, 800.0):
        exact = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
        assert reward_of(score, settings(model="m", sigmoid=True)) == pytest.approx(exact)


def test_one_of_several_labels_or_their_expected_value_is_the_score() -> None:
    outputs = [math.log(0.1), math.log(0.6), math.log(0.3)]
    assert score_of(outputs, settings(model="m", label=2)) == outputs[2]
    assert score_of(outputs, settings(model="m", label_values=[1.0, 2.0, 3.0])) == pytest.approx(0.1 + 1.2 + 0.9)
    with pytest.raises(UserError, match=r"judge.label = 3, but the model has 3 outputs"):
        score_of(outputs, settings(model="m", label=3))
    with pytest.raises(UserError, match=r"judge.label_values has 2 values, the model 3 outputs"):
        score_of(outputs, settings(model="m", label_values=[1.0, 2.0]))
    with pytest.raises(UserError, match="not finite"):
        score_of([math.nan], settings(model="m"))


def test_an_answer_that_is_too_long_is_a_failure_not_a_zero(started: RewardModelJudge) -> None:
    panel = JudgePanel(started, 2.0, JudgePool(MathJudge("hash"), workers=0))
    texts = ["four #### 4", "five #### 5", "very " * 40]
    ((right, wrong, failed),) = panel.judge_groups([(texts, "4", started.fields(PROMPT))])
    assert (right.status, wrong.status, failed.status) == (Status.OK, Status.WRONG, Status.ERROR)
    assert right.reward == pytest.approx(1.0 + 2.0 * right.parts["judge"])
    assert failed.reward == 0.0 and "49 tokens" in failed.detail  # training masks it: see its status


def test_the_reward_model_alone_is_shaped_by_the_reward_mix(started: RewardModelJudge, logits: list[float]) -> None:
    verdicts = JudgePanel(started, 1.0, mix=RewardMix(started, correct=10.0)).judge(items(started))
    assert [one.reward for one in verdicts] == pytest.approx([10 * x for x in logits], abs=1e-4)


def test_a_process_that_dies_fails_the_answers_and_is_started_again(
    started: RewardModelJudge, logits: list[float]
) -> None:
    started.judge(items(started)[:1])
    assert started.process.worker is not None
    os.kill(started.process.worker.process.pid, signal.SIGKILL)
    failed = started.judge(items(started))
    assert {one.status for one in failed} == {Status.ERROR} and "ended" in failed[0].detail
    assert [one.reward for one in started.judge(items(started))] == pytest.approx(logits, abs=1e-5)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    judge = RewardModelJudge(settings(model=str(tmp_path / "missing")))
    with judge, pytest.raises(UserError, match=r"judge.model: '.*missing' cannot be loaded"):
        judge.judge(items(judge))
    with pytest.raises(UserError, match=r"set judge.model"):
        RewardModelJudge(settings())


@pytest.mark.parametrize("with_v1", ["", "/v1"])
def test_vllm_gets_the_messages_and_its_outputs_are_the_scores(tmp_path: Path, with_v1: str) -> None:
    scores = {"four": 1.5, "five": -2.0}
    with stub_endpoint(lambda body: classify_reply([scores[body["messages"][-1]["content"]]]), plain=True) as server:
        cfg = settings(model="rm", url=server.url + with_v1, cache=str(tmp_path / "cache"), extra={"priority": 1})
        with RewardModelJudge(cfg) as judge:
            assert [one.reward for one in judge.judge(items(judge, ["four", "five", "four"]))] == [1.5, -2.0, 1.5]
            assert judge.usage.requests == 2 and judge.usage.prompt_tokens == 18
            judge.judge(items(judge, ["four"]))
        assert len(server.requests) == 2
        assert server.paths == ["/classify"] * 2
        for body in server.requests:
            expected = {"model": "rm", "messages": talk(body["messages"][-1]["content"]), "priority": 1}
            assert body == expected | {"use_activation": False}


def test_token_ids_are_sent_if_the_tokenizer_is_known(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ids = ids_of("<user> what is two plus two <end> <assistant> four <end>")
    pooled = {"data": [{"index": 0, "object": "pooling", "data": [[9.0], [0.25]]}], "usage": USAGE}
    embedded = {"embedding": 0.25, "meta_info": {"prompt_tokens": 9}}
    with closing(
        RewardModelProcess(str(tmp_path), "cpu", with_model=False)
    ) as process:  # one for both: it takes seconds
        for api, path, key, reply in (
            ("pooling", "/pooling", "input", pooled),
            ("sglang", "/classify", "input_ids", embedded),
        ):
            with stub_endpoint(lambda _, reply=reply: reply, plain=True) as server:
                judge = RewardModelJudge(settings(model="rm", url=server.url, api=api, tokenizer=str(tmp_path)))
                judge.process = process
                assert judge.judge(items(judge, ["four"]))[0].reward == 0.25
                assert judge.usage.prompt_tokens == 9
                (body,) = server.requests
                assert server.paths == [path] and body[key] == ids and "messages" not in body
                judge.endpoint.close()


def test_failures_of_the_endpoint_are_statuses() -> None:
    replies = {
        "four": classify_reply([1.0]),
        "five": Fault(400, message("broken")),
        "very very nice four": {"data": [{"text": "no"}]},
    }
    with stub_endpoint(lambda body: replies[body["messages"][-1]["content"]], plain=True) as server:
        with RewardModelJudge(settings(model="rm", url=server.url)) as judge:
            good, refused, garbage = judge.judge(items(judge))
        assert good.status is Status.OK and refused.status is garbage.status is Status.ERROR
        assert "answered 400: broken" in refused.detail and "no outputs of a classification model" in garbage.detail
    with RewardModelJudge(settings(model="rm", url=server.url)) as judge:
        (gone,) = judge.judge(items(judge, ["four"]))
        assert gone.status is Status.ERROR and "not reachable" in gone.detail


def test_outputs_are_read_from_every_form_of_reply_and_no_other() -> None:
    assert outputs_in({"embedding": [0.25]}) == outputs_in({"embedding": 0.25}) == [0.25]
    for answer in ({}, {"data": []}, {"data": [{"probs": []}]}, {"embedding": ["a"]}, {"embedding": [10**400]}):
        assert outputs_in(answer) is None


def test_sglang_needs_the_tokenizer() -> None:
    with pytest.raises(UserError, match=r"needs judge.tokenizer"):
        RewardModelJudge(settings(model="rm", url="http://127.0.0.1:1", api="sglang"))


def test_the_kind_of_judge_is_a_setting() -> None:
    with make_model_judge(settings(model="rm", url="http://127.0.0.1:1")) as judge:
        assert isinstance(judge, RewardModelJudge)
    with make_model_judge(JudgeConfig(model="m", url="http://127.0.0.1:1", rubric="Be nice.", cache="")) as judge:
        assert isinstance(judge, ModelJudge)
