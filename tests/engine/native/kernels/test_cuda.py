"""Machine code of kernels on disk, with a driver that only notes what it loads; `test_few_rows.py` runs kernels."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.engine.native.kernels import cuda


class Driver:
    """Loads what begins with "code"."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        return 0 if code.startswith(b"code") else 200

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:
        return 0

    def cuGetErrorString(self, result: int, message: Any) -> None:
        message._obj.value = b"device kernel image is invalid"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "compiled", lambda source, option: f"code of {source} for {option}".encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return driver


def test_code_is_compiled_once_and_again_if_the_file_is_damaged(driver: Driver, tmp_path: Path) -> None:
    cuda.Kernel("A", "a")
    (file,) = tmp_path.rglob("*.cubin")
    assert file.read_bytes() == b"code of A for --gpu-architecture=sm_90" == driver.loaded[0]
    file.write_bytes(b"code from disk")
    cuda.Kernel("A", "a")
    assert driver.loaded[1:] == [b"code from disk"]
    file.write_bytes(b"")
    cuda.Kernel("A", "a")
    assert (
        driver.loaded[2:] == [b"", b"code of A for --gpu-architecture=sm_90"] and file.read_bytes() == driver.loaded[0]
    )
    cuda.Kernel("B", "b")
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_files_of_others_are_not_loaded(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.Kernel("A", "a")
    (file,) = tmp_path.rglob("*.cubin")
    file.write_bytes(b"code from disk")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    cuda.Kernel("A", "a")
    assert b"code from disk" not in driver.loaded


def test_a_folder_that_cannot_be_written_is_no_error(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cuda.Kernel("A", "a")
    assert driver.loaded == [b"code of A for --gpu-architecture=sm_90"]


def test_without_a_compiler_the_kernels_are_not_available(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(source: str, option: str) -> bytes:
        raise OSError("libnvrtc.so.13 was not found")

    monkeypatch.setattr(cuda, "compiled", compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    available = cuda.is_available.__wrapped__
    with pytest.warns(UserWarning, match="kernels in CUDA C\\+\\+ are not used: libnvrtc.so.13 was not found"):
        assert not available(torch.device("cuda"))
    monkeypatch.setattr(cuda, "compiled", lambda source, option: b"code")
    assert available(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert not available(torch.device("cuda")) and not available(torch.device("cpu"))
