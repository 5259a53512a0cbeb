"""Few-shot examples from files and from prompts, and prompts kept in text files."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from assay.text import few_shot_from_prompts, load_few_shot, read_text_file
from assay.types import Prompt, UserError


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_columns(tmp_path) -> None:
    rows = [
        {"question": "1+1?", "solution": "1+1=2", "answer": "2"},
        {"prompt": "2+2?", "completion": "4\u2028!"},
        {"question": "3+3?", "answer": "#### 6"},
    ]
    expected = [("1+1?", "1+1=2"), ("2+2?", "4\u2028!"), ("3+3?", "#### 6")]
    path = write_rows(tmp_path / "shots.jsonl", *rows)
    assert load_few_shot(path) == expected
    assert load_few_shot(path, n=2) == expected[:2]
    assert load_few_shot(path, n=0) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not hold any"),
        ('{"question": "1+1?"}', "line 1"),
        ('\n{"question"', "line 2: not valid JSON"),
        ("[1]", "line 1"),
    ],
)
def test_files_that_will_not_do(content: str, message: str, tmp_path) -> None:
    path = tmp_path / "shots.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_few_shot(path)
    assert str(path) in str(caught.value)


def test_too_few(tmp_path) -> None:
    path = write_rows(tmp_path / "shots.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(UserError, match="2 few-shot examples: it has 1"):
        load_few_shot(path, n=2)


def make_prompt(index: int, solved: bool) -> Prompt:
    solution = f"s{index}" if solved else None
    return Prompt(id=str(index), messages=({"role": "user", "content": f"q{index}"},), solution=solution)


def test_first_prompts_with_a_solution() -> None:
    prompts = [make_prompt(index, solved=index % 2 == 1) for index in range(6)]
    assert few_shot_from_prompts(prompts, 2) == [("q1", "s1"), ("q3", "s3")]
    with pytest.raises(UserError, match="4 few-shot examples were asked for, but only 3"):
        few_shot_from_prompts(prompts, 4)


def test_endless_prompts_without_solutions_end() -> None:
    with pytest.raises(UserError, match="only 0"):
        few_shot_from_prompts((make_prompt(index, solved=False) for index in count()), 1)


def test_text_files(tmp_path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be brief.\n\nAlways.\n", encoding="utf-8")
    assert read_text_file(path) == "Be brief.\n\nAlways."
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for name, message in [("none.txt", "no file"), ("binary", "UTF-8"), (".", "cannot read")]:
        with pytest.raises(UserError, match=message):
            read_text_file(tmp_path / name)
