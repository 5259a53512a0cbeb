"""Users' reward functions: how they are imported, what they get and what they return; signatures of TRL and verl."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.rewards import FunctionJudge, JudgePool, RewardMix
from assay.rewards.functions import NOT_APPLICABLE, load_object
from assay.system import worker_pool
from assay.types import Prompt, Status, UserError, Verdict

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(code: str) -> str:
        count = len(list(tmp_path.glob("mine*.py")))  # a file is imported once
        file = tmp_path / f"mine{count or ''}.py"
        file.write_text(textwrap.dedent(code))
        return f"{file}:reward"

    return write_file


@pytest.mark.parametrize(
    ("body", "reward", "status"),
    [
        ("return 1.0", 1.0, Status.OK),
        ("return True", 1.0, Status.OK),
        ("return 0", 0.0, Status.WRONG),
        ("return 0.3", 0.3, Status.WRONG),
        ("return -2", -2.0, Status.WRONG),
        ("return {'reward': 0.5, 'status': 'ok', 'parsed': 7, 'parts': {'style': 1}}", 0.5, Status.OK),
        ("return Verdict(0.0, Status.NO_ANSWER)", 0.0, Status.NO_ANSWER),
        ("return float(completion == 'c' and answer == 'a' and fields == {'level': 3})", 1.0, Status.OK),
        ("import numpy; return numpy.float32(1)", 1.0, Status.OK),
    ],
)
def test_return_values_of_reward_functions(write: Write, body: str, reward: float, status: Status) -> None:
    header = "from assay.types import Status, Verdict\ndef reward(completion, answer, **fields): "
    verdict = FunctionJudge(write(header + body))("c", "a", {"level": 3})
    assert (verdict.reward, verdict.status) == (reward, status)
    assert "parsed" not in body or (verdict.parsed, verdict.parts) == ("7", {"style": 1.0})


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise KeyError('oops\\n two lines')", "KeyError: 'oops"),
        ("return float('nan')", "finite"),
        ("return {'reward': float('inf')}", "finite"),
        ("return 1e300", "finite number of at most 1e+15"),  # its square overflows
        ("raise type('Silent', (Exception,), {'__str__': lambda self: 1 / 0})()", "Silent ("),
        ("return None", "NoneType"),
        ("return '1.0'", "str"),
        ("return [1.0]", "list"),
        ("return {'score': 1}", "'reward'"),
        ("return {'reward': 1, 'status': 'fine'}", "fine"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_failing_reward_function_gives_an_error_verdict(write: Write, body: str, word: str) -> None:
    verdict = FunctionJudge(write(f"def reward(completion, answer, **fields): {body}"))("c", "a", {})
    assert (verdict.reward, verdict.status) == (0.0, Status.ERROR)
    assert word in verdict.detail and "\n" not in verdict.detail


def test_only_named_fields_are_passed_and_a_missing_one_is_named(write: Write) -> None:
    judge = FunctionJudge(write("def reward(completion, answer, level=0): return level"))
    assert judge("c", "a", {"level": 1, "subject": "algebra", "answer": "b", "completion": "d"}).reward == 1.0
    verdict = FunctionJudge(write("def reward(completion, answer, grade): return 1.0"))("c", "a", {"level": 1})
    assert verdict.status is Status.ERROR and "'grade'" in verdict.detail and "level" in verdict.detail


def test_async_functions_local_imports_and_prints_in_workers(write: Write, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def worth(text): return float(len(text))")
    path = write("""
        import asyncio, dataclasses, os, sys
        from helper import worth

        @dataclasses.dataclass
        class Thing:
            x: int

        async def reward(completion, answer, **fields):
            print("noise on stdout \\ud800", flush=True)
            os.write(1, b"raw noise")
            assert sys.stdin.read() == ""
            await asyncio.sleep(0.001)
            return worth(completion)
    """)
    with JudgePool(FunctionJudge(path), workers=2) as pool:
        assert [v.reward for v in pool.judge([("x" * n, "", {}) for n in range(5)])] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain function that returns an awaitable"])
def test_awaitables_are_awaited_also_inside_a_running_event_loop(write: Write, plain: bool, workers: int) -> None:
    name, rest = "inverse", "def reward(completion, answer): return inverse(completion, answer)"
    code = f"""
async def {name if plain else "reward"}(completion, answer):
    return 1 / len(completion)
{rest if plain else ""}
"""
    judge = FunctionJudge(write(code))

    async def cell() -> list[Verdict]:  # of a notebook
        with JudgePool(judge, workers) as pool:
            return pool.judge([("c", "a", {}), ("cc", "a", {}), ("", "a", {})])

    verdicts = asyncio.run(cell())
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.5, 0.0]
    assert verdicts[2].status == Status.ERROR and "mine.py:3" in verdicts[2].detail


MEETING = """
    import asyncio, os

    barrier = asyncio.Barrier({count})
    loops = set()

    async def meet():
        loops.add(asyncio.get_running_loop())
        async with asyncio.timeout(30):
            await barrier.wait()
        return float(len(loops))  # sessions can be kept from call to call

    async def reward({parameters}):
        {returned}
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["single", "verl", "trl"])
def test_async_functions_run_concurrently_on_the_answers_of_several_prompts(
    write: Write, form: str, workers: int
) -> None:
    """A call returns only when the calls for all answers, or for all prompts as in TRL, are running."""
    parameters = {"single": "completion, answer", "verl": "solution_str", "trl": "completions"}[form]
    returned = "return [await meet()] * len(completions)" if form == "trl" else "return await meet()"
    path = write(MEETING.format(count=3 if form == "trl" else 12, parameters=parameters, returned=returned))
    judge = RewardMix(FunctionJudge(path))
    with JudgePool(judge, workers) as pool:
        for _ in range(2):
            verdicts = pool.judge_groups([(["a", "b", "c", "d"], "", {})] * 3)
            assert [[verdict.reward for verdict in group] for group in verdicts] == [[1.0] * 4] * 3


def test_time_limit_of_an_async_function_ends_only_its_call(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.5)
    path = write("""
        import asyncio, os, time

        async def reward(completion, answer):
            if completion == "sleep":
                await asyncio.sleep(60)
            if completion == "block":
                time.sleep(60)
            if completion == "raise":
                raise KeyError("here")
            if completion == "cancel":
                raise asyncio.CancelledError
            return {"reward": 1.0, "parsed": str(os.getpid())}
    """)
    with JudgePool(FunctionJudge(path), workers=1, timeout_s=0.5) as pool:
        first = pool.judge([(text, "", {}) for text in ("a", "sleep", "raise", "b", "cancel", "sleep")])
        second = pool.judge([(text, "", {}) for text in ("c", "block", "d")])
    statuses = [verdict.status for verdict in first]
    assert statuses == [Status.OK, Status.TIMEOUT, Status.ERROR, Status.OK, Status.ERROR, Status.TIMEOUT]
    assert "0.5 s" in first[1].detail and "mine.py" in first[2].detail and "CancelledError" in first[4].detail
    assert [verdict.status for verdict in second] == [Status.OK, Status.TIMEOUT, Status.OK]
    assert first[0].parsed == first[3].parsed  # a call that awaits too long does not cost the process


GROUP = ["It is 12", "12", "It is 13"]
TRL = {
    "messages": """
        def reward(prompts, completions, answer, **kwargs):
            return [float(c[0]["content"].endswith(a)) for c, a in zip(completions, answer)]
    """,
    "annotated": """
        def reward(completions: list[list[dict[str, str]]], **kwargs):
            assert kwargs["solution"] == ["because"] * len(completions) and len(completions[0]) == 1
            return [c[-1]["content"].endswith("12") for c in completions]
    """,
    "without kwargs": """
        async def reward(completions, answer):
            return tuple(int(c.endswith(a)) for c, a in zip(completions, answer))
    """,
    "prompts": """
        def reward(prompts, completions, level, **kwargs):
            assert set(prompts) == {"7 + 5 = ?"} and level == [3] * len(completions)
            return [0.0 if c.endswith("13") else 1.0 for c in completions]
    """,
}


@pytest.mark.parametrize("form", TRL)
def test_function_in_trl_signature_gets_the_whole_group(write: Write, form: str) -> None:
    judge = FunctionJudge(write(TRL[form]))
    prompt = Prompt("p", ({"role": "user", "content": "7 + 5 = ?"},), "12", "because", {"level": 3})
    with JudgePool(judge, workers=0) as pool:
        (verdicts,) = pool.judge_groups([(GROUP, prompt.answer, pool.fields(prompt))])
    assert [v.reward for v in verdicts] == [1.0, 1.0, 0.0] and not any(v.detail for v in verdicts)
    assert [v.status for v in verdicts] == [Status.OK, Status.OK, Status.WRONG]


def test_own_errors_of_a_trl_function_are_not_hidden_by_the_second_form(write: Write) -> None:
    code = """
        def reward(completions, **kwargs):
            texts = [c[0]["content"] for c in completions]
            return [1.0 / (len(text) - 1) for text in texts]
    """
    assert "ZeroDivisionError" in FunctionJudge(write(code))("c", "a", {}).detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0]", ("1 reward for 2 completions",)),
        ("return 1.0", ("list",)),
        ("return {'reward': 1.0}", ("list",)),
        ("raise KeyError('x')", ("KeyError", "mine.py:1")),
    ],
)
def test_failing_trl_function_gives_error_verdicts_for_the_group(
    write: Write, body: str, words: tuple[str, ...]
) -> None:
    verdicts = FunctionJudge(write(f"def reward(completions, **kwargs): {body}")).judge_group(["a", "b"], "", {})
    assert len(verdicts) == 2
    assert all(v.status is Status.ERROR and all(word in v.detail for word in words) for v in verdicts)


def test_none_and_nan_of_a_trl_function_concern_one_answer(write: Write) -> None:
    judge = FunctionJudge(write("def reward(completions, **kwargs): return [1.0, None, float('nan')]"))
    verdicts = judge.judge_group(["a", "b", "c"], "", {})
    assert [v.status for v in verdicts] == [Status.OK, Status.ERROR, Status.ERROR]
    assert verdicts[1].detail == NOT_APPLICABLE and "finite" in verdicts[2].detail


VERL = "def reward(data_source, solution_str, ground_truth, extra_info=None): "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return float(solution_str == 'c' and ground_truth == 'a' and data_source == '')", (1.0, Status.OK)),
        ("return extra_info['level'] / 4", (0.5, Status.WRONG)),
        ("return {'score': -1.0, 'acc': False, 'pred': 7}", (-1.0, Status.WRONG)),
        ("return {'score': 0.5, 'acc': True}", (0.5, Status.OK)),
    ],
)
def test_function_in_verl_signature(write: Write, body: str, expected: tuple[float, Status]) -> None:
    verdict = FunctionJudge(write(VERL + body))("c", "a", {"level": 2})
    assert (verdict.reward, verdict.status) == expected
    assert "acc" not in body or verdict.parts["acc"] == float("True" in body)


def test_verl_function_gets_the_columns_of_the_row_by_their_names(write: Write) -> None:
    code = VERL + "return float((data_source, extra_info) == ('gsm8k', {'index': 3}))"
    assert FunctionJudge(write(code))("c", "a", {"data_source": "gsm8k", "extra_info": {"index": 3}}).reward == 1.0
    failed = FunctionJudge(write(VERL.replace("data_source, ", "data_source, split, ") + "return 1.0"))("c", "a", {})
    assert failed.status is Status.ERROR and "'split'" in failed.detail


@pytest.mark.parametrize("parameters", ["", "completion", "*, completion, answer"])
def test_other_signatures_are_told_the_expected_ones(write: Write, parameters: str) -> None:
    with pytest.raises(UserError) as error:
        FunctionJudge(write(f"def reward({parameters}): return 1.0"))
    text = str(error.value)
    assert "completion, answer" in text and "completions" in text and "solution_str" in text and "\n" not in text


def test_function_of_one_answer_can_ask_for_the_prompt(write: Write) -> None:
    code = "def reward(completion, answer, messages): return float(messages[0]['content'] == completion)"
    prompt = Prompt("p", ({"role": "user", "content": "copy this"},), "12")
    with JudgePool(FunctionJudge(write(code)), workers=0) as pool:
        verdicts = pool.judge([(text, "", pool.fields(prompt)) for text in ("copy this", "no")])
    assert [v.reward for v in verdicts] == [1.0, 0.0]
    with JudgePool(FunctionJudge(write("def reward(c, a, **fields): return len(fields)")), workers=0) as pool:
        assert pool.fields(prompt) == {}


def test_builtin_without_signature_is_called_with_completion_and_answer() -> None:
    assert FunctionJudge("operator:contains")("It is 12", "12", {}).correct


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import a_module_nobody_has", "a_module_nobody_has"),
        ("x = 3", "no 'reward'"),
        ("reward = 3", "not a function"),
    ],
)
def test_files_without_a_function_are_user_errors(write: Write, code: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        FunctionJudge(write(code))


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("nowhere", "package.module:name"),
        ("nowhere.py", "package.module:name"),
        ("nowhere:reward", "no module 'nowhere'"),
        ("nowhere.at.all:reward", "no module"),
        ("missing_file.py:reward", "no file"),
        ("assay.types:nothing", "no 'nothing'"),
        ("..:x", "module"),
    ],
)
def test_invalid_paths_are_user_errors(path: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        load_object(path)


def test_relative_paths_work_in_other_working_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_pkg").mkdir()
    (tmp_path / "my_rewards_pkg" / "inner.py").write_text("def reward(completion, answer): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    judges = [FunctionJudge("my_rewards_pkg.inner:reward"), FunctionJudge("my_rewards_pkg/inner.py:reward")]
    monkeypatch.chdir("/")
    for judge in judges:
        with JudgePool(judge, workers=1) as pool:
            assert pool.judge([("", "", {})])[0].correct
