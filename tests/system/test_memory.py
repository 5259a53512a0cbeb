"""Free main memory of machines and containers; checks of a model folder before its files are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.models import load_model, save_model
from assay.models.load import build_preset
from assay.models.spec import spec_from_hf
from assay.system import memory as module
from assay.system.model_files import MAX_LAYERS, check_model_files
from assay.text import char_tokenizer
from assay.text.tokenizer import load_tokenizer
from assay.types import UserError

GIB = 2**30


def write_cgroup(folder, limit, used, reclaimable=0, version=2) -> None:
    names = {1: module.CGROUP_V1, 2: module.CGROUP_V2}[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {reclaimable}\nfile 9\n")


def write_membership(root, text) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(text)


def bytes_left(root):
    return [left for left, _ in module.cgroup_limits(root)]


def test_memory_limits_of_cgroups_version_2_include_those_of_parents(tmp_path):
    write_membership(tmp_path, "0::/user/job\n")
    groups = tmp_path / "sys/fs/cgroup"
    write_cgroup(groups / "user/job", "max", 3 * GIB)
    assert bytes_left(tmp_path) == []
    write_cgroup(groups / "user", 8 * GIB, 5 * GIB, reclaimable=GIB)
    assert bytes_left(tmp_path) == [4 * GIB]
    write_cgroup(groups / "user/job", 4 * GIB, 3 * GIB)
    assert min(bytes_left(tmp_path)) == GIB
    write_cgroup(groups / "user/job", 4 * GIB, 5 * GIB)  # a limit that was lowered
    assert min(bytes_left(tmp_path)) == 0


def test_memory_limits_of_cgroups_version_1_and_of_both_versions(tmp_path):
    write_membership(tmp_path, "5:cpuset:/job\n4:cpu,memory:/docker/abc\n0::/\n")
    groups = tmp_path / "sys/fs/cgroup"
    write_cgroup(groups / "memory", 6 * GIB, 2 * GIB, reclaimable=GIB, version=1)  # as a container sees its own cgroup
    assert bytes_left(tmp_path) == [5 * GIB]
    write_cgroup(groups / "memory/docker/abc", 3 * GIB, GIB, version=1)
    write_cgroup(groups / "cpuset/job", 1, 0, version=1)
    write_cgroup(groups / "unified", 9 * GIB, GIB)
    assert sorted(bytes_left(tmp_path)) == [2 * GIB, 5 * GIB, 8 * GIB]


def test_a_system_without_cgroups_has_no_limits(tmp_path):
    assert bytes_left(tmp_path) == []


def test_used_and_free_main_memory_are_those_of_the_machine_or_of_a_fuller_container(tmp_path):
    assert module.host_memory_use(tmp_path) is None
    assert module.free_main_memory(tmp_path) is None
    write_membership(tmp_path, "0::/user/job\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages: 0\n")
    assert module.host_memory_use(tmp_path) == pytest.approx(0.6)
    write_cgroup(tmp_path / "sys/fs/cgroup/user/job", 8 * GIB, 7 * GIB, reclaimable=GIB)
    assert module.host_memory_use(tmp_path) == pytest.approx(0.75)
    assert module.free_main_memory(tmp_path) == 400 * 1024
    write_cgroup(tmp_path / "sys/fs/cgroup/user", GIB, GIB - 1234)
    assert module.free_main_memory(tmp_path) == 1234


# A model folder: special files and absurd configs end with one line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = char_tokenizer()
    save_model(build_preset("nano", tokenizer.vocab_size, max_length=64, seed=0), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_pipe_in_a_model_folder_is_refused_without_reading_it(folder: Path) -> None:
    check_model_files(folder)
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors' is a pipe, socket or device"):
        check_model_files(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin"])
def test_models_and_tokenizers_are_not_read_from_devices(folder: Path, name: str) -> None:
    """Reading from a pipe would never end; /dev/null lets this test end without the check as well."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(os.devnull)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"is a pipe, socket or device") as raised:
            load(str(folder))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("nested", [False, True])
def test_an_impossible_number_of_layers_is_refused(folder: Path, nested: bool) -> None:
    """Both transformers and the decoder create objects for each layer before they read weights."""
    layers = {"num_hidden_layers": MAX_LAYERS + 1}
    set_config(folder, **({"text_config": layers} if nested else layers))
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match="num_hidden_layers must be at most 2,000, not 2001"):
            load(str(folder))
    if not nested:
        with pytest.raises(UserError, match="num_hidden_layers must be an integer from 1 to 2,000"):
            spec_from_hf(json.loads((folder / "config.json").read_text()))


def test_weights_behind_a_broken_link_are_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match="no weights"):
        load_model(str(folder))
