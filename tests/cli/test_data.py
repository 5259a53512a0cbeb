"""`assay data`: prepare, show and check problems."""

from __future__ import annotations

import argparse
import hashlib
import json

import pytest

from assay.cli import data
from assay.tasks import make_task, overlap
from assay.tasks.base import NoSuchSplit
from assay.types import UserError


def assay_data(*words: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(word) for word in words]))


def write_source(folder, train):
    folder.mkdir()
    for split, n in (("train", train), ("test", 30)):
        rows = [{"question": f"{split} {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(n)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", train=40)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prepared_files_round_trip(tmp_path, source):
    out = tmp_path / "out"
    words = ["prepare", "gsm8k", "--path", source, "--val-size", 10, "--eval-size", 20, "--seed", 5]
    assert assay_data(*words, "--out", out) == 0
    rows = {name: read(out / name) for name in ("train.jsonl", "validation.jsonl", "test20.jsonl")}
    assert [len(part) for part in rows.values()] == [30, 10, 20]
    assert len({row["question"] for part in rows.values() for row in part}) == 60
    first = rows["train.jsonl"][0]
    assert first["messages"][0]["content"].startswith(first["question"] + "\nPlease reason")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["seed"] == 5 and manifest["files"]["test20.jsonl"]["rows"] == 20
    for name, about in manifest["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == about["sha256"]
    original, prepared = make_task("gsm8k", source, val_size=10, seed=5), make_task("jsonl", out)
    for split in ("train", "validation"):
        assert list(prepared.prompts(split)) == list(original.prompts(split))
        assert list(make_task("gsm8k", out).prompts(split)) == list(original.prompts(split))
    assert {p.id for p in prepared.prompts("test")} < {p.id for p in original.prompts("test")}

    again = tmp_path / "again"
    assert assay_data(*words, "--out", again) == 0
    assert all((again / name).read_bytes() == (out / name).read_bytes() for name in rows)
    words[-1] = 6
    assert assay_data(*words, "--out", again, "--force") == 0
    assert (again / "test20.jsonl").read_bytes() != (out / "test20.jsonl").read_bytes()


def test_files_without_validation_have_all_train_problems(tmp_path, source):
    out = tmp_path / "out"
    words = ("prepare", "gsm8k", "--path", source, "--out", out, "--force")
    for none in ((), ("--arg", "val_size=0"), ("--val-size", 0)):  # the first one writes a validation file
        assert assay_data(*words, *none) == 0
    assert sorted(file.name for file in out.iterdir()) == ["manifest.json", "test30.jsonl", "train.jsonl"]
    for task in (make_task("gsm8k", out), make_task("jsonl", out), make_task("gsm8k", source, val_size=0)):
        assert [prompt.answer for prompt in task.prompts("train")] == [str(i) for i in range(40)]
        with pytest.raises(NoSuchSplit):
            task.prompts("validation")
    assert assay_data("prepare", "abacus", "--out", tmp_path / "made", "--val-size", 0, "--train-size", 3) == 0
    assert not (tmp_path / "made" / "validation.jsonl").exists()


def test_default_sizes_of_prepared_files_fit_the_source(tmp_path):
    out, source = tmp_path / "out", write_source(tmp_path / "source", train=500)
    assert assay_data("prepare", "gsm8k", "--path", source, "--out", out) == 0
    sizes = {file.name: len(read(file)) for file in out.glob("*.jsonl")}
    assert sizes == {"train.jsonl": 450, "validation.jsonl": 50, "test30.jsonl": 30}
    before = (out / "train.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"already holds train.jsonl.*test30.jsonl.*--force"):
        assay_data("prepare", "gsm8k", "--path", source, "--out", out, "--seed", 9)
    assert (out / "train.jsonl").read_bytes() == before
    assert assay_data("prepare", "abacus", "--train-size", 600, "--out", tmp_path / "generated") == 0
    sizes = {file.name: len(read(file)) for file in (tmp_path / "generated").glob("*.jsonl")}
    assert sizes == {"train.jsonl": 600, "validation.jsonl": 500, "test500.jsonl": 500}


def test_prepared_gsm8k_keeps_its_prompt_and_rejects_another(tmp_path, source):
    out, again, alone = tmp_path / "out", tmp_path / "again", tmp_path / "alone.jsonl"
    wording = {"solution_style": "hash", "instruction": "Go."}
    sizes = ("--val-size", 10, "--eval-size", 20)
    pairs = [word for name, value in wording.items() for word in ("--arg", f"{name}={value}")]
    assert assay_data("prepare", "gsm8k", "--path", source, "--out", out, *sizes, *pairs) == 0
    assert assay_data("prepare", "gsm8k", "--path", out, "--out", again, *sizes) == 0  # prepared files: as they are
    for folder in (out, again):
        plain, named = make_task("gsm8k", folder), make_task("gsm8k", folder, **wording)
        first = plain.prompts("train")[0]
        assert first.solution.endswith(f"\n#### {first.answer}") and plain.judge().extract == "hash"
        assert list(named.prompts("train")) == list(plain.prompts("train"))
        assert plain.bare_question(first) + "\nGo." == first.question
        for other in ({"solution_style": "boxed"}, {"annotations": True}, {"instruction": ""}):
            with pytest.raises(UserError, match=f"was prepared with {next(iter(other))} = .* or prepare it again"):
                make_task("gsm8k", folder, **other)
    assert make_task("gsm8k", out / "test20.jsonl", annotations=False).prompts("all")[0].solution.startswith("It is")
    alone.write_bytes((out / "test20.jsonl").read_bytes())
    assert len(make_task("gsm8k", alone).prompts("all")) == 20
    with pytest.raises(UserError, match=r'without its manifest.json .*"annotations"'):
        make_task("gsm8k", alone, annotations=True).prompts("all")
    assert assay_data("check", "gsm8k", "--path", out) == 0
    with pytest.raises(UserError, match="remove annotations, or prepare it again with --arg annotations=true"):
        assay_data("show", "gsm8k", "--path", out, "--arg", "annotations=true")


@pytest.mark.parametrize("name", ["abacus", "countdown", "code"])
def test_prepared_files_of_generated_tasks_name_their_judge(tmp_path, name, capsys):
    out = tmp_path / name
    sizes = ("--train-size", 40, "--val-size", 10, "--eval-size", 15)
    assert assay_data("prepare", name, "--out", out, *sizes) == 0
    task = make_task("jsonl", out)
    assert list(task.prompts("train")) == list(make_task(name).prompts("train")[:40])
    assert overlap(task.prompts("train"), task.prompts("test")).n_shared == 0
    capsys.readouterr()
    assert assay_data("check", "jsonl", "--path", out / "test15.jsonl") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ok"] and summary["gold"]["all"]["checked"] == 15


def test_a_single_file_is_shown_and_checked_whole(tmp_path, capsys):
    rows = [{"question": f"{n} and {n}?", "answer": 2 * n} for n in range(20)]
    rows[19] = rows[0]  # a problem that stands twice
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert assay_data("show", "jsonl", "--path", file, "-n", 20) == 0
    printed = capsys.readouterr().out
    shown = [line for line in printed.splitlines() if line.startswith("---")]
    assert shown == [f"--- jsonl/all/{n}" for n in range(20)]
    assert assay_data("show", "jsonl", "--path", file, "-n", 2, "--json") == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(prompt["id"], prompt["answer"]) for prompt in shown] == [("jsonl/all/0", "0"), ("jsonl/all/1", "2")]
    assert assay_data("show", "jsonl", "--path", file, "--split", "test", "-n", 20) == 0
    assert capsys.readouterr().out.count("---") == 2
    assert assay_data("check", "jsonl", "--path", file) == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary["gold"]) == ["all"] and summary["gold"]["all"]["checked"] == 20
    assert summary["missing_splits"] == []
    file.write_text("\n".join(map(json.dumps, rows[:5])))
    assert assay_data("check", "jsonl", "--path", file) == 0
    assert json.loads(capsys.readouterr().out)["missing_splits"] == ["validation", "test"]


def test_check_reports_gold_answers_and_overlap(tmp_path, capsys):
    bad = {"question": "Two and two?", "answer": "4", "solution": "It is \\boxed{5}."}
    good = {"question": "One and one?", "answer": "2", "solution": "It is \\boxed{2}."}
    (tmp_path / "train.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad))
    (tmp_path / "test.jsonl").write_text(json.dumps(good))
    assert assay_data("check", "jsonl", "--path", tmp_path, "--arg", "extract=boxed") == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert printed.err.startswith("1 of 2 gold answers in split train not judged correct; the first: jsonl/train/1, ")
    assert not summary["ok"] and summary["missing_splits"] == ["validation"]
    assert summary["gold"]["train"]["failed"] == 1
    assert summary["gold"]["train"]["examples"] == [
        {"id": "jsonl/train/1", "status": "wrong", "parsed": "5", "answer": "4", "detail": ""}
    ]
    assert summary["overlap_with_train"]["test"]["n_shared"] == 1
    assert assay_data("check", "abacus", "--limit", 20) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ok"] and summary["gold"]["test"]["checked"] == 20


def test_check_names_the_missing_answer_form_and_options_that_work(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": n, "solution": f"{n}"}) for n in range(9)))
    assert assay_data("check", "jsonl", "--path", file) == 1
    advice = capsys.readouterr().err
    assert "\\boxed{ANSWER}" in advice and "--arg extract=FORM" in advice and advice.count("\n") == 1
    assert assay_data("check", "jsonl", "--path", file, "--arg", "extract=last-number") == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "gsm8k", "--path", "SOURCE", "--eval-size", 31], "exceeds the 30 problems"),
        (["prepare", "gsm8k", "--path", "SOURCE", "--val-size", 40, "--eval-size", 5], "cannot carve 40"),
        (["prepare", "gsm8k", "--path", "SOURCE/train.jsonl"], "is a single file"),
        (["prepare", "gsm8k", "--path", "SOURCE", "--train-size", 3], "only for generated tasks"),
        (["prepare", "abacus", "--arg", "style"], "NAME=VALUE"),
        (["prepare", "abacus", "--train-size", 1, "--out", "SOURCE/train.jsonl/x"], "cannot write"),
        (["show", "abacus", "--split", "all"], 'only a single file or list has the split "all"'),
        (["check", "gsm8k", "--path", "nowhere"], "there is no file or folder"),
    ],
)
def test_bad_input(words, message, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        assay_data(*(str(word).replace("SOURCE", str(source)) for word in words))
    assert not (tmp_path / "data").exists()
