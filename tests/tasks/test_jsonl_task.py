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


def test_a_row_map_and_a_reward_of_ones_own(tmp_path):
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


@pytest.mark.parametrize("asked", ["question", "prompt", "messages"])
@pytest.mark.parametrize("answered", ["answer", "gold", "target"])
def test_known_columns_need_no_map(tmp_path, asked, answered):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]
    row = {asked: messages if asked == "messages" else "Two and two?", answered: 4, "source": "me"}
    (prompt,) = make_task("jsonl", write(tmp_path / "a.jsonl", [row])).prompts("all")
    assert (prompt.question, prompt.answer, prompt.fields["source"]) == ("Two and two?", "4", "me")
    assert len(prompt.messages) == (2 if asked == "messages" else 1)


@pytest.mark.parametrize(
    ("rows", "val_size", "held_out"), [(50, None, 5), (7000, None, 500), (21, 10, 10), (9, None, 0)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_file_is_shared_out_between_the_splits(tmp_path, rows, val_size, held_out, seed):
    data = write(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": n} for n in range(rows)])
    task = make_task("jsonl", data, val_size=val_size, seed=seed)
    everything = [prompt.id for prompt in task.prompts("all")]
    assert everything == [f"jsonl/all/{n}" for n in range(rows)]  # in the order of the file
    parts = {}
    for split, size in (("train", rows - 2 * held_out), ("validation", held_out), ("test", held_out)):
        if size:
            parts[split] = [prompt.id for prompt in task.prompts(split)]
            assert len(parts[split]) == size
        else:
            with pytest.raises(UserError, match=f"gives no {split} problems: set val_size, or add a file"):
                task.prompts(split)
    given = [name for part in parts.values() for name in part]
    assert len(given) == len(set(given)) and set(given) == set(everything)  # disjoint, and nothing is lost


def test_the_shares_of_one_file_depend_on_the_seed_alone(tmp_path):
    data = write(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": n} for n in range(100)])
    for split in ("validation", "test"):
        first, again, other = (make_task("jsonl", data, seed=seed).prompts(split) for seed in (0, 0, 1))
        assert list(first) == list(again) and {p.id for p in first} != {p.id for p in other}


def test_more_than_a_file_holds_cannot_be_held_out(tmp_path):
    data = write(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": n} for n in range(20)])
    for split in ("train", "validation", "test"):
        with pytest.raises(UserError, match=r"has 20 rows, too few for 10 each.*between 0 and 9"):
            make_task("jsonl", data, val_size=10).prompts(split)
    assert len(make_task("jsonl", data, val_size=9).prompts("train")) == 2
    assert len(make_task("jsonl", data, val_size=10).prompts("all")) == 20


def test_a_folder_with_all_splits(tmp_path):
    for split, number in (("train", 1), ("validation", 2), ("test500", 3)):
        write(tmp_path / f"{split}.jsonl", [{"question": split, "answer": number}] * number)
    task = make_task("jsonl", str(tmp_path))
    assert [len(task.prompts(split)) for split in ("train", "validation", "test")] == [1, 2, 3]
    with pytest.raises(UserError, match="is made of splits: name one of them"):
        task.prompts("all")
    with pytest.raises(UserError, match='unknown split "dev": use one of train, validation, test, or all'):
        task.prompts("dev")
    write(tmp_path / "test100.jsonl", [{"question": "x", "answer": 1}])
    with pytest.raises(UserError, match="several test files"):
        make_task("jsonl", str(tmp_path)).prompts("test")


def test_text_that_only_json_can_hold_survives(tmp_path):
    odd = "lone \ud800 and \u2028 lines"
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": odd, "answer": 1}) + "\n")
    assert make_task("jsonl", str(tmp_path / "a.jsonl")).prompts("all")[0].question == odd
    (tmp_path / "a.jsonl").write_text('{"question": "a\u2028b", "answer": 1}\n', encoding="utf-8")
    assert make_task("jsonl", str(tmp_path / "a.jsonl")).prompts("all")[0].question == "a\u2028b"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": "x", "answer": 1}\n{"question": ', r"a.jsonl:2 is not valid JSON"),
        ("[1, 2]", r"a.jsonl:1 must be a JSON object, not list"),
        ('{"question": "x"}', r'a.jsonl:1 has no column "answer" or "gold" or "target"; it has "question"'),
        ('{"text": "x", "answer": 1}', r'has no column "messages" or "question".*it has "text", "answer"'),
        ('{"messages": [{"role": "user"}], "answer": 1}', 'each message needs a "role" and a "content"'),
        ('{"messages": 7, "answer": 1}', '"messages" must be a list'),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        make_task("jsonl", str(tmp_path / "a.jsonl")).prompts("all")


def test_bad_arguments(tmp_path):
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
