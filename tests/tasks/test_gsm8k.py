from __future__ import annotations

import json
import sys

import pytest

from assay.rewards import JudgePool
from assay.tasks import GSM8K, make_task, overlap, sources
from assay.types import UserError

ROW = {
    "question": "A crate holds 1,200 nails. Two crates?",
    "answer": "Two crates hold 2*1,200 = <<2*1200=2400>>2,400 nails.\n#### 2,400",
}


def folder(tmp_path, n=30):
    for split in ("train", "test"):
        rows = [{**ROW, "question": f"{split} {number}"} for number in range(n)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path)


def test_all_gold_completions_score_one(gsm8k_folder):
    for style in ("boxed", "hash"):
        task = GSM8K(gsm8k_folder, solution_style=style)
        prompts = [prompt for split in ("train", "validation", "test") for prompt in task.prompts(split)]
        assert len(prompts) == 7473 + 1319
        with JudgePool(task.judge()) as pool:
            verdicts = pool.judge([(task.gold_completion(p), p.answer, p.fields) for p in prompts])
        assert [p.id for p, v in zip(prompts, verdicts, strict=True) if v.reward != 1.0] == []


def test_golds_and_solutions_of_the_real_files(gsm8k_folder):
    task = GSM8K(gsm8k_folder)
    prompts = [*task.prompts("train"), *task.prompts("validation"), *task.prompts("test")]
    assert all(float(prompt.answer) == int(prompt.answer) for prompt in prompts)
    assert not any("<<" in prompt.solution or "####" in prompt.solution for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert overlap(task.prompts("train"), task.prompts("test")).n_shared == 0


def test_conversion_of_a_row(tmp_path):
    prompt = make_task("gsm8k", folder(tmp_path)).prompts("test")[3]
    assert prompt.id == "gsm8k/test/3"
    assert prompt.question == "test 3\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompt.answer == "2400"
    assert prompt.solution == "Two crates hold 2*1,200 = 2,400 nails.\nThe final answer is \\boxed{2400}."
    styled = make_task("gsm8k", str(tmp_path), solution_style="hash", instruction="Go.")
    prompt = styled.prompts("test")[3]
    assert prompt.question == "test 3\nGo." and styled.bare_question(prompt) == "test 3"
    assert prompt.solution.endswith("nails.\n#### 2400")
    assert styled.judge().extract == "hash"
    kept = make_task("gsm8k", str(tmp_path), annotations=True).prompts("test")[3]
    assert kept.solution == "Two crates hold 2*1,200 = <<2*1200=2400>>2,400 nails.\nThe final answer is \\boxed{2400}."


def test_validation_is_carved_from_train(tmp_path):
    task = make_task("gsm8k", folder(tmp_path), val_size=10)
    train, validation = task.prompts("train"), task.prompts("validation")
    ids = {prompt.id for prompt in train} | {prompt.id for prompt in validation}
    assert (len(train), len(validation), len(ids)) == (20, 10, 30)
    assert ids == {f"gsm8k/train/{number}" for number in range(30)}
    again = make_task("gsm8k", str(tmp_path), val_size=10)
    assert list(again.prompts("validation")) == list(validation)
    other = make_task("gsm8k", str(tmp_path), val_size=10, seed=1)
    assert {p.id for p in other.prompts("validation")} != {p.id for p in validation}


def test_hub_datasets_of_gsm8k(monkeypatch):
    requested = []

    def load(dataset, configuration, split):
        requested.append((dataset, configuration, split))
        return [ROW] * 20

    monkeypatch.setattr(sources, "load_hub", load)
    task = make_task("gsm8k", "openai/gsm8k")
    assert len(task.prompts("test")) == 20 and len(task.prompts("train")) == 18
    assert set(requested) == {("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")}


def test_missing_hub_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(UserError, match=r'pip install "assay\[hub\]", or give path=FOLDER'):
        make_task("gsm8k").prompts("train")


def test_invalid_gsm8k_input_is_a_user_error(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "?", "answer": "seven"}\n')
    with pytest.raises(UserError, match=r'bad.jsonl:1: gsm8k: an answer must end in "#### N"'):
        make_task("gsm8k", str(file)).prompts("all")
    file.write_text('{"question": "?", "answer": ["#### 1"]}\n')
    with pytest.raises(UserError, match=r'bad.jsonl:1: gsm8k: "answer" must be text .* not list'):
        make_task("gsm8k", str(file)).prompts("all")
    file.write_text('{"question": {"text": "?"}, "answer": "#### 1"}\n')
    with pytest.raises(UserError, match=r'bad.jsonl:1: the column "question" must be text or a number, not dict'):
        make_task("gsm8k", str(file)).prompts("all")
    with pytest.raises(UserError, match="solution_style must be one of boxed, hash"):
        make_task("gsm8k", str(file), solution_style="latex")
    with pytest.raises(UserError, match="there is no file or folder"):
        make_task("gsm8k", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot carve 30 validation problems from 30"):
        make_task("gsm8k", folder(tmp_path), val_size=30).prompts("train")
