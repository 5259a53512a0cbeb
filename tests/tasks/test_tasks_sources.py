"""from __future__ import annotations"""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc

import pytest

from assay.system import memory
from assay.tasks import Task, base, check_gold, make_task, overlap, sources
from assay.tasks.base import MAX_REJECTED, UNLIMITED, FilteredPrompts, LazyPrompts, carve_validation, prompts_of
from assay.tasks.sources import load_hub, read_jsonl, read_lines
from assay.types import Prompt, UserError


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("rows", "val_size", "held_out", "seed"), [(50, None, 5, 0), (5100, None, 500, 0), (21, 10, 10, 1), (9, None, 0, 0)]
)
def test_single_file_is_split_into_disjoint_parts(tmp_path, rows, val_size, held_out, seed):
    data = write(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": n} for n in range(rows)])
    task = make_task("jsonl", data, val_size=val_size, seed=seed)
    everything = [prompt.id for prompt in task.prompts("all")]
    assert everything == [f"jsonl/all/{n}" for n in range(rows)]  # in the order of the file
    if not held_out:
        assert [prompt.id for prompt in task.prompts("train")] == everything
        with pytest.raises(UserError, match=r"no test problems.*val_size"):
            task.prompts("test")
        return
    parts = [[prompt.id for prompt in task.prompts(split)] for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [rows - 2 * held_out, held_out, held_out]
    assert sorted(name for part in parts for name in part) == sorted(everything)  # disjoint and complete
    for split in ("validation", "test"):
        again, other = (make_task("jsonl", data, val_size=val_size, seed=seed + change) for change in (0, 1))
        assert again.prompts(split) == task.prompts(split) != other.prompts(split)
    with pytest.raises(UserError, match=rf"has {rows:,} rows, too few .*between 0 and {(rows - 1) // 2}"):
        make_task("jsonl", data, val_size=(rows + 1) // 2).prompts("test")
    assert len(make_task("jsonl", data, val_size=(rows - 1) // 2).prompts("train")) in (1, 2)


@pytest.mark.parametrize(
    ("written", "question"),
    [
        (
            json.dumps({"question": "lone \ud800 and \u2028 lines", "answer": 1}).encode(),
            "lone \ud800 and \u2028 lines",
        ),
        ('{"question": "a\u2028b", "answer": 1}\n'.encode(), "a\u2028b"),
        ('{"question": "x", "answer": 1}\r\n'.encode("utf-8-sig"), "x"),
        (gzip.compress(b'{"question": "x", "answer": 1}', mtime=0), None),
    ],
)
def test_unusual_unicode_is_preserved_and_other_encodings_are_user_errors(tmp_path, written, question):
    (tmp_path / "a.jsonl").write_bytes(written)
    task = make_task("jsonl", str(tmp_path / "a.jsonl"))
    if question is None:
        with pytest.raises(UserError, match=r"is not UTF-8 text .*: decompress it"):
            task.prompts("all")
    else:
        assert task.prompts("all")[0].question == question


def test_folder_with_one_file_per_split(tmp_path):
    for split, number in (("train", 1), ("validation", 2), ("test500", 3)):
        write(tmp_path / f"{split}.jsonl", [{"question": split, "answer": number}] * number)
    task = make_task("jsonl", str(tmp_path))
    assert [len(task.prompts(split)) for split in ("train", "validation", "test")] == [1, 2, 3]
    with pytest.raises(UserError, match="consists of splits"):
        task.prompts("all")
    with pytest.raises(UserError, match='unknown split "dev"'):
        task.prompts("dev")
    write(tmp_path / "test100.jsonl", [{"question": "x", "answer": 1}])
    with pytest.raises(UserError, match="several test files"):
        make_task("jsonl", str(tmp_path)).prompts("test")


def test_jsonl_is_read_line_by_line_while_memory_is_free(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"question": "x" * 2**20, "answer": n}) + "\n" for n in range(40))
    tracemalloc.start()
    for _ in read_lines(path):
        pass
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    monkeypatch.setattr(memory, "free_main_memory", lambda: 2**20)
    with pytest.raises(UserError, match="does not fit into memory"):
        read_jsonl(path)
    monkeypatch.setattr(sources, "MAX_LINE", 2**20)
    with pytest.raises(UserError, match=r"a.jsonl:1 is longer than 1 MiB"):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": "x", "answer": 1}\n{"question": ', r"a.jsonl:2 is not valid JSON"),
        ("[1, 2]", r"a.jsonl:1 must be a JSON object, not list"),
        ('{"question": "x"}', r'a.jsonl:1 has no column "answer" or "gold" or "target".*; it has "question"'),
        ('{"text": "x", "answer": 1}', r'has no column "messages" or "question".*it has "text", "answer"'),
        ('{"messages": [{"role": "user"}], "answer": 1}', 'each message needs a "role" and a "content"'),
        ('{"messages": 7, "answer": 1}', '"messages" must be a list'),
        ('{"question": "x", "answer": NaN}', "must be text or a number, not nan"),
        ('{"question": "x", "answer": 1e400}', "must be text or a number, not inf"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "too many digits"),
    ],
)
def test_invalid_files_are_user_errors(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        make_task("jsonl", str(tmp_path / "a.jsonl")).prompts("all")


def test_the_datasets_package_reads_a_split(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(3)]
    write(tmp_path / "train.jsonl", rows)
    assert load_hub(str(tmp_path), None, "train") == rows


# The base of tasks


def ask(name: str, text: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": text},))


def test_overlap_ignores_case_and_whitespace():
    train = [ask("t0", "How many  apples?"), ask("t1", "Two"), ask("t2", "three")]
    evaluation = [ask("e0", "how many\napples? "), ask("e1", "four"), ask("e2", "THREE")]
    report = overlap(train, evaluation)
    assert (report.n_train_checked, report.n_eval, report.n_shared) == (3, 3, 2)
    assert report.examples == (("e0", "t0"), ("e2", "t2"))
    assert not report.sampled and str(report).startswith("2 of 3 evaluation prompts")


def test_overlap_of_long_splits_is_sampled():
    unlimited = LazyPrompts(lambda index: ask(f"t{index}", str(index)), 2**31)
    report = overlap(unlimited, [ask("e0", "17"), ask("e1", "-1")])
    assert report.n_shared == 1 and report.sampled and "sample" in str(report)
    assert report.n_train_checked < 10_000
    assert overlap(unlimited, [ask("e0", "17")], limit=100).n_train_checked == 100


def numbered(keep) -> FilteredPrompts:
    prompts = LazyPrompts(lambda index: ask(f"t/{index}", str(index)), UNLIMITED)
    return FilteredPrompts(prompts, lambda prompt: keep(int(prompt.question)), "the rule")


def test_generated_prompts_that_take_long_are_compared_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def slow(index: int) -> Prompt:
        made.append(index)
        time.sleep(0.02)
        return ask(f"t{index}", str(index))

    monkeypatch.setattr(base, "LAZY_S", 0.1)
    report = overlap(LazyPrompts(slow, UNLIMITED), [ask("e0", "1"), ask("e1", "-1")])
    assert report.sampled and report.n_shared == 1 and 2 <= report.n_train_checked == len(made) < 100


def test_rejected_problems_of_an_endless_split_are_replaced_by_others():
    prompts = numbered(lambda number: number % 3 > 0)
    ids = [int(prompt.id.removeprefix("t/")) for prompt in prompts[:300]]
    assert len(prompts) == UNLIMITED and all(number % 3 for number in ids) and len(set(ids)) == 300
    assert [index for index, number in enumerate(ids) if index == number] == [i for i in range(300) if i % 3]
    assert prompts.rejected >= 100
    alone = numbered(lambda number: number % 3 > 0)
    assert alone[153] == prompts[153] and alone[10**7] and alone[UNLIMITED - 1]  # depends on the index only


def test_a_filter_that_rejects_everything_is_an_error():
    with pytest.raises(UserError, match="256 generated problems in a row violate the rule"):
        numbered(lambda number: False)[0]
    assert numbered(lambda number: number == UNLIMITED - MAX_REJECTED)[0].id == f"t/{UNLIMITED - MAX_REJECTED}"


class Sums(Task):
    name = "sums"
    instruction = "Be brief."

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt("sums/0", ({"role": "user", "content": "1 + 1?\nBe brief."},), "2")]


def test_default_judge_accepts_the_default_gold_completion() -> None:
    task = Sums()
    (prompt,) = task.prompts("train")
    assert task.gold_completion(prompt) == r"\boxed{2}" and task.bare_question(prompt) == "1 + 1?"
    assert check_gold(task, "train") == []
    assert check_gold(task, "train", judge=task.judge("hash")) == ["sums/0"]


def test_split_all_exists_only_for_single_files() -> None:
    with pytest.raises(UserError, match="all"):
        prompts_of(Sums(), "all")


def test_validation_is_the_head_of_a_seeded_shuffle() -> None:
    train, validation = carve_validation(100, 10, seed=3)
    assert sorted(train + validation) == list(range(100)) and len(validation) == 10 and train == sorted(train)
    assert carve_validation(100, 10, seed=3) == (train, validation) != carve_validation(100, 10, seed=4)
    with pytest.raises(UserError, match="val_size"):
        carve_validation(10, 10, seed=0)
