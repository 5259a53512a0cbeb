"""GSM8K, MATH, reasoning-gym and rows of users: conversion of rows, gold answers, and splits that share no problem."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from assay.envs import make_env
from assay.rewards import JudgePool
from assay.rewards.verifiers import dataset
from assay.tasks import SPLITS, check_gold, make_task, overlap, sources
from assay.tasks.datasets import GSM8K
from assay.testing.env import check_env
from assay.types import Status, UserError

ROW = {
    "question": "A crate holds 1,200 nails. Two crates?",
    "answer": "Two crates hold 2*1,200 = <<2*1200=2400>>2,400 nails.\n#### 2,400",
}


def folder(tmp_path, n=30):
    for split in ("train", "test"):
        rows = [{**ROW, "question": f"{split} {number}"} for number in range(n)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path)


def test_gold_completions_of_the_real_files_are_correct(gsm8k_folder):
    task, hashed = GSM8K(gsm8k_folder), GSM8K(gsm8k_folder, solution_style="hash")
    prompts = [prompt for split in SPLITS for prompt in task.prompts(split)]
    assert len(prompts) == len({prompt.id for prompt in prompts}) == 7473 + 1319
    with JudgePool(task.judge()) as pool:
        verdicts = pool.judge([(task.gold_completion(p), p.answer, p.fields) for p in prompts])
    assert [p.id for p, v in zip(prompts, verdicts, strict=True) if v.reward != 1.0] == check_gold(hashed, "test") == []
    assert all(float(prompt.answer) == int(prompt.answer) for prompt in prompts)
    assert not any("<<" in prompt.solution or "####" in prompt.solution for prompt in prompts)
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


def test_datasets_of_the_hub(monkeypatch):
    requested = []

    def load(dataset, configuration, split):
        requested.append((dataset, configuration, split))
        return [ROW] * 20 if "gsm8k" in dataset else TEST if split == "test" else TRAIN

    monkeypatch.setattr(sources, "load_hub", load)
    gsm8k, math = make_task("gsm8k", "openai/gsm8k"), make_task("math")
    assert [len(task.prompts(split)) for task in (gsm8k, math) for split in ("train", "test")] == [18, 20, 7 * 4 - 2, 2]
    assert {("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")} < set(requested)
    assert ("HuggingFaceH4/MATH-500", None, "test") in requested
    assert ("EleutherAI/hendrycks_math", "number_theory", "train") in requested


def test_missing_hub_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(UserError, match=r"pip install 'assay-rl\[hub\]'.*, or give path=FOLDER"):
        make_task("gsm8k").prompts("train")


def test_invalid_gsm8k_input_is_a_user_error(tmp_path):
    file = tmp_path / "bad.jsonl"
    for row, named in (
        ({"question": "?", "answer": "seven"}, "#### N"),
        ({"question": "?", "answer": ["#### 1"]}, '"answer" must be text'),
        ({"question": {"text": "?"}, "answer": "#### 1"}, '"question" must be text'),
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(UserError, match=rf"bad.jsonl:1: .*{named}"):
            make_task("gsm8k", str(file)).prompts("all")
    with pytest.raises(UserError, match="solution_style must be one of boxed, hash"):
        make_task("gsm8k", str(file), solution_style="latex")
    with pytest.raises(UserError, match="there is no file or folder"):
        make_task("gsm8k", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot carve 30 validation problems from 30"):
        make_task("gsm8k", folder(tmp_path), val_size=30).prompts("train")


TRAIN = [
    {"problem": problem, "solution": solution, "level": f"Level {level}", "type": subject}
    for problem, solution, level, subject in (
        ("A field is $3$ by $x$ with area $12$. Find $x$.", "From $3x = 12$ we get $\\boxed{4}$.", 1, "Algebra"),
        ("Halve the root of $8$.", "\\boxed{wrong}. It is $\\boxed{\\frac{\\sqrt{8}}{2}}$.", 3, "Prealgebra"),
        ("Solve $x^2 = 9$ for $x$.", "Both signs do: $\\boxed{\\{-3, 3\\}}$.", 2, "Algebra"),
        ("Where does $y = 2 - x$ meet the $y$-axis?", "At $\\boxed{(0, 2)}$.", 2, "Algebra"),
    )
]
COLUMNS = ("problem", "solution", "answer", "subject", "level", "unique_id")
TEST: list[dict[str, Any]] = [
    dict(zip(COLUMNS, row, strict=True))
    for row in (
        ("What is $3/4$?", "$\\boxed{\\dfrac34}$.", "\\frac{3}{4}", "Prealgebra", 1, "test/prealgebra/7.json"),
        ("A third of $180^\\circ$?", "It is $\\boxed{60^\\circ}$.", "60^\\circ", "Geometry", 2, "test/geometry/3.json"),
    )
]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def test_layouts_of_math(tmp_path):
    write(tmp_path / "train.jsonl", TRAIN)
    write(tmp_path / "test.jsonl", TEST)
    task = make_task("math", str(tmp_path), val_size=1)
    prompts = {p.id: p for split in SPLITS for p in task.prompts(split)}
    assert prompts["math/train/1"].answer == "\\frac{\\sqrt{8}}{2}" and prompts["math/train/2"].answer == "\\{-3, 3\\}"
    assert prompts["math/train/0"].fields == {"level": "Level 1", "subject": "Algebra"}
    seven = prompts["math/test/test/prealgebra/7.json"]
    assert seven.answer == "\\frac{3}{4}" and seven.fields == {"level": 1, "subject": "Prealgebra"}
    assert seven.question.startswith("What is $3/4$?\nPlease reason")
    assert [check_gold(task, split) for split in SPLITS] == [[], [], []]
    for number, row in enumerate(TRAIN):  # the original layout
        file = tmp_path / "original" / "train" / row["type"].lower() / f"{number + 8}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row))
    task = make_task("math", str(tmp_path / "original"), val_size=0)
    names = [prompt.id.removeprefix("math/train/") for prompt in task.prompts("train")]
    assert names == ["algebra/8", "algebra/10", "algebra/11", "prealgebra/9"]
    assert check_gold(task, "train") == []
    with pytest.raises(UserError, match="has no test split"):
        task.prompts("test")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "?", "solution": "so it is \\boxed{4"}, "rows.jsonl:2: math: a row needs an answer"),
        ({"text": "?"}, 'has no column "problem" or "question"; it has "text"'),
        ({**TEST[1], "answer": ["60"]}, 'rows.jsonl:2: math: "answer" must be text or a number, not list'),
    ],
)
def test_invalid_math_rows_are_user_errors(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        make_task("math", write(tmp_path / "rows.jsonl", [TEST[0], row])).prompts("all")


def test_instruction_replaces_that_of_prepared_rows(tmp_path):
    messages = [{"role": "user", "content": "2 + 2?\nBox it."}]
    row = {"id": "math/train/0", "question": "2 + 2?", "messages": messages, "answer": "4"}
    file = write(tmp_path / "rows.jsonl", [row])
    for settings, question in (
        ({}, "2 + 2?\nBox it."),
        ({"instruction": "Go."}, "2 + 2?\nGo."),
        ({"instruction": ""}, "2 + 2?"),
    ):
        task = make_task("math", file, **settings)
        (prompt,) = task.prompts("all")
        assert prompt.question == question and (not settings or task.bare_question(prompt) == "2 + 2?")


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")  # takes seconds


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.cache_clear()
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    for make in (make_task, make_env):
        with pytest.raises(UserError, match=r"reasoning_gym:gcd .* pip install 'assay-rl\[reasoning-gym\]'"):
            make("reasoning_gym:gcd")


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "mini_sudoku", "word_sorting"])
def test_gold_answers_score_one_and_splits_are_disjoint(gym: Any, name: str) -> None:
    task = make_task(f"reasoning_gym:{name}", size=200)
    for split in SPLITS:
        assert check_gold(task, split, limit=10) == []
    parts = [task.prompts(split)[:80] for split in SPLITS]
    assert overlap(parts[0], parts[1]).n_shared == overlap(parts[0], parts[2]).n_shared == 0
    assert overlap(parts[1], parts[2]).n_shared == 0


def test_problems_equal_those_of_the_package(gym: Any) -> None:
    task = make_task("reasoning_gym:chain_sum", seed=3, size=50, eval_size=20, min_terms=5, max_terms=5)
    train, test = task.prompts("train"), task.prompts("test")
    assert len(train) == 50 and len(test) == len(task.prompts("validation")) == 20
    for prompt in (train[0], train[49], test[7]):
        place = prompt.fields
        theirs = gym.create_dataset(
            "chain_sum", seed=place["dataset_seed"], size=place["dataset_size"], min_terms=5, max_terms=5
        )[place["dataset_index"]]
        assert task.bare_question(prompt) == theirs["question"] and prompt.answer == theirs["answer"]
        assert prompt.question.count(" + ") + prompt.question.count(" - ") == 4
    other = make_task("reasoning_gym:chain_sum", seed=4, size=50, min_terms=5, max_terms=5)
    assert overlap(train, other.prompts("train")).n_shared == 0  # not the same problems shifted by one
    assert task.prompts("train")[5] == train[5]
    json.dumps(train[0].fields)  # as rollouts are written


def test_scores_equal_those_of_the_package_and_only_full_scores_are_correct(gym: Any) -> None:
    task = make_task("reasoning_gym:spell_backward", min_word_len=6, size=20)
    prompt = task.prompts("train")[0]
    items = {
        f"<answer>{prompt.answer}</answer>": (Status.OK, 1.0),
        f"Surely <answer>x</answer>. No: <answer> {prompt.answer} </answer>": (Status.OK, 1.0),
        f"<answer>{prompt.answer[:-1]}</answer>": (Status.WRONG, None),
        prompt.answer: (Status.NO_ANSWER, 0.0),
        f"<answer>{prompt.answer}": (Status.UNPARSABLE, 0.0),
        f"\\boxed{{{prompt.answer}}}": (Status.NO_ANSWER, 0.0),
    }
    source = gym.create_dataset("spell_backward", min_word_len=6)
    verdicts = [task.judge()(text, prompt.answer, prompt.fields) for text in items]
    for verdict, (status, reward) in zip(verdicts, items.values(), strict=True):
        assert verdict.status is status, verdict
        assert reward is None or verdict.reward == reward
    partial = verdicts[2].reward
    assert 0 < partial < 1 and partial == source.score_answer(prompt.answer[:-1], {"answer": prompt.answer})
    relaxed = task.judge(strict=False)
    assert relaxed(f"\\boxed{{{prompt.answer}}}", prompt.answer, prompt.fields).status is Status.OK
    assert task.judge()(f"<answer>{prompt.answer}</answer>", prompt.answer, {}).status is Status.ERROR
    task = make_task("reasoning_gym:prime_factorization")
    prompt = task.prompts("test")[0]
    failed = task.judge()("<answer>no idea</answer>", prompt.answer, prompt.fields)
    assert failed.status is Status.UNPARSABLE and "ValueError" in failed.detail and failed.reward == 0


def test_wrong_arguments_are_user_errors(gym: Any) -> None:
    for name, args, said in (
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "'max_term' of reasoning_gym:chain_sum: did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "rejects these arguments"),
        ("chain_sum", {"seed": 64}, "seed must be from 0 to 63"),
        ("chain_sum", {"size": 0}, "size must be from 1 to 65,536"),
        ("chain_sum", {"path": "x"}, "unknown argument 'path'"),
    ):
        with pytest.raises(UserError, match=said):
            make_task(f"reasoning_gym:{name}", **args)
    task = make_task("reasoning_gym:count_bits", min_n=5, max_n=5)
    with pytest.raises(UserError, match="too few different problems"):
        _ = [task.prompts(split)[0] for split in SPLITS]


def test_dataset_is_a_single_step_environment(gym: Any) -> None:
    env = make_env("reasoning_gym:chain_sum", max_terms=3)
    assert [finding for finding in check_env(env, 4) if not finding.ok] == []
    env.reset(options={"prompt": env.prompts("train")[2]})
    _, reward, terminated, _, info = env.step(f"<answer>{env.prompts('train')[2].answer}</answer>")
    assert reward == 1.0 and terminated and info["verdict"].status is Status.OK


MY_FILE = """
def row_to_prompt(row):
    return {"question": row["q"].strip(), "answer": row["a"], "solution": f"It is #### {row['a']}", "kind": row["k"]}

def reward(completion, answer, kind):
    return 1.0 if kind == "easy" and answer in completion else 0.25
"""


RAW = [{"q": f" {n} plus {n}? ", "a": 2 * n, "k": "easy"} for n in range(20)]


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


def test_columns_that_are_not_read_and_rows_without_an_id_keep_their_own(tmp_path):
    rows = [{"id": None, "question": f"{n}?", "answer": n, "problem": "P", "gold": "G"} for n in (1, 2)]
    prompts = make_task("jsonl", write(tmp_path / "a.jsonl", rows)).prompts("all")
    assert [prompt.fields for prompt in prompts] == [{"problem": "P", "gold": "G"}] * 2
    assert len({prompt.id for prompt in prompts}) == 2 and "None" not in {prompt.id for prompt in prompts}


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
