"""A reward model as judge: in its own process, behind endpoints, cached, mixed with verifiers; its failures."""

from __future__ import annotations

import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_model_parts import (
    TEMPLATE,
    WORDS,
    LocalWorker,
    ids_of,
    save_classifier,
    save_tokenizer,
    transformers_logits,
)
from stub_endpoint import Fault, message, stub_endpoint

from assay.config import JudgeConfig
from assay.rewards import JudgePanel, JudgePool, MathJudge, reward_model
from assay.rewards.model_judge import ModelJudge
from assay.system.spawn import WorkerDied
from assay.types import Prompt, Status, UserError

PROMPT = Prompt("p", ({"role": "user", "content": "what is two plus two"},), "4")
ANSWERS = ["four", "five", "very very nice four"]
USAGE = {"prompt_tokens": 9, "completion_tokens": 0}


def settings(**values: Any) -> JudgeConfig:
    return JudgeConfig(**{"kind": "reward_model", "cache": "", "retries": 0, "device": "cpu"} | values)


def items(judge: reward_model.RewardModelJudge, answers: list[str] = ANSWERS) -> list[Any]:
    return [(answer, PROMPT.answer, judge.fields(PROMPT)) for answer in answers]


def talk(answer: str) -> list[dict[str, str]]:
    return [dict(PROMPT.messages[0]), {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def logits(folder: Path) -> list[float]:
    return [outputs[0] for outputs in transformers_logits(folder, [talk(answer) for answer in ANSWERS])]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model.RewardModelProcess, "_start", lambda process: LocalWorker(*process._load))


def classify_reply(outputs: list[float]) -> dict[str, Any]:
    data = [{"index": 0, "label": "LABEL_0", "probs": outputs, "num_classes": len(outputs)}]
    return {"id": "classify-1", "object": "list", "data": data, "usage": USAGE}


@pytest.mark.slow
def test_the_reward_is_the_score_of_the_model_in_its_own_process(folder: Path, logits: list[float]) -> None:
    with reward_model.RewardModelJudge(settings(model=str(folder))) as judge:
        assert judge.process.worker is None  # it starts with the first call
        assert [verdict.reward for verdict in judge.judge(items(judge))] == pytest.approx(logits, abs=1e-5)
        os.kill(judge.process.worker.process.pid, signal.SIGKILL)
        failed = judge.judge(items(judge))
        assert {verdict.status for verdict in failed} == {Status.ERROR} and "ended" in failed[0].detail


def test_a_process_that_dies_fails_the_answers_and_is_started_again(
    folder: Path, logits: list[float], in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: Any) -> None:
        raise WorkerDied(-signal.SIGKILL)

    with reward_model.RewardModelJudge(settings(model=str(folder))) as judge:
        judge.judge(items(judge)[:1])
        monkeypatch.setattr(judge.process.worker, "call", die)
        failed = judge.judge(items(judge))
        assert {verdict.status for verdict in failed} == {Status.ERROR} and "SIGKILL" in failed[0].detail
        assert [verdict.reward for verdict in judge.judge(items(judge))] == pytest.approx(logits, abs=1e-5)


def test_a_model_that_cannot_be_loaded_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def start(process: reward_model.RewardModelProcess) -> None:
        tried.append(process)
        raise UserError("there is no such model")

    monkeypatch.setattr(reward_model.RewardModelProcess, "_start", start)
    answers = [(f"answer {i}", "", {"question": "?"}) for i in range(3 * reward_model.AT_ONCE)]
    with (
        reward_model.RewardModelJudge(settings(model="nowhere")) as judge,
        pytest.raises(UserError, match="there is no such model"),
    ):
        judge.judge(answers)
    assert len(tried) == 1


def test_closing_ends_a_process_that_is_loading_its_model(tmp_path: Path) -> None:
    """Otherwise the program would not end before the model is loaded."""
    started, process = threading.Event(), reward_model.RewardModelProcess("model", "cpu")

    class Worker:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.ended = threading.Event()

        def call(self, method: str, *arguments: Any) -> None:
            started.set()
            assert method == "load" and self.ended.wait(60)
            raise WorkerDied(-signal.SIGKILL)

        def close(self) -> None:
            self.ended.set()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(reward_model, "RemoteWorker", Worker)
        call = pool.submit(process.call, "outputs")
        assert started.wait(60)
        process.close()
        with pytest.raises(WorkerDied):
            call.result(60)
        with pytest.raises(RuntimeError, match="closed"):
            process.call("outputs")
    assert process.worker is None


def test_equal_answers_are_judged_once_and_outputs_are_cached(
    folder: Path, logits: list[float], tmp_path: Path, in_this_process: None
) -> None:
    threshold = sum(sorted(logits)[:2]) / 2
    cfg, reported = settings(model=str(folder), cache=str(tmp_path / "cache"), threshold=threshold), list[int]()
    with reward_model.RewardModelJudge(cfg) as judge:
        verdicts = judge.judge(items(judge, [*ANSWERS, ANSWERS[0]]), lambda done, _: reported.append(done))
    assert [verdict.parts["score"] for verdict in verdicts] == [verdict.reward for verdict in verdicts]
    assert sum(verdict.status is Status.OK for verdict in verdicts[:3]) == 2 and judge.judged == 3
    assert reported == [1, 2, 3, 4] and verdicts[3] == verdicts[0]
    with reward_model.RewardModelJudge(cfg) as again:
        assert again.judge(items(again)) == verdicts[:3]
        assert again.process.worker is None and again.cached == 3  # no process was started
        assert "3 from the cache" in again.describe_usage()
    before = reward_model.local_identity(str(folder))  # part of the requests by which replies are cached
    os.utime(folder / "model.safetensors")
    assert reward_model.local_identity(str(folder)) != before  # another model in the same folder


@pytest.mark.parametrize("outputs", ["[NaN]", "[1e999]", "[1" + "0" * 400 + "]", '["1"]', "[true]", "[]"])
def test_cached_outputs_that_are_not_finite_numbers_are_requested_again(tmp_path: Path, outputs: str) -> None:
    with (
        stub_endpoint(lambda _: classify_reply([0.25]), plain=True) as server,
        reward_model.RewardModelJudge(settings(model="rm", url=server.url, cache=str(tmp_path))) as judge,
    ):
        (first,) = judge.judge(items(judge, ["a"]))
        (file,) = tmp_path.rglob("*.json")
        file.write_text(f'{{"outputs": {outputs}}}')
        with pytest.warns(UserWarning, match="another form"):
            assert judge.judge(items(judge, ["a"])) == [first]
        assert first.reward == 0.25 and len(server.requests) == 2


def test_offset_factor_and_sigmoid_scale_the_score() -> None:
    assert reward_model.reward_of(3.0, settings(model="m", offset=1.0, factor=0.5)) == 1.0
    assert reward_model.reward_of(3.0, settings(model="m", offset=3.0, sigmoid=True)) == 0.5
    for score in (-800.0, -2.0, 2.0, 800.0):
        exact = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
        assert reward_model.reward_of(score, settings(model="m", sigmoid=True)) == pytest.approx(exact)


def test_one_of_several_labels_or_their_expected_value_is_the_score() -> None:
    outputs = [math.log(0.1), math.log(0.6), math.log(0.3)]
    assert reward_model.score_of(outputs, settings(model="m", label=2)) == outputs[2]
    assert reward_model.score_of(outputs, settings(model="m", label_values=[1.0, 2.0, 3.0])) == pytest.approx(
        0.1 + 1.2 + 0.9
    )
    with pytest.raises(UserError, match=r"judge.label = 3, but the model has 3 outputs"):
        reward_model.score_of(outputs, settings(model="m", label=3))
    with pytest.raises(UserError, match=r"judge.label_values has 2 values, the model 3 outputs"):
        reward_model.score_of(outputs, settings(model="m", label_values=[1.0, 2.0]))
    with pytest.raises(UserError, match="not finite"):
        reward_model.score_of([math.nan], settings(model="m"))


def test_an_answer_that_is_too_long_is_a_failure_not_a_zero(folder: Path, in_this_process: None) -> None:
    with reward_model.RewardModelJudge(settings(model=str(folder))) as judge:
        panel = JudgePanel(judge, 2.0, JudgePool(MathJudge("hash"), workers=0))
        texts = ["four #### 4", "five #### 5", "very " * 40]
        ((right, wrong, failed),) = panel.judge_groups([(texts, "4", judge.fields(PROMPT))])
    assert (right.status, wrong.status, failed.status) == (Status.OK, Status.WRONG, Status.ERROR)
    assert right.reward == pytest.approx(1.0 + 2.0 * right.parts["judge"])
    assert failed.reward == 0.0 and "49 tokens" in failed.detail  # training masks it: see its status


def test_missing_models_and_tokenizers_are_named(tmp_path: Path, in_this_process: None) -> None:
    judge = reward_model.RewardModelJudge(settings(model=str(tmp_path / "missing")))
    with judge, pytest.raises(UserError, match=r"judge.model: '.*missing' cannot be loaded"):
        judge.judge(items(judge))
    with pytest.raises(UserError, match=r"set judge.model"):
        reward_model.RewardModelJudge(settings())
    with pytest.raises(UserError, match=r"needs judge.tokenizer"):
        reward_model.RewardModelJudge(settings(model="rm", url="http://127.0.0.1:1", api="sglang"))


@pytest.mark.parametrize("with_v1", ["", "/v1"])
def test_vllm_gets_the_messages_and_its_outputs_are_the_scores(tmp_path: Path, with_v1: str) -> None:
    scores = {"four": 1.5, "five": -2.0}
    with stub_endpoint(lambda body: classify_reply([scores[body["messages"][-1]["content"]]]), plain=True) as server:
        cfg = settings(model="rm", url=server.url + with_v1, cache=str(tmp_path / "cache"), extra={"priority": 1})
        with reward_model.RewardModelJudge(cfg) as judge:
            verdicts = judge.judge(items(judge, ["four", "five", "four"]))
            assert judge.judge(items(judge, ["four"])) == verdicts[:1]
        assert [verdict.reward for verdict in verdicts] == [1.5, -2.0, 1.5]
        assert (judge.usage.requests, judge.usage.prompt_tokens, server.paths) == (2, 18, ["/classify"] * 2)
        for body in server.requests:
            expected = {"model": "rm", "messages": talk(body["messages"][-1]["content"]), "priority": 1}
            assert body == expected | {"use_activation": False}


@pytest.mark.parametrize(
    ("api", "path", "key", "reply"),
    [
        ("pooling", "/pooling", "input", {"data": [{"object": "pooling", "data": [[9.0], [0.25]]}], "usage": USAGE}),
        ("sglang", "/classify", "input_ids", {"embedding": 0.25, "meta_info": {"prompt_tokens": 9}}),
    ],
)
def test_token_ids_are_sent_if_the_tokenizer_is_known(
    tmp_path: Path, in_this_process: None, api: str, path: str, key: str, reply: dict[str, Any]
) -> None:
    save_tokenizer(tmp_path)
    with stub_endpoint(lambda _: reply, plain=True) as server:
        with reward_model.RewardModelJudge(
            settings(model="rm", url=server.url, api=api, tokenizer=str(tmp_path))
        ) as judge:
            assert judge.judge(items(judge, ["four"]))[0].reward == 0.25
        (body,) = server.requests
    assert server.paths == [path] and judge.usage.prompt_tokens == 9 and "messages" not in body
    assert body[key] == ids_of("<user> what is two plus two <end> <assistant> four <end>")


def test_failures_of_the_endpoint_are_statuses() -> None:
    replies = {
        "four": classify_reply([1.0]),
        "five": Fault(400, message("broken")),
        "very very nice four": {"data": [{"text": "no"}]},
    }
    with stub_endpoint(lambda body: replies[body["messages"][-1]["content"]], plain=True) as server:
        with reward_model.RewardModelJudge(settings(model="rm", url=server.url)) as judge:
            good, refused, garbage = judge.judge(items(judge))
        assert good.status is Status.OK and refused.status is garbage.status is Status.ERROR
        assert "answered 400: broken" in refused.detail and "no outputs of a classification model" in garbage.detail
    with reward_model.RewardModelJudge(settings(model="rm", url=server.url)) as judge:
        (gone,) = judge.judge(items(judge, ["four"]))
        assert gone.status is Status.ERROR and "not reachable" in gone.detail


def test_outputs_of_another_form_are_none() -> None:
    assert reward_model.outputs_in({"embedding": [0.25]}) == [0.25]
    for answer in ({}, {"data": []}, {"data": [{"probs": []}]}, {"embedding": ["a"]}, {"embedding": [10**400]}):
        assert reward_model.outputs_in(answer) is None


def test_the_kind_of_judge_is_a_setting() -> None:
    with reward_model.make_model_judge(settings(model="rm", url="http://127.0.0.1:1")) as judge:
        assert isinstance(judge, reward_model.RewardModelJudge)
    with reward_model.make_model_judge(
        JudgeConfig(model="m", url="http://127.0.0.1:1", rubric="Be nice.", cache="")
    ) as judge:
        assert isinstance(judge, ModelJudge)


# The process of a reward model, called without a process: batches, templates and errors


SPOKEN = ["four", "five", "very very nice four", "bad", "the answer is very very very very good"]


def loaded(folder: Path) -> reward_model.RewardModelWorker:
    worker = reward_model.RewardModelWorker()
    worker.load(str(folder), "cpu")
    return worker


@pytest.mark.parametrize(("labels", "pad_id"), [(1, 0), (3, 0), (1, None)])  # without: one sequence at a time
def test_outputs_are_the_logits_of_transformers_in_batches_of_any_size(
    tmp_path: Path, labels: int, pad_id: int | None
) -> None:
    worker, talks = loaded(save_classifier(tmp_path, labels, pad_id=pad_id)), [talk(answer) for answer in SPOKEN]
    expected = transformers_logits(tmp_path, talks)
    for batch_tokens in (1, 40, 10_000):
        for got, wanted in zip(worker.outputs(talks, batch_tokens), expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5)
    assert len({round(outputs[0], 3) for outputs in expected}) == len(SPOKEN)  # or the order could be wrong
    info = worker.info()
    assert info["labels"] == [f"LABEL_{n}" for n in range(labels)] and info["max_length"] == 32
    assert (info["activation"], info["where"]) == ("softmax" if labels > 1 else "sigmoid", "float32 on cpu")
    worker.load(str(tmp_path), "cpu", dtype="bfloat16")
    assert worker.info()["where"] == "bfloat16 on cpu"


def test_batches_have_similar_lengths_and_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, sizes = loaded(save_classifier(tmp_path)), list[list[int]]()

    def compute(sequences: Any) -> list[list[float]]:
        sizes.append([len(sequence) for sequence in sequences])
        return [[0.0] for _ in sequences]

    monkeypatch.setattr(worker, "_compute", compute)
    worker.outputs([talk(answer) for answer in SPOKEN], batch_tokens=30)
    assert [size for batch in sizes for size in batch] == sorted(size for batch in sizes for size in batch)
    assert all(max(batch) * len(batch) <= 30 for batch in sizes) and len(sizes) < len(SPOKEN)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TEMPLATE, "<user> what is two plus two <end> <assistant> four <end>"),  # no further special tokens
        (None, "what is two plus two four"),  # question and answer as a pair
    ],
)
def test_conversations_are_rendered_by_the_template(tmp_path: Path, template: str | None, text: str) -> None:
    save_tokenizer(tmp_path, template)
    worker = reward_model.RewardModelWorker()
    worker.load(str(tmp_path), "cpu", with_model=False)
    assert worker.render([talk("four")]) == [ids_of(text)]


def test_a_folder_without_a_classification_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'.*' cannot be loaded as a classification model"):
        loaded(tmp_path / "missing")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2, vocab_size=len(WORDS))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    save_tokenizer(tmp_path / "lm")
    with pytest.raises(UserError, match=r"lacks the weights score.weight"):
        loaded(tmp_path / "lm")


def test_texts_and_token_ids_are_classified_like_conversations(tmp_path: Path) -> None:
    worker = loaded(save_classifier(tmp_path))
    ids = ids_of("<user> what is two plus two <end> <assistant> four <end>")
    text = "<user> what is two plus two <end> <assistant> four <end>"
    results = worker.classify([talk("four"), text, ids, [*ids, 18], [*ids, -1], ""], 10_000)
    (first, tokens), *others = results
    assert tokens == len(ids) and [count for _, count in others] == [len(ids), len(ids), len(ids) + 1, len(ids) + 1, 0]
    assert others[0][0] == others[1][0] == pytest.approx(first)
    assert [problem for problem, _ in others[2:]] == [
        *["a token id is outside the vocabulary of 18"] * 2,
        "the input has no tokens",
    ]
    assert worker.classify([ids], 10_000, max_tokens=5) == [("the input has 10 tokens; the maximum is 5", 10)]


def test_messages_that_the_template_rejects_fail_alone(tmp_path: Path) -> None:
    rejects = "{% if messages|length > 2 %}{{ raise_exception('too many turns') }}{% endif %}"
    worker = loaded(save_classifier(tmp_path, template=rejects + TEMPLATE))
    long = [*talk("four"), *talk("five")]
    problem = "the chat template rejects the messages (too many turns)"
    assert worker.render([long, talk("four")]) == [problem, *worker.render([talk("four")])]
    failed, good = worker.outputs([long, talk("four")], 10_000)
    assert failed == problem and isinstance(good, list)


def test_a_batch_that_does_not_fit_into_memory_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded(save_classifier(tmp_path))
    expected = worker.outputs([talk(answer) for answer in SPOKEN], 10_000)
    forward = worker.model.forward

    def limited(input_ids: Any, **rest: Any) -> Any:
        if input_ids.numel() > 16:
            raise torch.OutOfMemoryError
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(worker.model, "forward", limited)
    outputs = worker.outputs([talk(answer) for answer in SPOKEN], 10_000)
    assert outputs[4] == "there is not enough memory for 17 tokens"
    assert outputs[:4] == [pytest.approx(values, abs=1e-5) for values in expected[:4]]
