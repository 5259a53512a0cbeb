import datetime
import json
import sys
from decimal import Decimal

import pytest

from assay.system import memory
from assay.tasks import make_task
from assay.tasks.sources import read_parquet, read_rows
from assay.types import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

VERL = {
    "data_source": "my/numbers",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0},
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def problems(first, count):
    return [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(first, first + count)]


def questions(task, split):
    return [prompt.question for prompt in task.prompts(split)]


def test_a_parquet_file_gives_the_same_problems_and_splits_as_the_jsonl_file(tmp_path):
    rows = problems(0, 60)
    parquet = make_task("jsonl", write(tmp_path / "p.parquet", rows))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jsonl = make_task("jsonl", tmp_path / "p.jsonl")
    for split in ("train", "validation", "test", "all"):
        assert parquet.prompts(split) == jsonl.prompts(split)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-{:05d}-of-00011", "test-00000-of-00001"),
        ("data/train-{:05d}-of-00011", "data/test-00000-of-00001"),
        ("train/{:04d}", "test"),
    ],
)
def test_shards_of_datasets_are_read_in_order_by_split(tmp_path, train, test):
    for number in (10, 2, 0, *(n for n in range(11) if n not in (0, 2, 10))):
        write(tmp_path / f"{train.format(number)}.parquet", problems(10 * number, 10))
    write(tmp_path / f"{test.replace('test', 'validation')}.parquet", problems(500, 3))
    write(tmp_path / f"{test}.parquet", problems(600, 2))
    task = make_task("jsonl", tmp_path)
    assert questions(task, "train") == [f"{n} + 1?" for n in range(110)]
    assert questions(task, "validation") == [f"{n} + 1?" for n in (500, 501, 502)]
    assert [prompt.id for prompt in task.prompts("test")] == ["jsonl/test/0", "jsonl/test/1"]


def test_a_missing_shard_and_two_formats_of_a_split_are_errors(tmp_path):
    write(tmp_path / "a" / "train-00000-of-00002.parquet", problems(0, 5))
    with pytest.raises(UserError, match="only 1 shard of 2 of train: number 1 is missing"):
        make_task("jsonl", tmp_path / "a").prompts("train")
    write(tmp_path / "b" / "train.parquet", problems(0, 5))
    (tmp_path / "b" / "train.jsonl").write_text(json.dumps(problems(0, 1)[0]))
    with pytest.raises(UserError, match=r"both train\.jsonl and train\.parquet"):
        make_task("jsonl", tmp_path / "b").prompts("train")


def test_verl_files_need_no_settings(tmp_path):
    (prompt,) = make_task("jsonl", write(tmp_path / "train.parquet", [VERL])).prompts("all")
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.answer == "5"
    assert prompt.fields["data_source"] == "my/numbers" and prompt.fields["extra_info"]["index"] == 0


def test_columns_by_dotted_names(tmp_path):
    row = {"task": {"text": "How many?", "gold": {"value": 7}}, "worked": "so \\boxed{7}"}
    columns = {"question_column": "task.text", "answer_column": "task.gold.value", "solution_column": "worked"}
    (prompt,) = make_task("jsonl", write(tmp_path / "p.parquet", [row]), **columns).prompts("all")
    assert (prompt.question, prompt.answer, prompt.solution) == ("How many?", "7", "so \\boxed{7}")
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (same,) = make_task("jsonl", tmp_path / "p.jsonl", **columns).prompts("all")
    assert same == prompt


def test_a_missing_column_lists_the_columns(tmp_path):
    path = write(tmp_path / "p.parquet", [VERL])
    with pytest.raises(UserError, match=r'row 0 has no column "query"; it has .*"reward_model.ground_truth"'):
        make_task("jsonl", path, question_column="query").prompts("all")


def test_values_that_json_lacks_become_text_or_a_user_error(tmp_path):
    row = {"day": datetime.date(2025, 1, 2), "price": Decimal("1.50"), "image": b"\xff\x00", "note": b"text", "n": None}
    row |= {"span": datetime.timedelta(seconds=90), "images": [b"\xff"], "inner": {"image": b"\xff", "x": [1, 2]}}
    (values,) = read_parquet(write(tmp_path / "p.parquet", [row]))
    json.dumps(values)
    expected = {"day": "2025-01-02", "price": "1.50", "note": "text", "n": None, "inner": {"x": [1, 2]}}
    assert {name: value for name, value in values.items() if name not in ("span", "images")} == expected
    pq.write_table(pa.table({"day": pa.array([2**62], pa.timestamp("us"))}), tmp_path / "far.parquet")
    with pytest.raises(UserError, match="date value out of range"):
        read_parquet(tmp_path / "far.parquet")


def test_a_text_that_a_small_file_repeats_takes_memory_once_per_batch(tmp_path):
    indices = pa.array([0, 1, None] * 1000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 2**20, "short"]))
    pq.write_table(pa.table({"question": column}), tmp_path / "p.parquet", store_schema=False)
    rows = read_parquet(tmp_path / "p.parquet")
    assert [row["question"] for row in rows[:3]] == ["x" * 2**20, "short", None] and len(rows) == 3000
    assert len({id(row["question"]) for row in rows if row["question"]}) <= 2 * 3


def test_more_rows_than_memory_are_a_user_error_before_they_are_read(tmp_path, monkeypatch):
    column = pa.DictionaryArray.from_arrays(pa.array(bytes(10**6), pa.int8()), pa.array(["x"]))
    pq.write_table(pa.table({"question": column}), tmp_path / "p.parquet", store_schema=False)
    monkeypatch.setattr(memory, "free_main_memory", lambda: 2**29)
    with pytest.raises(UserError, match=r"does not fit into memory .*1,000,000 rows"):
        read_parquet(tmp_path / "p.parquet")


def test_damaged_empty_and_missing_files(tmp_path):
    whole = write(tmp_path / "p.parquet", problems(0, 50)).read_bytes()
    for name, content in (("cut", whole[:-20]), ("text", b"question,answer\n"), ("nothing", b"")):
        (tmp_path / f"{name}.parquet").write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}.parquet is not a readable Parquet file: .+") as raised:
            read_rows(tmp_path / f"{name}.parquet")
        assert "\n" not in str(raised.value)
    spoilt = bytearray(whole)
    spoilt[20:60] = bytes(40)
    (tmp_path / "spoilt.parquet").write_bytes(spoilt)
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_rows(tmp_path / "spoilt.parquet")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(write(tmp_path / "empty.parquet", pa.Table.from_pylist([], pa.schema({"a": pa.int64()})).to_pylist()))
    with pytest.raises(UserError, match="there is no file"):
        read_rows(tmp_path / "none.parquet")


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "p.parquet", problems(0, 1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"\[parquet\]"):
        read_rows(path)
