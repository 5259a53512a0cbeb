"""Settings that contradict each other or the model end the command with one line, before there is a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns, abacus_words, gpt2_folder, llama_folder

KL = ("--algo.kl_coef", 0.1)
POLICY = ("--model", "models/policy", *KL, "--algo.reference")
SERVER = (*KL, "--reference.url", "http://127.0.0.1:9")
NF4 = ("--lora.quantize", "nf4", "--lora.rank", 2)
SEPARATE, CRITIC = ("--train.process", "separate"), ("--algo.critic", "true")
REFUSED: list[tuple[tuple[object, ...], str]] = [  # options, and what the error names
    (("--algo.recipe", "reinforce", "--replay.groups", 2), "importance ratio"),
    (("--algo.recipe", "gspo", "--replay.groups", 2), "recompute_logprobs"),
    (("--algo.reference_ema", 0.9), "algo.kl_coef"),
    ((*KL, "--algo.reference_ema", 0.9, "--algo.refresh_reference", 2), "algo.refresh_reference"),
    ((*KL, "--algo.reference", "preset:tiny"), "untrained"),
    ((*KL, "--algo.reference_ema", 1), "algo.reference_ema"),
    ((*POLICY, "models/other-words"), "tokenizer"),
    ((*POLICY, "models/fewer-words"), "tokenizer"),
    ((*POLICY, "models/short-context"), "model.max_length = 100"),
    ((*POLICY, "models/larger", "--algo.refresh_reference", 2), "must have the shape"),
    ((*SERVER, "--reference.server", "vllm", "--sampling.temperature", 0.7), "temperature"),
    ((*SERVER, "--algo.reference", "run:small@0"), "algo.reference"),
    ((*SERVER, "--algo.reference_ema", 0.9), "algo.reference_ema"),
    (("--lora.quantize", "nf4"), "lora.rank"),
    ((*NF4, "--train.compile", "on"), "train.compile"),
    ((*NF4, "--lora.quantize", "int3"), "lora.quantize"),
    (("--lora.rank", 2, "--model", "models/gpt2"), "all-linear"),
    (("--source", "async", "--algo", "reinforce"), "source.max_staleness"),
    (("--source", "async", "--engine", "hf", "--model", "models/gpt2"), "cannot update weights while it generates"),
    (("--env.name", "gess", "--task", ""), "guess"),
    ((*SEPARATE, "--train.compile", "on"), "would compile again in every step"),
    (("--train.process", "apart"), "train.process"),
    ((*CRITIC, "--lora.rank", 2), "critic cannot be combined with adapters: set lora.rank = 0"),
    ((*CRITIC, "--replay.groups", 2), "replay.groups = 0"),
    ((*CRITIC, *SEPARATE), "critic cannot be combined with train.process = 'separate'"),
    ((*CRITIC, "--algo.step_credit", "true"), "step_credit"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("refused"), abacus_words()
    models = folder / "models"
    gpt2_folder(models / "gpt2")
    llama_folder(models / "policy", 32, words)
    llama_folder(models / "larger", 64, words)
    llama_folder(models / "other-words", 64, words[::-1])
    llama_folder(models / "fewer-words", 64, words[:-1])
    llama_folder(models / "short-context", 64, words, positions=100)
    return folder


@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_contradictory_settings_are_refused_before_the_run_starts(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    named: str,
) -> None:
    monkeypatch.chdir(folder)
    small = SmallRuns(folder)
    capsys.readouterr()
    assert small.train(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("assay: ") and named in error and error.count("\n") == 1 and not small.runs.exists()
