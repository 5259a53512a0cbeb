"""Runs with adapters on a base in 4 bits: files, resuming, verification of the engine's weights, refused settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import SmallRuns
from train_parts import tiny_decoder

from assay.mesh import Mesh
from assay.models import Lora, fingerprint, load_adapter, load_model
from assay.training.learner.parallel import pick_mode

pytestmark = pytest.mark.usefixtures("no_curves")
NF4 = ("--lora.quantize", "nf4", "--lora.rank", 2, "--lora.alpha", 4, "--algo.kl_coef", 0.1, "--optim.lr", 0.01)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_without_interruption(tmp_path: Path, dtype: str) -> None:
    small = SmallRuns(tmp_path)
    words = (*NF4, "--save.every", 1, "--train.steps", 3, "--dtype", dtype, "--engine.dtype", dtype)
    assert small.train(*words) == 0
    shutil.copytree(small.runs / "small", small.runs / "other")
    shutil.rmtree(small.checkpoint(3, "other"))
    small.lose_summary("other")
    assert small.resume("other") == 0
    small.same_run("small", "other", 3)
    base, last = small.runs / "small" / "base", small.checkpoint(3)
    stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    policy = load_model(str(base), dtype=stored)
    policy.quantize("cpu")
    policy.add_lora(Lora(2, 4.0))
    load_adapter(policy, last / "adapter")
    merged = load_file(last / "model" / "model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {stored}
    assert fingerprint(policy.weights(), stored) == fingerprint(merged.items())
    trained = {name.partition("|")[0] for name in load_file(last / "optimizer.safetensors")}
    assert trained == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert not (small.runs / "small" / "reference").exists()  # the base is the reference


@pytest.mark.slow
def test_the_probe_accepts_the_engine(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    assert small.train(*NF4, "--engine.verify", "probe") == 0
    gaps = [row["sync/probe_gap"] for row in small.metrics() if "sync/probe_gap" in row]
    assert gaps and max(gaps) < 1e-4


def test_a_quantized_model_is_not_sharded_by_itself() -> None:
    policy = tiny_decoder()
    policy.quantize("cpu")
    assert pick_mode("auto", policy, Mesh()) == "ddp"


@pytest.mark.slow
def test_fsdp_is_refused(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    process = small.launch(2, "train", small.config, *NF4, "--parallel.mode", "fsdp")
    output = process.communicate()[0]
    assert process.returncode and "quantized weights cannot be sharded: set parallel.mode = 'ddp'" in output
