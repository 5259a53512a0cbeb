"""Models without training: `load`, `generate`, `evaluate`, `score`, `serve`, `doctor` and `compare`."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from small_run import SmallRuns, gpt2_folder
from torch._subclasses import FakeTensor  # of torch.compile, without memory
from waiting import until

from assay.api.evaluation import evaluate, score
from assay.api.inspection import compare, doctor
from assay.api.models import LoadedModel, generate, load, serve
from assay.api.notebook import html_paragraph, html_pre, html_table
from assay.tasks import make_task
from assay.types import Status, UserError

QUESTION = "Ann has 3 coins . She finds 4 . How many coins ?"
ROWS = [{"text": f"Ann has {n} coins . How many coins ?", "gold": n} for n in range(6)]


def length_reward(completion: str, answer: str) -> float:
    return float(len(completion) % 2)


async def coroutine_reward(completion: str, answer: str) -> float:
    await asyncio.sleep(0)
    return 0.5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, no_curves: None) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("used"))
    assert small.train("--save.keep", 9) == 0
    return small


@pytest.fixture(scope="module")
def model(small: SmallRuns) -> LoadedModel:
    return load("run:small@last", runs_dir=small.runs)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2_folder(tmp_path_factory.mktemp("models") / "gpt2")


def test_generate_returns_what_was_asked_for(model: LoadedModel) -> None:
    single = model.generate(QUESTION)
    assert len(single.token_ids) == len(single.logprobs) == 8 and single.finish == "length"  # the length of the run
    assert str(single) == single.text and single.prompt == QUESTION
    messages = [{"role": "user", "content": QUESTION}]
    assert model.generate(messages).token_ids == single.token_ids
    first, other, again = model.generate([QUESTION, "Ben has 2 pens .", messages], max_new_tokens=5)
    assert first.token_ids == single.token_ids[:5] != again.token_ids  # a repeated prompt gets other noise
    assert len(other.token_ids) == 5
    samples = model.generate(QUESTION, samples=3)
    assert samples[0].token_ids == single.token_ids and len({tuple(answer.token_ids) for answer in samples}) == 3
    assert [len(answers) for answers in model.generate([QUESTION], samples=2)] == [2]
    assert model.generate(QUESTION, seed=1).token_ids != single.token_ids
    assert model.generate(QUESTION, system="Count .", temperature=0) != model.generate(QUESTION, temperature=0)
    word = single.text.split()[1]
    stopped = model.generate(QUESTION, stop=word)
    assert stopped.finish == "stop" and stopped.text == single.text[: single.text.index(word)]


def test_logprobs_are_those_of_transformers(gpt2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference, tokenizer = AutoModelForCausalLM.from_pretrained(gpt2), AutoTokenizer.from_pretrained(gpt2)
    with load(gpt2, device="cpu", temperature=1.0) as loaded:
        answer = loaded.generate(QUESTION, max_new_tokens=6)
        texts = loaded.logprobs(QUESTION, ["7 coins", "8"])
        scored = loaded.logprobs(QUESTION, answer)
    assert scored == pytest.approx(answer.logprobs, abs=1e-4)
    conversation = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
    for ids, values in (
        (answer.token_ids, scored),
        (tokenizer("7 coins", add_special_tokens=False).input_ids, texts[0]),
    ):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        expected = [float(logits[len(prompt) + index - 1, token]) for index, token in enumerate(ids)]
        assert values == pytest.approx(expected, abs=1e-4)


def test_a_model_in_memory_answers_like_its_folder(gpt2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gpt2)
    options = {"device": "cpu", "max_new_tokens": 5, "temperature": 0}
    answer = generate(loaded, QUESTION, tokenizer=AutoTokenizer.from_pretrained(gpt2), runs_dir=tmp_path, **options)
    assert answer.token_ids == generate(gpt2, QUESTION, **options).token_ids


def test_closed_models_leave_nothing_in_memory(small: SmallRuns) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(
            value.nbytes
            for value in gc.get_objects()
            if issubclass(type(value), torch.Tensor) and not issubclass(type(value), FakeTensor)
        )

    before, files, engines = tensors(), len(os.listdir("/proc/self/fd")), []
    for _ in range(3):
        with load("run:small@last", runs_dir=small.runs) as loaded:
            loaded.generate(QUESTION)
            engines.append(weakref.ref(loaded._opened()[1]))
    assert not any(reference() for reference in engines)
    assert tensors() <= before and len(os.listdir("/proc/self/fd")) <= files
    with pytest.raises(UserError, match="closed: load it again"):
        loaded.generate(QUESTION)


def test_evaluations_are_those_of_assay_eval(small: SmallRuns, tmp_path: Path) -> None:
    names, words = ["run:small@last", "run:small@0"], ("--eval.samples", 2, "--eval.temperature", 1)
    assert small("eval", *names, *words, "--json", tmp_path / "a.json", "--answers", tmp_path / "answers.jsonl") == 0
    options = {"samples": 2, "temperature": 1, "runs_dir": small.runs, "quiet": True}
    results = evaluate(names, **options)
    assert [result.summary for result in results] == json.loads((tmp_path / "a.json").read_text())
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [{**row, "reward": None} for row in answers] == [
        {**row, "reward": None} for result in results for row in result.answers
    ]
    first, second = results
    assert first.paired is None and second.paired is not None and second.paired["against"] == names[0]
    assert first.accuracy == first.summary["accuracy"] and list(first.pass_at_k) == [1, 2]
    assert len(first.failures) == sum(row["status"] != "ok" for row in first.answers) > 0
    assert "8 problems" in repr(evaluate(names[0], split="validation", examples=8, **options))
    assert "run:small@0" in results._repr_html_() and json.dumps(results.to_dict())


def test_data_rewards_and_loaded_models_of_the_program(small: SmallRuns, model: LoadedModel) -> None:
    columns, options = {"question": "text", "answer": "gold"}, {"runs_dir": small.runs, "quiet": True}
    result = evaluate(model, data=ROWS, columns=columns, reward=length_reward, quiet=True)
    assert [row["answer"] for row in result.answers] == [str(row["gold"]) for row in ROWS]  # all of them
    assert [row["reward"] for row in result.answers] == [float(len(row["completion"]) % 2) for row in result.answers]
    named = evaluate("run:small@last", data=ROWS, columns=columns, reward=length_reward, **options)
    assert named.answers == result.answers
    task = make_task("abacus", train_size=4, eval_size=9)
    assert evaluate(model, data=task, examples=4, quiet=True).summary["n"] == 4

    async def cell() -> Any:  # of a notebook, which runs an event loop
        judged = evaluate(
            model, data=ROWS, columns=columns, reward=[length_reward, (coroutine_reward, 2.0)], quiet=True
        )
        return judged, model.generate(QUESTION), score(["a"], reward=coroutine_reward)

    judged, answer, verdicts = asyncio.run(cell())
    rewards = [row["reward"] + 1.0 for row in result.answers]
    assert [row["reward"] for row in judged.answers] == rewards and verdicts[0].reward == 0.5
    assert answer.token_ids == model.generate(QUESTION).token_ids


def test_texts_are_judged_like_assay_score(small: SmallRuns, tmp_path: Path) -> None:
    texts = ["so \\boxed{4}", "so \\boxed{5}", "4", "\\boxed{"]
    file, out = tmp_path / "texts.jsonl", tmp_path / "judged.jsonl"
    file.write_text("".join(json.dumps({"completion": text, "answer": "4"}) + "\n" for text in texts))
    from assay.cli.main import main

    assert main(["score", str(file), "--task", "gsm8k", "--out", str(out)]) == 0
    expected = [json.loads(line)["verdict"]["status"] for line in out.read_text().splitlines()]
    for verdicts in (score(texts, "4", task="gsm8k"), score(file, task="gsm8k")):
        assert [verdict.status.value for verdict in verdicts] == expected
    assert score(texts, ["4", 5, 4, 4], task="gsm8k", strict=False)[1].correct

    def endless(completion: str, answer: str, **fields: Any) -> float:
        while completion == "slow":
            pass
        return fields["points"]

    slow, quick = score(["slow", "quick"], fields=[{"points": 0}, {"points": 3}], reward=endless, timeout_s=0.5)
    assert slow.status is Status.TIMEOUT and quick.reward == 3


@pytest.mark.slow
def test_a_server_ends_with_its_block_or_its_program(small: SmallRuns, tmp_path: Path) -> None:
    with serve("run:small@last", runs_dir=small.runs, name="policy", device="cpu") as server:
        body = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
        answer = httpx.post(f"{server.openai_base_url}/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3 and "serving policy" in server.log
        with pytest.raises(UserError, match="in use"):
            serve("run:small@last", runs_dir=small.runs, port=int(server.url.rpartition(":")[2]))
    assert not answers(server.url)
    with pytest.raises(UserError, match=r"did not start: unknown run 'smal' in .*: did you mean 'small'") as error:
        serve("run:smal@last", runs_dir=small.runs)
    assert "\n" not in str(error.value)
    program = "import sys, time; from assay.api.models import serve\n"
    program += "print(serve(sys.argv[1], device='cpu').url, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program, str(small.checkpoint(2) / "model")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed program leaves the log
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        url = process.stdout.readline().strip()
        assert answers(url)
        process.kill()
    until(lambda: not answers(url))


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def test_doctor_and_compare_show_what_the_commands_print(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    small("doctor", small.config, "--optim.lr", 100)
    printed = capsys.readouterr().out
    findings = doctor(small.config, **{"optim.lr": 100})
    assert (
        "\n".join(findings.lines(1_000_000)) == printed.strip() and findings[0].severity in findings.to_dict().__str__()
    )
    assert findings[0].evidence.split()[0] in findings._repr_html_()
    assert doctor("small", runs_dir=small.runs).what == "run small (finished, 2 steps)"
    small("runs", "small", small.runs / "small")
    table = capsys.readouterr().out
    comparison = compare("small", small.runs / "small", runs_dir=small.runs)
    assert repr(comparison).split() == table.split()
    assert (
        comparison.settings == {} and comparison.paired[0]["p_value"] == 1.0 and "<table>" in comparison._repr_html_()
    )


def test_html_is_escaped() -> None:
    shown = html_table(["<a>"], [["x & y", None]], "<script>") + html_pre("<b>") + html_paragraph("<i>")
    assert not any(text in shown for text in ("<a>", "<script>", "<b>", "<i>")) and "x &amp; y" in shown


MISTAKES: list[tuple[Callable[[LoadedModel], object], str]] = [
    (lambda model: model.generate(3), "a prompt must be a text"),
    (lambda model: model.generate([{"role": "user"}]), "a prompt must be a text"),
    (lambda model: model.generate("x", temperature=-1), "bad value for 'eval.temperature' in the arguments"),
    (lambda model: model.generate([QUESTION, "Ann " * 600]), r"prompt 2.*has .* tokens"),
    (lambda model: model.logprobs("x", 3), "completion must be a text"),
    (lambda model: generate(model, "x", device="cpu"), "'device' is an argument of assay.load"),
    (lambda model: load(model.name, temprature=1), "did you mean 'temperature'"),
    (lambda model: load("no/such/folder/here"), "no/such/folder/here"),
    (lambda model: evaluate(model, device="cpu"), "'device' has no effect on a model that is loaded"),
    (lambda model: evaluate(model, data="none.jsonl"), "no file or folder none.jsonl"),
    (lambda model: evaluate([]), "give at least one model"),
    (lambda model: evaluate([model, model]), "is given twice, at least once as a loaded model"),
    (lambda model: score(["a"]), "no judge: pass task"),
    (lambda model: score(["a"], ["b", "c"], task="gsm8k"), "answers has 2 entries for 1 completion"),
    (lambda model: score(["a"], task="gsm8k"), "completion 1: the row has neither"),
    (lambda model: doctor(3), "doctor examines a run"),
    (lambda model: compare("small"), "at least two runs"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_one_line(model: LoadedModel, call: Callable[[LoadedModel], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(model)
    assert "\n" not in str(error.value)
