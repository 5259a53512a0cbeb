from __future__ import annotations

import json

import pytest

from assay.tasks import check_gold, make_task, sources
from assay.types import UserError

TRAIN = [
    {
        "problem": "A field is $3$ by $x$ with area $12$. Find $x$.",
        "solution": "From $3x = 12$ we get $\\boxed{4}$.",
        "level": "Level 1",
        "type": "Algebra",
    },
    {
        "problem": "Halve the root of $8$.",
        "solution": "First \\boxed{wrong}. It is $\\boxed{\\frac{\\sqrt{8}}{2}}$.",
        "level": "Level 3",
        "type": "Prealgebra",
    },
    {
        "problem": "Solve $x^2 = 9$ for $x$.",
        "solution": "Both signs do: $\\boxed{\\{-3, 3\\}}$.",
        "level": "Level 2",
        "type": "Algebra",
    },
    {
        "problem": "Where does $y = 2 - x$ meet the $y$-axis?",
        "solution": "At $\\boxed{(0, 2)}$.",
        "level": "Level 2",
        "type": "Algebra",
    },
]
TEST = [
    {
        "problem": "Write $0.75$ as a fraction.",
        "solution": "It is $\\boxed{\\dfrac34}$.",
        "answer": "\\frac{3}{4}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/7.json",
    },
    {
        "problem": "What angle is a third of a straight one?",
        "solution": "Of $180^\\circ$ it is $\\boxed{60^\\circ}$.",
        "answer": "60^\\circ",
        "subject": "Geometry",
        "level": 2,
        "unique_id": "test/geometry/3.json",
    },
]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


def test_jsonl_layouts(tmp_path):
    write(tmp_path / "train.jsonl", TRAIN)
    write(tmp_path / "test.jsonl", TEST)
    task = make_task("math", str(tmp_path), val_size=1)
    prompts = {p.id: p for split in ("train", "validation", "test") for p in task.prompts(split)}
    assert prompts["math/train/1"].answer == "\\frac{\\sqrt{8}}{2}"
    assert prompts["math/train/2"].answer == "\\{-3, 3\\}"
    assert prompts["math/train/0"].fields == {"level": "Level 1", "subject": "Algebra"}
    seven = prompts["math/test/test/prealgebra/7.json"]
    assert seven.answer == "\\frac{3}{4}" and seven.fields == {"level": 1, "subject": "Prealgebra"}
    assert seven.question.startswith("Write $0.75$ as a fraction.\nPlease reason")
    assert [check_gold(task, split) for split in ("train", "validation", "test")] == [[], [], []]


def test_original_folder_layout(tmp_path):
    for number, row in enumerate(TRAIN):
        subject = tmp_path / "train" / row["type"].lower()
        subject.mkdir(parents=True, exist_ok=True)
        (subject / f"{number + 8}.json").write_text(json.dumps(row))
    task = make_task("math", str(tmp_path), val_size=0)
    assert [prompt.id for prompt in task.prompts("train")] == [
        "math/train/algebra/8",
        "math/train/algebra/10",
        "math/train/algebra/11",
        "math/train/prealgebra/9",
    ]
    assert check_gold(task, "train") == []
    with pytest.raises(UserError, match="has no test split"):
        task.prompts("test")


def test_hub_datasets_of_math(monkeypatch):
    requested = []

    def load(dataset, configuration, split):
        requested.append((dataset, configuration, split))
        return TEST if split == "test" else TRAIN

    monkeypatch.setattr(sources, "load_hub", load)
    task = make_task("math")
    assert len(task.prompts("test")) == 2 and requested == [("HuggingFaceH4/MATH-500", None, "test")]
    assert len(task.prompts("train")) == 7 * 4 - 2
    assert ("EleutherAI/hendrycks_math", "number_theory", "train") in requested


def test_invalid_math_rows_are_user_errors(tmp_path):
    write(tmp_path / "bad.jsonl", [{"problem": "?", "solution": "so it is \\boxed{4"}])
    with pytest.raises(UserError, match=r"bad.jsonl:1: math: a row needs an answer"):
        make_task("math", str(tmp_path / "bad.jsonl")).prompts("all")
    write(tmp_path / "bad.jsonl", [{"text": "?"}])
    with pytest.raises(UserError, match='has no column "problem" or "question"; it has "text"'):
        make_task("math", str(tmp_path / "bad.jsonl")).prompts("all")


def test_list_as_answer_is_a_user_error_that_names_the_row(tmp_path):
    write(tmp_path / "rows.jsonl", [TEST[0], {**TEST[1], "answer": ["60"]}])
    with pytest.raises(UserError, match=r'rows.jsonl:2: math: "answer" must be text or a number, not list'):
        make_task("math", str(tmp_path / "rows.jsonl")).prompts("all")


def test_instruction_replaces_that_of_prepared_rows(tmp_path):
    row = {
        "id": "math/train/0",
        "question": "What is 2 + 2?",
        "messages": [{"role": "user", "content": "What is 2 + 2?\nBox it."}],
        "answer": "4",
    }
    write(tmp_path / "rows.jsonl", [row])
    file = str(tmp_path / "rows.jsonl")
    assert make_task("math", file).prompts("all")[0].question == "What is 2 + 2?\nBox it."
    changed = make_task("math", file, instruction="Be brief.")
    assert changed.prompts("all")[0].question == "What is 2 + 2?\nBe brief."
    assert changed.bare_question(changed.prompts("all")[0]) == "What is 2 + 2?"
    assert make_task("math", file, instruction="").prompts("all")[0].question == "What is 2 + 2?"
