"""The index of rollouts: incremental, equal to the files, rebuilt when damaged, and tolerant of damaged files."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from web_parts import HOSTILE, answer, group_of, make_run, prompt_of, standard_run, updated

from assay.runs import rollouts, write_rollouts
from assay.types import Group
from assay.web import index as index_module
from assay.web.folder import RunFolder


def indexed(index: index_module.RunIndex) -> dict[str, list[str]]:
    """Verdicts by file."""
    files = sorted(index.files.values(), key=lambda file: file.name)
    return {file.name: [index_module.STATUSES[code] for code in file.rows["status"]] for file in files}


STANDARD = {
    "evals/step-000000-before-test.jsonl": ["ok", "wrong"],
    "evals/step-000003-after-test.jsonl": ["wrong", "ok"],
    "rollouts/step-000001.jsonl": ["wrong", "wrong", "ok", "ok", "ok", "no_answer"],
    "rollouts/step-000002.jsonl": ["ok", "wrong"],
    "rollouts/step-000003.jsonl": ["ok", "ok", "wrong", "ok"],
}


def test_all_rollouts_are_indexed(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    index = updated(path)
    assert indexed(index) == STANDARD
    assert index.progress == {"done": 5, "total": 5}
    second = index.files["rollouts/step-000002.jsonl"]
    assert second.rows["sample"].tolist() == [0, 1] and second.prompts == [("p1", "what is p1?")]
    lines = (path / second.name).read_bytes().splitlines(keepends=True)
    assert second.rows["start"].tolist() == [0, len(lines[0])]
    assert second.rows["length"].tolist() == [json.loads(line)["length"] for line in lines]
    assert (
        index.store.texts(second)
        == index_module.fold("Second Try 0\n") + b"\0" + index_module.fold("Second Try 1\n") + b"\0"
    )
    assert second.previews == ["Second Try 0", "Second Try 1"]


def test_only_new_and_changed_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = standard_run(tmp_path)
    updated(path)
    read: list[str] = []
    original = index_module.read_file
    monkeypatch.setattr(index_module, "read_file", lambda *args: read.append(args[1]) or original(*args))
    index = updated(path)
    assert read == [] and indexed(index) == STANDARD
    write_rollouts(path, 4, [group_of("p3", ["error"])])
    write_rollouts(path, 2, [group_of("p1", ["timeout"])])
    assert not index.update()
    assert read == ["rollouts/step-000002.jsonl", "rollouts/step-000004.jsonl"]
    changed = {"rollouts/step-000002.jsonl": ["timeout"], "rollouts/step-000004.jsonl": ["error"]}
    assert indexed(index) == STANDARD | changed


def test_deleted_rollouts_disappear(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    index = updated(path)
    rollouts.prune(path, keep=1)
    index.update()
    assert [name for name in indexed(index) if name.startswith("rollouts")] == ["rollouts/step-000003.jsonl"]
    rollouts.truncate_after(path, 0)
    index.update()
    assert list(indexed(index)) == ["evals/step-000000-before-test.jsonl"]
    assert len(list(index.store.folder.rglob("*.zip"))) == 1


def test_a_limited_update_continues_where_it_stopped(tmp_path: Path) -> None:
    index = index_module.RunIndex(RunFolder(standard_run(tmp_path)))
    progress = []
    while index.update(seconds=0.0):  # one file at a time
        progress.append(index.progress["done"])
    assert progress == [1, 2, 3, 4] and indexed(index) == STANDARD


def changed_byte(path: Path, part: bytes) -> None:
    """Change one bit of a member of a ZIP file."""
    content = bytearray(path.read_bytes())
    content[content.index(part) + len(part) + 3] ^= 128
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["garbage", "truncated", "deleted", "facts", "rows"])
def test_damaged_files_of_the_index_are_replaced(tmp_path: Path, damage: str) -> None:
    """Otherwise the page would show other rewards than the run has."""
    path = standard_run(tmp_path)
    index = updated(path)
    rows = {name: file.rows.tobytes() for name, file in index.files.items()}
    file = index.store.path("rollouts/step-000001.jsonl")
    if damage == "garbage":
        file.write_bytes(b"no index" * 1000)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:500])
    elif damage == "deleted":
        file.unlink()
    else:
        changed_byte(file, damage.encode())
    again = updated(path)
    assert {name: file.rows.tobytes() for name, file in again.files.items()} == rows and again.problem is None
    index.update()
    assert index.files.keys() == again.files.keys() and file.is_file()


def test_texts_that_cannot_be_read_are_indexed_again(tmp_path: Path) -> None:
    index = updated(standard_run(tmp_path))
    file = index.files["rollouts/step-000001.jsonl"]
    changed_byte(index.store.path(file.name), b"texts")
    assert index.store.texts(file) == b""
    assert not index.update() and index.store.texts(file) and index.problem is None
    assert index.files[file.name] is not file  # so that it is searched again


def test_an_index_that_is_not_a_folder_is_not_used(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    folder = index_module.Store(path).folder
    folder.rmdir()
    folder.touch()
    assert indexed(updated(path)) == STANDARD and folder.stat().st_size == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change the owner of a folder")
def test_the_cache_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(index_module.cache_folder(), 12345, -1)
    assert not index_module.Store(tmp_path).folder.is_relative_to(os.environ["XDG_CACHE_HOME"])


def test_an_index_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    index = updated(path)
    blocked = index.store.path("skipped/step-000004.jsonl").parent
    blocked.touch()
    write_rollouts(path, 4, [group_of("p3", ["error"])], "skipped")
    assert not index.update() and str(index.store.folder) in (index.problem or "")
    blocked.unlink()
    assert not index.update() and index.problem is None
    assert "skipped/step-000004.jsonl" in indexed(index)


def test_without_a_writable_cache_folder_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    index = updated(standard_run(tmp_path / "runs"))
    assert indexed(index) == STANDARD and not index.store.folder.is_relative_to(tmp_path)


def test_the_cache_folder_is_private_and_forgets_old_indexes(cache: Path) -> None:
    folder = index_module.cache_folder()
    assert folder == cache / "assay" / "view" and folder.stat().st_mode & 0o077 == 0
    for name, days in (("old", 90), ("new", 1)):
        (folder / name / "rollouts").mkdir(parents=True)
        os.utime(folder / name, ((folder / name).stat().st_mtime - days * 86400,) * 2)
    index_module.delete_unused(folder)
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_hostile_texts_are_stored_as_they_are(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    prompt = prompt_of(HOSTILE[4], HOSTILE[0])
    write_rollouts(path, 1, [Group(prompt, [answer(prompt, n, text) for n, text in enumerate(HOSTILE)])])
    (file,) = updated(path).files.values()
    assert len(file.rows) == len(HOSTILE) and file.problems == []
    texts = updated(path).store.texts(file).split(b"\0")
    assert texts[0] == b"<script>alert(1)</script>\n" and texts[3] == b"nul   and \x1b[31m escape\n"
    assert texts[4] == b"lone ? surrogate\n"
    assert texts[8].decode() == "日本語 äöü ss i̇ fi 👩‍👩‍👧\n"


def test_damaged_lines_do_not_hide_the_others(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    file = path / "rollouts" / "step-000001.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = lines[1][:50]
    lines[3] = "[1, 2]"
    file.write_text("\n".join(lines)[:-40])  # the last line is half-written
    content, _ = index_module.read_file(RunFolder(path), "rollouts/step-000001.jsonl")
    assert content.rows["index"].tolist() == [0, 2, 4]  # line numbers, which belong to the arrays
    name = "rollouts/step-000001.jsonl"
    assert content.problems == [
        f"{name}, line 2: is not a rollout",
        f"{name}, line 4: is not a rollout",
        f"{name}, line 6: is incomplete",
    ]


def test_values_of_unexpected_types_do_not_raise(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    good = json.loads((path / "rollouts" / "step-000002.jsonl").read_text().splitlines()[0])
    odd = [
        {},
        {**good, "verdict": None, "reward": "NaN", "group": "x", "version": 10**30, "turns": 7},
        {**good, "verdict": {"status": ["ok"], "detail": 3}, "text": None, "messages": [1, {"role": "user"}]},
        {**good, "prompt_id": {"a": 1}, "length": 1.5, "finish": {}, "truncated": "yes", "reward": True},
    ]
    (path / "rollouts" / "step-000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    content, _ = index_module.read_file(RunFolder(path), "rollouts/step-000002.jsonl")
    assert len(content.rows) == 4 and not content.rows["status"][:3].any()
    assert np.isnan(content.rows["reward"]).tolist() == [True, True, False, True] and content.rows["turns"].tolist()[
        :2
    ] == [1, 1]


def test_files_of_a_newer_version_are_shown_with_a_warning(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    file = path / "rollouts" / "step-000002.jsonl"
    file.write_text(file.read_text().replace('"schema": 2', '"schema": 9'))
    content, _ = index_module.read_file(RunFolder(path), "rollouts/step-000002.jsonl")
    assert len(content.rows) == 2 and "schema version 9, newer than" in content.problems[0]


def test_arrays_that_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = standard_run(tmp_path)
    name, file = "rollouts/step-000001.jsonl", path / "rollouts" / "step-000001.npz"
    folder = RunFolder(path)
    assert index_module.arrays_problem(folder, name, 6) is None
    assert (
        index_module.arrays_problem(folder, name, 5)
        == f"{name} has 5 lines, and {name[:-6]}.npz has 6 answers: they do not match"
    )
    content = file.read_bytes()
    for damaged in (content[:300], b"", b"PK" + b"\0" * 100):
        file.write_bytes(damaged)
        assert f"{name[:-6]}.npz cannot be read" in (index_module.arrays_problem(folder, name, 6) or "")
    np.savez(file, other=np.zeros(3))
    assert "cannot be read (KeyError" in (index_module.arrays_problem(folder, name, 6) or "")
    file.unlink()
    assert "is missing" in (index_module.arrays_problem(folder, name, 6) or "")
    file.symlink_to(tmp_path / "outside.npz")
    np.savez(tmp_path / "outside.npz", offsets=np.zeros(7))
    assert "leads out of the run folder" in (index_module.arrays_problem(folder, name, 6) or "")
    monkeypatch.setattr(index_module, "MAX_ARRAYS", 100)
    assert "more than" in (index_module.arrays_problem(folder, "rollouts/step-000002.jsonl", 2) or "")


def test_arrays_equal_those_of_numpy(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    own = index_module.read_arrays(RunFolder(path), "rollouts/step-000001.jsonl")
    with np.load(path / "rollouts" / "step-000001.npz") as arrays:
        assert own.keys() == set(arrays.files) and len(own) > 5
        for name, array in own.items():
            assert np.array_equal(array, np.atleast_1d(arrays[name]), equal_nan=array.dtype.kind == "f"), name
            assert array.dtype == arrays[name].dtype


def test_only_flat_arrays_of_numbers_are_read() -> None:
    for array in (np.array(["text"]), np.array([object()]), np.zeros((2, 2)), np.zeros(3, "c16"), np.zeros(3, ">i4")):
        file = io.BytesIO()
        np.save(file, array)
        with pytest.raises(ValueError):
            index_module.parsed_array(file.getvalue())
    for dtype in ("int64", "float32", "int8", "bool", "uint16"):
        for values in ([], [1], [0, 1, 1]):
            np.save(file := io.BytesIO(), np.array(values, dtype))
            assert index_module.parsed_array(file.getvalue()).tolist() == np.array(values, dtype).tolist()
    np.save(file := io.BytesIO(), np.zeros(9))
    content = file.getvalue()
    for damaged in (content[:-1], content[:-8], b"", content.replace(b"(9,)", b"(99,)")):
        with pytest.raises(ValueError):
            index_module.parsed_array(damaged)


def test_links_and_foreign_files_are_not_indexed(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "SECRET", "prompt_id": "SECRET"}\n')
    (path / "rollouts" / "step-000009.jsonl").symlink_to(secret)
    (path / "rollouts" / "step-7.jsonl").write_text("{}\n")
    (path / "rollouts" / "notes.txt").write_text("x")
    os.mkfifo(path / "evals" / "step-000004-eval-test.jsonl")
    (path / "evals" / os.fsdecode(b"step-000001-\xff.jsonl")).write_text("{}\n")
    index = updated(path)
    empty = {"rollouts/step-000009.jsonl": [], "evals/step-000004-eval-test.jsonl": []}
    assert indexed(index) == STANDARD | empty
    assert not any(b"secret" in index.store.texts(file) for file in index.files.values())
    other = make_run(tmp_path / "other")
    (other / "rollouts").symlink_to(path / "rollouts")
    assert indexed(updated(other)) == {}


# Priority of requests


def test_work_waits_until_the_last_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "WAIT_S", 60.0)
    activity, done = index_module.Activity(), threading.Event()
    activity.give_way()  # no request: it returns at once
    first, second = activity, activity
    with first:
        second.__enter__()
        worker = threading.Thread(target=lambda: (activity.give_way(), done.set()))
        worker.start()
    assert activity.requests == 1 and not done.wait(0.1)
    second.__exit__()
    worker.join(30)
    assert done.is_set()


def test_work_continues_while_there_are_always_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "WAIT_S", 0.01)
    monkeypatch.setattr(index_module, "WORK_S", 60.0)
    activity = index_module.Activity()
    with activity:
        activity.give_way()
        monkeypatch.setattr(index_module, "WAIT_S", 60.0)
        start = time.monotonic()
        activity.give_way()  # it has just waited
        assert time.monotonic() - start < 30


def test_requests_at_the_same_time_share_their_time() -> None:
    activity = index_module.Activity()
    assert activity.share(0.1) == 0.1
    with activity, activity:
        assert activity.share(0.1) == 0.05


def test_two_processes_may_index_the_same_run(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    for step in range(1, 31):
        write_rollouts(path, step, [group_of("p", ["ok", "wrong"])])
    results: list[dict[str, list[str]]] = []
    threads = [threading.Thread(target=lambda: results.append(indexed(updated(path)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and all(len(result) == 30 for result in results)
