"""Tasks by name and path, several tasks as one (arguments, proportions, order, judges, splits), and their judges."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from stub_endpoint import stub_endpoint

from assay.config import JudgeConfig, RewardConfig
from assay.rewards import JudgePool
from assay.tasks import SPLITS, Abacus, check_gold, make_task
from assay.tasks.registry import TASKS, build_judge, build_judge_pool, cycle_counts, interleave, permuted
from assay.types import TASK_LABEL, Status, UserError

OWN = """
from assay.tasks import Task, Abacus
from assay.types import Prompt

class Mine(Task):
    name = "mine"
    def __init__(self, size: int = 3, path: str | None = None):
        self.size, self.path = size, path
    def prompts(self, split):
        ask = lambda n: ({"role": "user", "content": f"{split} {n}"},)
        return [Prompt(f"mine/{split}/{n}", ask(n), str(n)) for n in range(self.size)]

class Broken(Mine):
    def __init__(self):
        raise FileNotFoundError("problems.json\\nis gone")

class Leaving(Mine):
    def __init__(self):
        raise SystemExit(3)

class Half(Task):
    name = "half"

def fails():
    return {}["key"]

def breaks_off():
    yield {"question": "1?", "answer": 1}
    raise ConnectionError("too late")

class NotATask:
    pass

def build(max_steps: int):
    return Abacus(max_steps=max_steps)

def rows(n=10):
    return [{"question": f"{i} and {i}?", "answer": 2 * i} for i in range(n)]

def prompts():
    return Mine(20).prompts("train")

ROWS = rows(12)
SPLITS = {"train": rows(10), "test": rows(2)}
NUMBER = 7
EMPTY = []
STRINGS = ["a", "b"]
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py:"


def test_user_classes_and_functions(own):
    assert len(make_task(own + "Mine").prompts("train")) == 3
    assert len(make_task(own + "Mine", size=5).prompts("train")) == 5
    assert make_task(own + "Mine", "some/where").path == "some/where"
    assert check_gold(make_task(own + "Mine"), "test") == []
    assert make_task(own + "build", max_steps=4) == Abacus(max_steps=4)
    assert make_task("assay.tasks:Abacus", max_steps=5) == Abacus(max_steps=5)


def test_user_rows(own):
    task = make_task(own + "rows", n=40, extract="hash", val_size=10)
    assert [len(task.prompts(split)) for split in ("train", "validation", "test", "all")] == [20, 10, 10, 40]
    assert task.judge().extract == "hash" and check_gold(task, "train") == []
    assert len(make_task(own + "ROWS").prompts("all")) == 12 and len(make_task(own + "ROWS").prompts("test")) == 1
    by_split = make_task(own + "SPLITS")
    assert (len(by_split.prompts("train")), len(by_split.prompts("test"))) == (9, 2)
    prompts = make_task(own + "prompts", val_size=0).prompts("train")
    assert [prompt.id for prompt in prompts] == [f"mine/train/{n}" for n in range(20)]
    assert prompts[7].question == "train 7" and prompts[7].answer == "7"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gsm8", {}, "unknown task 'gsm8': did you mean 'gsm8k'"),
        ("abacus", {"max_step": 3}, "unknown argument 'max_step' of abacus: did you mean 'max_steps'"),
        ("abacus", {"max_steps": "many"}, "max_steps must be a valid integer, not 'many'"),
        ("abacus", {"path": "x"}, "abacus takes no path"),
        ("countdown", {"numbers": [3]}, "numbers = .* is invalid"),
        ("OWN:Mine", {"sise": 3}, "did you mean 'size'"),
        ("OWN:NotATask", {}, "not a Task"),
        ("OWN:build", {}, "needs the argument max_steps"),
        ("OWN:build", {"max_steps": 3, "extract": "hash"}, "unknown argument 'extract'"),
        ("OWN:rows", {"extrakt": "hash"}, "did you mean 'extract'"),
        ("OWN:NUMBER", {}, "must be a Task"),
        ("OWN:Missing", {}, "has no 'Missing'"),
        ("OWN:Broken", {}, r"own.py:Broken .*FileNotFoundError: problems.json is gone \(.*own.py:15\)$"),
        ("OWN:Leaving", {}, "own.py:Leaving .*SystemExit: 3"),
        ("OWN:Half", {}, r"own.py:Half must define prompts\(\)"),
        ("OWN:fails", {}, "own.py:fails .*KeyError: 'key'"),
        ("OWN:breaks_off", {}, "own.py:breaks_off .*ConnectionError: too late"),
        ("no_such_module_here:Thing", {}, "there is no module"),
        ("OWN:EMPTY", {}, "has no rows"),
        ("OWN:STRINGS", {}, "row 0 is str"),
    ],
)
def test_invalid_names_and_arguments_are_user_errors(own, name, args, message):
    with pytest.raises(UserError, match=message) as error:
        make_task(name.replace("OWN:", own), **args).prompts("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("[][3]", ('prompts("train")', "wrong", "IndexError", "wrong.py:6")),
        ("['2 + 2 =']", ("item 0", "2 + 2 =", "Prompt(", "answer=")),
        ("'2 + 2 ='", ("list of Prompts", "str")),
        ("{'train': []}", ("list of Prompts", "dict")),
        ("LazyPrompts(lambda index: 'text', 4)", ("problem 0", "Prompt(")),
        ("LazyPrompts(lambda index: 1 // index, 4)", ("problem 0", "ZeroDivisionError", "wrong.py:6")),
        ("[Prompt('a', '2 + 2 =', '4')]", ("item 0", "the messages '2 + 2 ='", "Prompt(")),
        ("[Prompt('a', ('2 + 2 =',), '4')]", ("item 0", "the message '2 + 2 ='")),
        ("[Prompt('a', ({'role': 'user', 'content': '2 + 2 ='},), 4)]", ("item 0", "the answer 4 of type int")),
        ("[Prompt(7, ({'role': 'user', 'content': '2 + 2 ='},), '4')]", ("item 0", "the id 7")),
        ("[Prompt('a', ({'role': 'user', 'content': '2'},), '2', 2)]", ("item 0", "the solution 2 of type int")),
    ],
)
def test_invalid_prompts_of_a_task_are_explained_in_one_line(tmp_path, returned, words):
    file = tmp_path / "wrong.py"
    head = "from assay.tasks import Task\nfrom assay.tasks.base import LazyPrompts; from assay.types import Prompt\n"
    body = f"class Wrong(Task):\n    name = 'wrong'\n    def prompts(self, split):\n        return {returned}\n"
    file.write_text(head + body)
    with pytest.raises(UserError) as error:
        make_task(f"{file}:Wrong").prompts("train")[0]
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "variants", "count"),
    [
        ("abacus", ({"seed": 0}, {"seed": 1, "style": "plain", "distractors": 1}, {"seed": 2, "max_steps": 2}), 300),
        ("code", ({"seed": 0, "steps": [1, 2]}, {"seed": 1, "steps": [1, 2]}), 200),
        ("countdown", [{"seed": seed, "numbers": (3, 3), "max_number": 12, "max_target": 30} for seed in (0, 1)], 150),
    ],
)
def test_splits_of_generated_problems_are_disjoint(name, variants, count):
    """For all seeds, wordings and orders."""

    def problem(prompt):
        if name == "code":
            return prompt.question.partition("Examples:")[0]
        if name == "abacus":
            return f"{prompt.fields['start']} {prompt.fields['steps']}"
        return f"{sorted(prompt.fields['nums'])} {prompt.fields['target']}"

    tasks = [make_task(name, **settings) for settings in variants]
    parts = [{problem(prompt) for task in tasks for prompt in task.prompts(split)[:count]} for split in SPLITS]
    assert min(map(len, parts)) > 40 and sum(map(len, parts)) == len(set.union(*parts))


def test_config_values_are_converted_to_the_annotated_types():
    assert make_task("countdown", numbers=[3, 3]).numbers == (3, 3)
    assert make_task("abacus", noise=0).noise == 0.0
    assert set(TASKS) == {"abacus", "code", "countdown", "gsm8k", "jsonl", "math", "mix"}


DIGEST = """
import hashlib
from assay.tasks import make_task
digest = hashlib.sha256()
for name in ("abacus", "code", "countdown"):
    for split in ("train", "validation", "test"):
        for prompt in make_task(name, seed=3).prompts(split)[:20]:
            digest.update(repr(prompt).encode())
print(digest.hexdigest())
"""


def test_generated_problems_are_the_same_in_every_process():
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": source}
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    with redirect_stdout(io.StringIO()) as printed:
        exec(DIGEST)  # with the hash seed of this process
    assert done.stdout == printed.getvalue() and len(done.stdout.strip()) == 64


SMALL = {"name": "abacus", "weight": 3, "args": {"train_size": 24, "eval_size": 9}}
COUNTDOWN = {"name": "countdown", "weight": 1}


def mix(*tasks: dict[str, Any], **args: Any) -> Any:
    return make_task("mix", tasks=list(tasks), **args)


def test_train_prompts_have_the_exact_proportions_in_every_cycle() -> None:
    prompts = mix(SMALL, COUNTDOWN).prompts("train")
    labels = [prompts[index].fields[TASK_LABEL] for index in range(80)]
    for start in range(0, 80, 4):
        assert Counter(labels[start : start + 4]) == {"abacus": 3, "countdown": 1}


def test_a_split_with_an_end_is_repeated_in_another_order() -> None:
    prompts = mix(SMALL, COUNTDOWN).prompts("train")
    repeated = [prompt.id for prompt in prompts[:64] if prompt.fields[TASK_LABEL] == "abacus"]
    first, second = repeated[:24], repeated[24:48]
    assert len(set(first)) == 24 and set(first) == set(second) and first != second
    assert [prompt.id for prompt in prompts[30:40]] == [prompts[index].id for index in range(30, 40)]
    other = mix(SMALL, COUNTDOWN, seed=1).prompts("train")
    assert [prompt.id for prompt in other[:8]] != [prompt.id for prompt in prompts[:8]]


def test_evaluation_splits_have_every_problem_once_and_start_in_proportion() -> None:
    prompts = mix(SMALL, COUNTDOWN, eval_size=5).prompts("test")
    assert Counter(prompt.fields[TASK_LABEL] for prompt in prompts) == {"abacus": 9, "countdown": 5}
    assert len({prompt.id for prompt in prompts}) == 14
    assert Counter(prompt.fields[TASK_LABEL] for prompt in prompts[:4]) == {"abacus": 3, "countdown": 1}


def test_each_answer_is_judged_by_the_judge_of_its_task() -> None:
    task = mix(SMALL, COUNTDOWN, eval_size=9)
    assert check_gold(task, "test") == []
    prompts = task.prompts("test")
    with JudgePool(task.judge(), workers=1) as pool:
        verdicts = pool.judge([(task.gold_completion(prompt), prompt.answer, prompt.fields) for prompt in prompts])
        (lost,) = pool.judge([("", "", {})])
    assert all(verdict.correct for verdict in verdicts) and lost.status is Status.ERROR


def test_labels_tell_two_tasks_of_one_name_apart() -> None:
    task = mix(SMALL, {**SMALL, "label": "harder", "args": {"min_steps": 4, "max_steps": 4, "eval_size": 9}})
    ids = [prompt.id for prompt in task.prompts("test")]
    assert len(set(ids)) == 18 and sum(name.startswith("harder/abacus/") for name in ids) == 9
    assert set(task.words()) >= set(make_task("abacus").words())


@pytest.mark.parametrize(
    ("tasks", "word"),
    [
        ([], "needs tasks"),
        ([SMALL, SMALL], "label"),
        ([{"name": "abacus", "weigth": 3}], "did you mean 'weight'"),
        ([{"name": "abacus", "weight": 0}], "above 0"),
        ([{"weight": 1}], "name"),
        ([{"name": "abacuz"}], "did you mean 'abacus'"),
        ([{"name": "abacus", "label": "a/b"}], "slash"),
    ],
)
def test_invalid_mixes_are_user_errors(tasks: list[dict[str, Any]], word: str) -> None:
    with pytest.raises(UserError, match=word):
        mix(*tasks)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([3, 1], [3, 1]), ([0.7, 0.3], [7, 3]), ([1, 1, 2], [1, 1, 2]), ([0.5, 0.25], [2, 1]), ([1e-9, 1], [1, 10_000])],
)
def test_cycle_counts_are_in_proportion_to_the_weights(weights: list[float], counts: list[int]) -> None:
    assert cycle_counts(weights) == counts


def test_tasks_are_interleaved_evenly() -> None:
    order = [number for number, _ in interleave([7, 2, 1])]
    assert Counter(order) == {0: 7, 1: 2, 2: 1}
    for end in range(1, 11):
        assert all(abs(order[:end].count(number) - share * end) < 1 for number, share in enumerate((0.7, 0.2, 0.1)))


@pytest.mark.parametrize("size", [1, 3, 24])
def test_permuted_is_a_permutation_that_depends_on_its_key(size: int) -> None:
    first = [permuted(index, size, "a") for index in range(size)]
    assert sorted(first) == list(range(size))
    assert size < 24 or first not in (list(range(size)), [permuted(index, size, "b") for index in range(size)])


# Judges from the sections [reward] and [judge] of the settings


TASK = make_task("abacus")


def write_rewards(folder: Path) -> tuple[str, str]:
    for name in ("first", "second"):
        (folder / f"{name}.py").write_text("def reward(c, a): return 0.5\ndef other(completions): return [1.0]\n")
    return str(folder / "first.py"), str(folder / "second.py")


def test_several_reward_functions_are_named_in_the_parts_of_a_verdict(tmp_path: Path) -> None:
    first, second = write_rewards(tmp_path)
    cfg = RewardConfig(
        functions=[f"{first}:reward", f"{second}:reward", "task", f"{first}:other"], weights=[2, 1, 1, 3]
    )
    verdict = build_judge(cfg, TASK)("#### 7", "7", {})
    assert verdict.reward == 2 * 0.5 + 0.5 + 1.0 + 3.0
    assert {"first.reward": 0.5, "second.reward": 0.5, "task": 1.0, "other": 1.0}.items() <= verdict.parts.items()
    assert not verdict.correct  # as the first function says
    assert "reward" not in build_judge(RewardConfig(function=f"{first}:reward"), TASK)("#### 7", "7", {}).parts
    assert "reward" in build_judge(RewardConfig(functions=[f"{first}:reward"]), TASK)("#### 7", "7", {}).parts


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"function": "a.py:f", "functions": ["b.py:f"]}, "both set"),
        ({"functions": ["task"], "weights": [1.0, 2.0]}, "1 entries"),
        ({"weights": [1.0]}, "reward.functions"),
        ({"functions": ["task", "task"]}, "more than once"),
    ],
)
def test_contradicting_reward_functions_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        build_judge(RewardConfig(**settings), TASK)


def test_a_model_judges_beside_the_task(tmp_path: Path) -> None:
    first, _ = write_rewards(tmp_path)
    judge = JudgeConfig(model="m", rubric="Be nice.", cache="", retries=0)
    with stub_endpoint(lambda body: "4") as server:
        judge = judge.model_copy(update={"url": server.url})
        for settings, reward, correct in (
            ({"functions": ["task", "judge"], "weights": [1.0, 2.0]}, 1 + 2 * 0.75, True),
            ({"functions": ["judge", f"{first}:reward"], "correct": 4.0}, 4 * 0.75 + 0.5, True),
            ({"functions": [f"{first}:reward", "task", "judge"], "weights": [2.0, 3.0, 4.0]}, 1 + 3 + 3, False),
            ({"function": "judge"}, 0.75, True),
        ):
            with build_judge_pool(RewardConfig(workers=0, **settings), TASK, judge) as pool:
                (verdict,) = pool.judge([("#### 7", "7", {})])
            assert (verdict.reward, verdict.correct) == (pytest.approx(reward), correct), settings
            assert verdict.parts["judge"] in (0.75, 3.0)
    with pytest.raises(UserError, match="more than once"):
        build_judge_pool(RewardConfig(functions=["judge", "judge"]), TASK, judge)
    with pytest.raises(UserError, match=r"judge\.model"):
        build_judge_pool(RewardConfig(function="judge"), TASK)
