"""Two evaluations question by question, and tables that compare runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest
from web_parts import answer, group_of, make_run, prompt_of

from assay.evals import Report
from assay.evals import compare as compare_reports
from assay.runs import write_rollouts
from assay.runs.rollouts import read_lines
from assay.types import Group, Status
from assay.web.data import RunView, ViewError, compare
from assay.web.table import CompareQuery, change_of, paired

BEFORE, AFTER = "step-000000-before-test", "step-000005-after-test"


def evaluated(runs: Path, before: dict[str, list[str]], after: dict[str, list[str]]) -> RunView:
    path = make_run(runs)
    for step, label, answers in ((0, "before", before), (5, "after", after)):
        groups = [group_of(name, statuses, label) for name, statuses in answers.items()]
        write_rollouts(path, step, groups, "eval", split=f"{label}-test")
    return RunView("one", path)


def result(view: RunView, **options: Any) -> dict[str, Any]:
    return compare(view, view, CompareQuery(run_a="one", a=BEFORE, run_b="one", b=AFTER, **options))


def test_gained_and_lost_questions_equal_those_of_the_evaluation(tmp_path: Path) -> None:
    before = {f"q{n}": ["ok" if n % 3 == 0 else "wrong"] for n in range(20)}
    after = {f"q{n}": ["ok" if n % 2 == 0 else "wrong"] for n in range(20)}
    view = evaluated(tmp_path, before, after)
    answer = result(view, limit=100)
    expected = compare_reports(
        *(
            Report.read(read_lines(view.folder.root, step, "eval", f"{label}-test"))
            for step, label in ((0, "before"), (5, "after"))
        )
    )
    counts = answer["counts"]
    assert (counts["gained"], counts["lost"], answer["p_value"]) == (expected.gained, expected.lost, expected.p_value)
    assert sum(counts.values()) == 20 and answer["total"] == len(answer["rows"]) == counts["gained"] + counts["lost"]
    first = answer["rows"][0]
    assert (first["prompt_id"], first["change"], first["answer"]) == ("q2", "gained", "42")
    assert first["messages"] == [{"role": "user", "content": "what is q2?"}]
    assert (first["a"]["status"], first["a"]["text"], first["a"]["index"]) == ("wrong", "before 0", 2)
    assert (first["b"]["status"], first["b"]["source"], first["b"]["step"]) == ("ok", AFTER, 5)
    assert answer["a"] == {"run": "one", **view.detail()["evals"][0]}


def facts_of(view: RunView) -> dict[str, Any]:
    return paired(view.evaluation(BEFORE), view.evaluation(AFTER)).facts()


def test_accuracies_difference_and_exact_test_on_common_questions(tmp_path: Path) -> None:
    before = {f"q{n}": ["ok" if n < 10 else "wrong"] for n in range(40)}
    after = {f"q{n}": ["ok" if n < 8 or 20 <= n < 30 else "wrong"] for n in reversed(range(40))}
    facts = facts_of(evaluated(tmp_path, {**before, "x": ["ok"]}, {**after, "y": ["ok"], "z": ["ok"]}))
    assert (facts["questions"], facts["only_a"], facts["only_b"], facts["paired"]) == (40, 1, 2, True)
    assert facts["gained"] == [f"q{n}" for n in range(20, 30)] and facts["lost"] == ["q8", "q9"]
    assert (facts["accuracy_a"], facts["accuracy_b"]) == (0.25, 0.45)
    assert facts["p_value"] == pytest.approx(binomtest(2, 12).pvalue, rel=1e-12)
    assert facts["difference"] == pytest.approx(0.2) and facts["ci95"][0] < 0.2 < facts["ci95"][1]


def test_questions_are_the_same_if_id_text_and_gold_answer_are(tmp_path: Path) -> None:
    view = RunView("one", make_run(tmp_path))
    for step, label, text in ((0, "before", "what is {}?"), (5, "after", "what is twice {}?")):
        prompts = [prompt_of(f"q{n}", text.format(n)) for n in range(10)] + [prompt_of("same")] * 2
        right = Status.OK if step else Status.WRONG
        groups = [Group(prompt, [answer(prompt, 0, "x", right)]) for prompt in prompts[step and 1 :]]
        write_rollouts(view.folder.root, step, groups, "eval", split=f"{label}-test")
    facts = facts_of(view)
    assert (facts["questions"], facts["only_a"], facts["only_b"], facts["gained"]) == (2, 10, 9, ["same", "same"])


def test_without_common_questions_all_are_compared_without_a_test(tmp_path: Path) -> None:
    before, after = ({f"{name}{n}": ["ok" if n < 5 else "wrong"] for n in range(10)} for name in "ab")
    facts = facts_of(evaluated(tmp_path, before, after))
    assert (facts["paired"], facts["p_value"], facts["only_a"], facts["gained"]) == (False, None, 10, [])
    assert facts["ci95"][0] < 0 < facts["ci95"][1]


def test_what_is_shown(tmp_path: Path) -> None:
    before = {"q1": ["ok"], "q2": ["wrong"], "q3": ["ok"], "q4": ["wrong"], "only before": ["ok"]}
    after = {"q1": ["ok"], "q2": ["ok"], "q3": ["no_answer"], "q4": ["error"]}
    view = evaluated(tmp_path, before, after)
    shown = {show: [r["prompt_id"] for r in result(view, show=show)["rows"]] for show in ("changed", "gained", "lost")}
    assert shown == {"changed": ["q2", "q3"], "gained": ["q2"], "lost": ["q3"]}
    answer = result(view, show="all")
    assert [row["change"] for row in answer["rows"]] == ["gained", "lost", "same_correct", "same_wrong"]
    assert answer["unpaired"] == 1
    assert [row["prompt_id"] for row in result(view, show="all", search="IS Q4")["rows"]] == ["q4"]
    page = result(view, show="all", offset=1, limit=2)
    assert page["total"] == 4 and [row["prompt_id"] for row in page["rows"]] == ["q3", "q1"]


def test_evaluations_without_common_questions(tmp_path: Path) -> None:
    view = evaluated(tmp_path, {"q1": ["ok"]}, {"q2": ["ok"]})
    with pytest.raises(ViewError, match="no question in common") as caught:
        result(view)
    assert caught.value.status == 400
    with pytest.raises(ViewError, match="there is no evals/nope"):
        compare(view, view, CompareQuery(run_a="one", a="nope", run_b="one", b=AFTER))


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    view = evaluated(tmp_path, {"q1": ["ok"], "q2": ["ok"]}, {"q1": ["ok"], "q2": ["wrong"]})
    file = view.folder.root / "evals" / f"{BEFORE}.jsonl"
    good = file.read_text().splitlines()
    first = json.loads(good[0])
    odd = [{"group": "x"}, {**first, "group": 9, "messages": [3]}, {**first, "verdict": None}]
    file.write_text("\n".join([*map(json.dumps, odd), "garbage", good[1], ""]))
    answer = result(view, show="all")
    assert answer["counts"] == {"gained": 1, "lost": 1, "same_correct": 0, "same_wrong": 0} and answer["unpaired"] == 1
    assert [(row["prompt_id"], row["a"]["index"]) for row in answer["rows"]] == [("q1", 2), ("q2", 4)]


def test_comparisons_are_computed_once(tmp_path: Path) -> None:
    view = evaluated(tmp_path, {"q1": ["ok"]}, {"q1": ["wrong"]})
    files = [view.evaluation(name) for name in (BEFORE, AFTER)]
    assert paired(*files) is paired(*files)
    write_rollouts(view.folder.root, 5, [group_of("q1", ["ok"], "again")], "eval", split="after-test")
    assert result(view)["counts"]["same_correct"] == 1


def test_several_answers_per_question(tmp_path: Path) -> None:
    before = {"q1": ["ok", "wrong"], "q2": ["wrong", "wrong"], "q3": ["ok", "ok"]}
    after = {"q1": ["wrong", "ok"], "q2": ["ok", "wrong"], "q3": ["ok", "wrong"]}
    answer = result(evaluated(tmp_path, before, after), show="all")
    assert answer["counts"] == {"gained": 1, "lost": 1, "same_correct": 1, "same_wrong": 0}
    assert [(row["a"]["share"], row["b"]["share"], row["b"]["samples"]) for row in answer["rows"]] == [
        (0.0, 0.5, 2),
        (1.0, 0.5, 2),
        (0.5, 0.5, 2),
    ]


def test_kinds_of_change() -> None:
    assert [change_of(*pair) for pair in ((0, 1), (1, 0.5), (1, 1), (0.25, 0.25), (1 / 3, 1 / 3 + 1e-12))] == [
        *("gained", "lost", "same_correct", "same_wrong", "same_wrong")
    ]
