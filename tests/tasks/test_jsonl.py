from __future__ import annotations

import json

import pytest

from assay.rewards import JudgePool
from assay.tasks import check_gold, make_task
from assay.types import UserError

MY_FILE = """
def row_to_prompt(row):
    return {"question": row["q"].strip(), "answer": row["a"], "solution": f"It is #### {row['a']}", "kind": row["k"]}

def reward(completion, answer, kind):
    return 1.0 if kind == "easy" and answer in completion else 0.25
"""


RAW = [{"q": f" {n} plus {n}? ", "a": 2 * n, "k": "easy"} for n in range(20)]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def test_user_map_and_reward_function(tmp_path):
    data = write(tmp_path / "mine.jsonl", RAW)
    (tmp_path / "my_file.py").write_text(MY_FILE)
    task = make_task(
        "jsonl", data, map=f"{tmp_path}/my_file.py:row_to_prompt", extract="hash", judge=f"{tmp_path}/my_file.py:reward"
    )
    prompt = task.prompts("all")[3]
    assert (prompt.question, prompt.answer, prompt.fields) == ("3 plus 3?", "6", {"kind": "easy"})
    assert check_gold(task, "all") == []
    with JudgePool(task.judge(), workers=1) as pool:
        rewards = [
            verdict.reward for verdict in pool.judge([("6", "6", {"kind": "easy"}), ("6", "6", {"kind": "hard"})])
        ]
    assert rewards == [1.0, 0.25]
    default = make_task("jsonl", data, map=f"{tmp_path}/my_file.py:row_to_prompt", extract="hash")
    assert check_gold(default, "all") == []
    assert not default.judge()("It is #### 7", "6", {}).correct


@pytest.mark.parametrize(
    ("asked", "answered"), [("question", "answer"), ("prompt", "gold"), ("messages", "target"), ("problem", "answer")]
)
def test_known_columns_need_no_map(tmp_path, asked, answered):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]
    row = {asked: messages if asked == "messages" else "Two and two?", answered: 4, "source": "me"}
    (prompt,) = make_task("jsonl", write(tmp_path / "a.jsonl", [row])).prompts("all")
    assert (prompt.question, prompt.answer, prompt.fields["source"]) == ("Two and two?", "4", "me")
    assert len(prompt.messages) == (2 if asked == "messages" else 1)


def test_invalid_jsonl_arguments_are_user_errors(tmp_path):
    data = write(tmp_path / "a.jsonl", RAW)
    (tmp_path / "my_file.py").write_text("def broken(row):\n    return row['nope']\ndef seven(row):\n    return 7\n")
    with pytest.raises(UserError, match=r"broken raised KeyError on .*a.jsonl:1"):
        make_task("jsonl", data, map=f"{tmp_path}/my_file.py:broken").prompts("all")
    with pytest.raises(UserError, match="must return a dict or a Prompt, not int"):
        make_task("jsonl", data, map=f"{tmp_path}/my_file.py:seven").prompts("all")
    with pytest.raises(UserError, match='unknown judge "maths"'):
        make_task("jsonl", data, judge="maths")
    with pytest.raises(UserError, match="bx"):
        make_task("jsonl", data, extract="bx")
    with pytest.raises(UserError, match="needs a path"):
        make_task("jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        make_task("jsonl", data).prompts("all")
