"""Programs in examples/ that stand for themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from assay.cli.main import main
from assay.models import build_preset, save_model
from assay.tasks import make_task
from assay.text import char_tokenizer

ROOT = Path(__file__).parent.parent
ROWS = [
    {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,200. Two cost?", "answer": "2 * 1200 = 2400\n#### 2,400"},
    {"question": "Half of 9?", "answer": "#### 4.5"},
]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    sys.modules.pop("plain_transformers", None)
    import plain_transformers

    return plain_transformers


ANSWERS = [
    *("so \\boxed{7}", "\\boxed{7.0}", "\\boxed{ 7 }.", "\\boxed{8}", "7", "\\boxed{7", "\\boxed{}", ""),
    *("\\boxed{2400}", "\\boxed{2,400}", "\\boxed{\\$2400}", "$\\boxed{2400.00}$", "\\boxed{2}400"),
    *("first \\boxed{7}, no, \\boxed{8}", "first \\boxed{8}, no, \\boxed{7}", "\\boxed{4.5}", "\\boxed{-4.5}"),
]


def test_its_verdicts_are_those_of_our_judge(plain: ModuleType, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = make_task("gsm8k", path=str(tmp_path))
    judge = task.judge()
    for row, prompt in zip(ROWS, task.prompts("test"), strict=True):
        for text in ANSWERS:
            assert plain.is_right(text, row["answer"]) == judge(text, prompt.answer, prompt.fields).correct, text


def test_plain_transformers_writes_what_our_engine_writes(plain: ModuleType, tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{**row, "question": f"{row['question']} ({split})"} for row in ROWS]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = char_tokenizer()
    model = build_preset("nano", tokenizer.vocab_size, 256, seed=3)
    generator = torch.Generator().manual_seed(0)
    for weight in (weight for weight in model.parameters() if weight.dim() == 2):  # or it repeats its last token
        weight.data.normal_(0.0, 0.3, generator=generator)
    save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)
    words = ["--task", "gsm8k", "--task.path", str(data), "--eval.max_new_tokens", "20", "--device", "cpu"]
    assert main(["eval", str(folder), *words, "--answers", str(tmp_path / "out.jsonl")]) == 0
    ours = [json.loads(line)["completion"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    theirs = plain.answers(str(folder), [row["question"] for row in rows], 20, 2, "cpu")
    assert theirs == ours and all(len(text) > 0 for text in ours)
    assert plain.main([str(folder), str(data / "test.jsonl"), "--new-tokens", "4", "--device", "cpu"]) == 0.0


def test_the_tokenizer_of_the_code_task_keeps_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from code_tokenizer import train_tokenizer

    tokenizer = train_tokenizer(problems=50, size=400)
    prompt = make_task("code", steps=[1, 2]).prompts("test")[0]
    assert prompt.solution is not None
    assert tokenizer.decode(tokenizer(prompt.solution).input_ids) == prompt.solution
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert shown == "<|user|>a<|assistant|>b<|end|>"
