"""Replies on disk."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from assay.rewards.cache import ReplyCache
from assay.types import UserError

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_a_reply_is_found_by_its_request(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "new" / "folder")
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, {"text": "é\ud800"})
    assert ReplyCache(tmp_path / "new" / "folder").get(dict(reversed(REQUEST.items()))) == {"text": "é\ud800"}
    assert cache.get(REQUEST | {"model": "n"}) is None
    assert cache.get(REQUEST | {"messages": [{"role": "user", "content": "hello "}]}) is None


@pytest.mark.parametrize("content", [b"", b'{"text": "cut', b"[1]", b"\xff\xfe"])
def test_a_damaged_file_counts_as_missing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = ReplyCache(tmp_path)
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(content)
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, {"text": "b"})
    assert cache.get(REQUEST) == {"text": "b"}


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
    cache.put(REQUEST, {"text": "a"})
    assert cache.get(REQUEST) is None
