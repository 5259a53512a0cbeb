"""Replies on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.rewards.model_judge import ReplyCache
from assay.types import UserError

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_a_reply_is_found_by_its_request(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "new" / "folder")
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, {"text": "é\ud800"})
    assert ReplyCache(tmp_path / "new" / "folder").get(dict(reversed(REQUEST.items()))) == {"text": "é\ud800"}
    assert cache.get(REQUEST | {"model": "n"}) is None
    assert cache.get(REQUEST | {"messages": [{"role": "user", "content": "hello "}]}) is None


@pytest.mark.parametrize("content", [b"", b'{"text": "cut', b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"text": 5}'])
def test_a_damaged_file_counts_as_missing_with_one_warning_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = ReplyCache(tmp_path, lambda reply: isinstance(reply["text"], str))
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"judge.cache: .* is not a reply") as warned:
        assert cache.get(REQUEST) is None and cache.get(REQUEST) is None
    assert len(warned) == 1
    cache.put(REQUEST, {"text": "b"})
    assert cache.get(REQUEST) == {"text": "b"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: os.symlink("/dev/zero", file)])
def test_pipes_folders_and_links_are_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    cache = ReplyCache(tmp_path)
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    file.unlink()
    make(file)
    with pytest.warns(UserWarning, match=r"judge.cache"):
        assert cache.get(REQUEST) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change the owner of a file")
def test_replies_of_other_users_count_only_where_not_everyone_may_write(tmp_path: Path) -> None:
    ReplyCache(tmp_path).put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    os.chown(file, 12345, -1)
    assert ReplyCache(tmp_path).get(REQUEST) == {"text": "a"}  # a folder that a team shares
    tmp_path.chmod(0o1777)
    with pytest.warns(UserWarning, match="another user"):
        assert ReplyCache(tmp_path).get(REQUEST) is None


def write_often(folder: Path, number: int) -> None:
    cache = ReplyCache(folder)
    for _ in range(100):
        cache.put(REQUEST, {"text": str(number) * 5000})


def test_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    write_often(tmp_path, 0)
    writers = [multiprocessing.get_context("fork").Process(target=write_often, args=(tmp_path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        reply = ReplyCache(tmp_path).get(REQUEST)
        assert reply is not None and len(reply["text"]) == 5000
        seen |= {frozenset(reply["text"])}
    assert all(len(digits) == 1 for digits in seen)  # never a mixture
    assert len(list(tmp_path.rglob("*.*"))) == 1  # no temporary files are left


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"judge.cache: cannot create"):
        ReplyCache(tmp_path / "file" / "below")


def test_a_reply_that_cannot_be_stored_is_no_error(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    folder = file.parent
    file.unlink()
    folder.rmdir()
    folder.write_text("")  # a file where the folder should be
    with pytest.warns(UserWarning, match=r"judge.cache: cannot write") as warned:
        cache.put(REQUEST, {"text": "a"})
        assert cache.get(REQUEST) is None
    assert len(warned) == 1
