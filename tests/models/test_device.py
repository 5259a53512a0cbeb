"""Choice of device, dtype and number of threads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from assay.models import device as module
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


@pytest.mark.parametrize(
    ("parameters", "cores", "threads"),
    [(860_000, 64, 1), (28_900_000, 64, 5), (134_500_000, 2, 2), (1_500_000_000, 64, 64)],
)
def test_small_models_use_fewer_threads_than_cores(parameters: int, cores: int, threads: int) -> None:
    assert module.choose_threads(parameters, cores) == threads


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def four_threads(monkeypatch):
    """Torch's default is 4 threads, and no variable is set."""
    for name in module.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "default_threads", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_threads_are_chosen_by_the_size_of_the_model_again_for_each_model(four_threads):
    module.set_threads(0, 1_000_000, CPU)
    assert torch.get_num_threads() == 1
    module.set_threads(0, 500_000_000, CPU)
    assert torch.get_num_threads() == 4


def test_threads_are_unchanged_on_a_gpu_and_with_an_environment_variable(four_threads, monkeypatch):
    module.set_threads(0, 1_000_000, GPU)
    assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    module.set_threads(0, 1_000_000, CPU)
    assert torch.get_num_threads() == 4


def test_the_setting_of_threads_has_priority_over_environment_and_size(four_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    module.set_threads(3, 1_000_000, CPU)
    assert torch.get_num_threads() == 3
    assert module.default_threads() >= 1


@pytest.mark.parametrize(
    ("threads", "load", "text"), [(1, 99.0, "1 CPU thread"), (2, 0.0, "2 CPU threads"), (2, 1e6, "--threads 1")]
)
def test_several_threads_on_a_busy_machine_are_pointed_out(four_threads, monkeypatch, threads, load, text):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    torch.set_num_threads(threads)
    assert text in module.describe_threads() and ("busy" in module.describe_threads()) == (load > 99)


@pytest.mark.parametrize("planted", ["none", "own", "writable", "link"])
def test_compiled_code_is_not_loaded_from_a_folder_of_others(tmp_path, monkeypatch, planted):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # restored after the test
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    assert folder.parent == tmp_path
    if planted == "link":
        folder.symlink_to("/tmp")
    elif planted != "none":
        folder.mkdir()
        folder.chmod(0o777 if planted == "writable" else 0o755)
    if planted in ("none", "own"):
        module.check_compile_cache()
        assert Path(cache_dir()) == folder
    else:
        with pytest.warns(UserWarning, match="TORCHINDUCTOR_CACHE_DIR"):
            module.check_compile_cache()
        assert Path(cache_dir()).stat().st_mode & 0o777 == 0o700 and Path(cache_dir()) != folder


@pytest.mark.gpu
def test_used_gpu_memory_is_the_peak_of_this_process_and_what_others_use():
    """Other processes may take memory or release it meanwhile: one of several measurements must be undisturbed."""
    total = torch.cuda.get_device_properties(0).total_memory
    added = []
    for _ in range(5):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = module.gpu_memory_use(torch.device("cuda"))
        held = torch.empty(total // 10, dtype=torch.uint8, device="cuda")
        del held
        after = module.gpu_memory_use(torch.device("cuda"))
        assert before is not None and after is not None
        added.append(after - before)
    assert any(0.05 < share < 0.15 for share in added), added
