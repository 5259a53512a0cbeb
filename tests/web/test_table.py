"""Lists of rollouts: filters, order, search, what has changed, and pass rates of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_parts import HOSTILE, answer, group_of, make_run, prompt_of, standard_run, updated

from assay.runs import write_rollouts
from assay.types import Finish, Group, Status
from assay.web import table as table_module
from assay.web.index import ROW, STATUSES, IndexedFile
from assay.web.table import CHANGES, PromptsQuery, RolloutsQuery, RolloutTable, TextSearch


def table_of(path: Path) -> RolloutTable:
    return RolloutTable(list(updated(path).files.values()))


def listed(table: RolloutTable, **options: Any) -> list[str]:
    query = RolloutsQuery(**{"order": "asc", **options})
    numbers, _ = table.select(query, None)
    rows = [table.row(number) for number in table.ordered(numbers, query).tolist()]
    return [f"{row['step']}/{row['prompt_id']}/{row['sample']}" for row in rows]


@pytest.fixture
def table(tmp_path: Path) -> RolloutTable:
    return table_of(standard_run(tmp_path))


def test_filters(table: RolloutTable) -> None:
    assert len(listed(table)) == 12
    assert RolloutsQuery().order == "desc"  # the newest step first
    assert listed(table, first_step=2, last_step=2) == ["2/p1/0", "2/p1/1"]
    assert listed(table, prompt="p2", statuses=("wrong", "no_answer")) == ["1/p2/2", "3/p2/0"]
    assert listed(table, min_reward=1, first_step=3) == ["3/p1/0", "3/p1/1", "3/p2/1"]
    assert listed(table, max_reward=0.5, first_step=3) == ["3/p2/0"]
    assert listed(table, source="step-000003-after-test") == ["3/q0/0", "3/q1/0"]
    assert listed(table, source="eval") == ["0/q0/0", "0/q1/0", "3/q0/0", "3/q1/0"]
    assert listed(table, truncated=True) == [] and len(listed(table, truncated=False)) == 12
    assert listed(table, prompt="unknown") == []


def test_counts_by_status_do_not_depend_on_the_chosen_status(table: RolloutTable) -> None:
    numbers, statuses = table.select(RolloutsQuery(statuses=("ok",), last_step=1), None)
    assert len(numbers) == 3 and statuses == {"ok": 3, "wrong": 2, "no_answer": 1}


def test_order(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    prompt = prompt_of("p")
    texts, rewards = ("xx", "x", "xxxx"), (0.5, float("nan"), 0.25)
    for step in (1, 2):
        rollouts = [
            answer(prompt, n, text, reward=reward, advantage=n, finish=Finish.LENGTH)
            for n, (text, reward) in enumerate(zip(texts, rewards, strict=True))
        ]
        write_rollouts(path, step, [Group(prompt, rollouts)])
    table = table_of(path)
    assert listed(table, sort="length")[::2] == ["1/p/1", "1/p/0", "1/p/2"]
    assert listed(table, sort="length", order="desc")[::2] == ["1/p/2", "1/p/0", "1/p/1"]
    assert listed(table, sort="reward") == ["1/p/2", "2/p/2", "1/p/0", "2/p/0", "1/p/1", "2/p/1"]  # the last have none
    assert listed(table, sort="reward", order="desc") == ["1/p/0", "2/p/0", "1/p/2", "2/p/2", "1/p/1", "2/p/1"]
    assert listed(table, order="desc")[:3] == ["2/p/0", "2/p/1", "2/p/2"]
    assert listed(table, sort="advantage", order="desc", first_step=2) == ["2/p/2", "2/p/1", "2/p/0"]
    assert len(listed(table, truncated=True)) == 6


def test_changes_since_the_previous_time(table: RolloutTable) -> None:
    # p1 was mostly wrong in step 1; in step 2 neither; p2 was mostly right in step 1.
    assert listed(table, changed="gained") == ["2/p1/0"]
    assert listed(table, changed="lost") == ["3/p2/0"]
    assert listed(table, changed="any") == ["2/p1/0", "3/p2/0"]
    after = "step-000003-after-test"
    assert (listed(table, source=after, changed="gained"), listed(table, source=after, changed="lost")) == (
        ["3/q1/0"],
        ["3/q0/0"],
    )
    assert listed(table, source="step-000000-before-test", changed="any") == []


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6), max_size=6))
def test_changes_equal_a_simple_count(steps: list[list[tuple[int, bool]]]) -> None:
    files, expected, last = [], [], {}  # last: prompt to share of correct answers
    for step, answers in enumerate(steps):
        rows = np.zeros(len(answers), ROW)
        rows["prompt"] = [prompt for prompt, _ in answers]
        rows["status"] = [STATUSES.index("ok" if ok else "wrong") for _, ok in answers]
        prompts = [(f"p{n}", "") for n in range(4)]
        files.append(IndexedFile(f"rollouts/step-{step:06d}.jsonl", "", rows, [], prompts, []))
        for prompt, ok in answers:
            before = last.get(prompt, 0.5)
            expected.append("gained" if ok and before < 0.5 else "lost" if not ok and before > 0.5 else None)
        for prompt in {prompt for prompt, _ in answers}:
            own = [ok for other, ok in answers if other == prompt]
            last[prompt] = sum(own) / len(own)
    table = RolloutTable(files)
    assert [CHANGES.get(code) for code in table.changed.tolist()] == expected


def test_evaluations_are_compared_with_the_previous_one_of_the_same_split(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    plan = [(0, "before", "test", "wrong"), (1, "eval", "validation", "ok"), (2, "eval", "validation", "wrong")]
    for step, label, split, status in [*plan, (2, "after", "test", "ok")]:
        write_rollouts(path, step, [group_of("q", [status])], "eval", split=f"{label}-{split}")
    table = table_of(path)
    sources = {
        name: table.changed[table.file_rows(name)].tolist() for name in (file.place.source for file in table.files)
    }
    assert sources == {
        "step-000000-before-test": [0],
        "step-000001-eval-validation": [0],
        "step-000002-eval-validation": [-1],
        "step-000002-after-test": [1],
    }


def prompts(table: RolloutTable, **options: Any) -> list[str]:
    return [row["prompt_id"] for row in table.prompts(PromptsQuery(**{"sort": "id", **options}))["rows"]]


def test_solved_prompts_are_counted_by_step(table: RolloutTable) -> None:
    # Step 1: p1 mostly wrong, p2 mostly right; step 2: p1 once of two; step 3: p1 always, p2 once of two.
    solved = table.prompts(PromptsQuery())["solved"]
    assert solved == {
        **{"first": [1, 2, 3], "last": [1, 2, 3]},
        **{"always": [0, 0, 1], "sometimes": [2, 1, 1], "never": [0, 0, 0]},
    }


def test_solved_prompts_of_a_long_training_are_counted_by_parts(tmp_path: Path) -> None:
    path, prompt = make_run(tmp_path), prompt_of("p")
    for step in range(1, 151):
        status = Status.OK if step > 75 else Status.WRONG
        write_rollouts(path, step, [Group(prompt, [answer(prompt, 0, "x", status)])])
    solved = table_of(path).prompts(PromptsQuery())["solved"]
    assert len(solved["first"]) == table_module.PARTS and (solved["first"][0], solved["last"][-1]) == (1, 150)
    assert sum(solved["always"]) == sum(solved["never"]) == 75 and solved["always"][-1] > 0 == solved["always"][0]
    assert all(last + 1 == first for last, first in zip(solved["last"], solved["first"][1:], strict=False))


def test_pass_rates_of_prompts(table: RolloutTable) -> None:
    answer = table.prompts(PromptsQuery())
    assert answer["total"] == 2
    assert answer["rows"][0] == {
        "prompt_id": "p1",
        "preview": "what is p1?",
        "seen": 7,
        "pass_rate": 4 / 7,
        "first_rate": 1 / 3,
        "last_rate": 1.0,
        "rates": [[1, 1, 3], [2, 1, 2], [3, 2, 2]],
    }
    assert answer["rows"][1]["rates"] == [[1, 2, 3], [3, 1, 2]]
    assert prompts(table, sort="change", order="desc") == prompts(table, sort="seen", order="desc") == ["p1", "p2"]
    assert prompts(table, sort="pass_rate", order="desc") == ["p2", "p1"]
    assert prompts(table, search="IS P2") == ["p2"] and prompts(table, search="nothing") == []
    assert prompts(table, offset=1, limit=1) == ["p2"]
    evaluated = table.prompts(PromptsQuery(source="eval"))["rows"]
    assert [(row["prompt_id"], row["rates"]) for row in evaluated] == [
        ("q0", [[0, 1, 1], [3, 0, 1]]),
        ("q1", [[0, 0, 1], [3, 1, 1]]),
    ]


def test_ids_with_numbers_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    names = ["t/10", "t/9", "t/x", "a", "t/9/1", "10", "²", ""]
    write_rollouts(path, 1, [group_of(name, ["ok"]) for name in names])
    assert prompts(table_of(path)) == ["", "10", "a", "t/9", "t/9/1", "t/10", "t/x", "²"]


def found(path: Path, text: str) -> list[int]:
    index = updated(path)
    table = RolloutTable(list(index.files.values()))
    rows, searched = TextSearch(index.store.texts).find(table, text, seconds=60)
    assert searched == {"done": len(table.files), "total": len(table.files)}
    return table.rows["index"][rows].tolist()


def test_search_equals_python_for_hostile_texts(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    prompt = prompt_of("p", "QUESTION?")
    write_rollouts(path, 1, [Group(prompt, [answer(prompt, n, text) for n, text in enumerate(HOSTILE)])])
    clean = [text.replace("\0", " ").replace("\ud800", "?").casefold() for text in HOSTILE]
    needles = ("<script>", "ALERT", "'; drop", "%", "_", "ß", "SS", "İ", "\u202e", "本", "a", "\\", '"', "\u2028", "👩")
    for needle in needles:
        expected = [n for n, text in enumerate(clean) if needle.casefold() in text]
        assert found(path, needle) == expected, needle
    assert found(path, "question?") == list(range(len(HOSTILE)))  # of the prompt
    assert found(path, "</html>") == []


def test_details_of_verdicts_are_searched_and_texts_are_separate(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    prompt = prompt_of("p", "?")
    rollouts = [answer(prompt, 0, "ab", Status.ERROR, detail="ZeroDivisionError"), answer(prompt, 1, "cd")]
    write_rollouts(path, 1, [Group(prompt, rollouts)])
    assert found(path, "zerodivision") == [0] and found(path, "bc") == [] and found(path, "cd") == [1]


@given(st.lists(st.text("abA", max_size=8), max_size=8), st.text("abA", min_size=1, max_size=3))
def test_search_equals_python(texts: Sequence[str], needle: str) -> None:
    folded = [text.casefold().encode() + b"\0" for text in texts]
    rows = np.zeros(len(texts), ROW)
    rows["text_end"] = np.cumsum([len(text) for text in folded])
    file = IndexedFile("rollouts/step-000001.jsonl", "", rows, [], [("-", "")], [])
    rows, _ = TextSearch(lambda number: b"".join(folded)).find(RolloutTable([file]), needle)
    assert rows.tolist() == [needle.casefold() in text.casefold() for text in texts]


def test_a_long_search_continues_with_the_next_request(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    for step in range(1, 6):
        write_rollouts(path, step, [group_of("p", ["ok"], f"step {step}")])
    index = updated(path)
    table, read = RolloutTable(list(index.files.values())), []
    search = TextSearch(lambda file: read.append(file) or index.store.texts(file))
    counts = []
    for _ in range(6):
        rows, searched = search.find(table, "step", seconds=0.0)
        counts.append((int(rows.sum()), searched["done"]))
    assert counts == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (5, 5)]
    assert len(read) == len(set(read))


def test_texts_in_memory_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path)
    for step in range(1, 6):
        write_rollouts(path, step, [group_of("p", ["ok"], "x" * 100)])
    monkeypatch.setattr(table_module, "CACHED_TEXT", 250)
    index = updated(path)
    table, search = RolloutTable(list(index.files.values())), TextSearch(index.store.texts)
    for needle in ("xxx", "x 0"):
        assert search.find(table, needle, seconds=60)[0].sum() == 5
    assert len(search._cached) == 2 and search._cached_bytes <= 250


def test_an_empty_table() -> None:
    table = RolloutTable()
    assert table.select(RolloutsQuery(), None)[1] == {} and not prompts(table, search="x")
    assert TextSearch(lambda number: b"").find(table, "x")[0].tolist() == []
