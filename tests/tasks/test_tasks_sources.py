from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest

from assay.system import memory
from assay.tasks import make_task, sources
from assay.tasks.sources import load_hub, read_jsonl, read_lines
from assay.types import UserError


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("rows", "val_size", "held_out", "seed"),
    [(50, None, 5, 0), (5100, None, 500, 0), (21, 10, 10, 1), (9, None, 0, 0)],
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
