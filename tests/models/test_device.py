"""Choice of device and number format."""

from __future__ import annotations

import pytest
import torch

from assay.models import pick_device, pick_dtype
from assay.types import UserError


def pretend(monkeypatch, *, cuda: int = 0, mps: bool = False, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda"), (0, True, "mps"), (0, False, "cpu")], ids=["cuda", "mps", "cpu"]
)
def test_auto_takes_the_best_there_is(monkeypatch, cuda, mps, expected):
    pretend(monkeypatch, cuda=cuda, mps=mps)
    assert pick_device().type == expected


@pytest.mark.parametrize(
    ("name", "said"), [("cuda", "no CUDA"), ("mps", "not available"), ("gpu", "cuda, cuda:N"), ("meta", "unknown")]
)
def test_a_device_that_is_not_there_is_one_clear_line(monkeypatch, name, said):
    pretend(monkeypatch)
    with pytest.raises(UserError, match=said):
        pick_device(name)


def test_gpu_numbers_are_checked(monkeypatch):
    pretend(monkeypatch, cuda=2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="2 GPUs"):
        pick_device("cuda:2")


def test_auto_dtype_is_bfloat16_only_where_the_gpu_computes_in_it(monkeypatch):
    pretend(monkeypatch, cuda=1)
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    pretend(monkeypatch, cuda=1, bf16=False)
    assert pick_dtype("auto", "cuda") == torch.float32


def test_named_dtypes():
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
    assert pick_dtype("float32", "cpu") == torch.float32
    with pytest.raises(UserError, match="float16 overflows"):
        pick_dtype("float16", "cpu")
    with pytest.raises(UserError, match="int4"):
        pick_dtype("int4", "cpu")
