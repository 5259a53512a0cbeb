from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train_parts import make_groups, tiny_decoder, weights_of

from assay.algos import make_algorithm
from assay.config import OptimConfig
from assay.models import Decoder, PolicyModel, load_model
from assay.runs import checkpoints
from assay.text import char_tokenizer, load_tokenizer
from assay.training.checkpoint import load_optimizer, read_state, save
from assay.training.learner.optim import make_adamw, make_optimizer
from assay.training.learner.update import Updater
from assay.types import UserError

STATE = {"step": 3, "cursor": 17, "tokens": 123456789012, "wall_s": 1.5, "facts": {"sft": {"loss": 0.25, "steps": 2}}}


ADAMW = OptimConfig(lr=1e-2, weight_decay=0.1)
MUON = OptimConfig(name="muon", lr=1e-2, matrix_lr=3e-2, weight_decay=0.1)


def trained(steps: int = 3, optim: OptimConfig = ADAMW) -> Updater:
    policy = tiny_decoder(dtype=torch.float32)
    updater = Updater(policy, make_optimizer(policy, optim))
    more(updater, steps)
    return updater


def more(updater: Updater, steps: int) -> None:
    algo = make_algorithm("grpo")
    groups = make_groups(tiny_decoder(), seed=4)
    algo.credit(groups)
    for _ in range(steps):
        updater.update(groups, algo, 1e-2)


def reloaded(path: Path, optim: OptimConfig = ADAMW) -> Updater:
    policy = load_model(str(checkpoints.folder(path, 3) / "model"))
    updater = Updater(policy, make_optimizer(policy, optim))
    load_optimizer(path, 3, policy, updater.optimizer)
    return updater


@pytest.mark.parametrize(("optim", "file_bytes"), [(ADAMW, 10**9), (MUON, 2_000)], ids=["one file", "many files"])
def test_a_checkpoint_restores_weights_and_optimizer_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: OptimConfig, file_bytes: int
) -> None:
    monkeypatch.setattr("assay.training.checkpoint.FILE_BYTES", file_bytes)
    original = trained(optim=optim)
    save(tmp_path, STATE, original.policy, original.optimizer, char_tokenizer())
    files = list(checkpoints.folder(tmp_path, 3).rglob("*.safetensors"))
    assert len(files) == 2 if file_bytes > 10**6 else len(files) > 10
    assert len({file.stat().st_mode for file in files}) == 1
    restored = reloaded(tmp_path, optim)
    assert isinstance(restored.policy, Decoder)
    assert read_state(tmp_path, 3, STATE) == STATE
    assert torch.equal(weights_of(original.policy), weights_of(restored.policy))
    assert len(moments(original)) > 20 and moments(original).keys() == moments(restored).keys()
    assert all(torch.equal(value, moments(restored)[key]) for key, value in moments(original).items())
    more(original, 2)
    more(restored, 2)
    assert torch.equal(weights_of(original.policy), weights_of(restored.policy))


def moments(updater: Updater) -> dict[str, torch.Tensor]:
    state = updater.optimizer.state
    return {f"{n}|{kind}": v for n, p in updater.policy.named_parameters() for kind, v in state[p].items()}


def test_the_first_checkpoint_has_no_optimizer_state(tmp_path: Path) -> None:
    policy = tiny_decoder(dtype=torch.float32)
    save(tmp_path, {"step": 3}, policy, make_adamw(policy, 1e-2), char_tokenizer())
    assert not reloaded(tmp_path).optimizer.state
    assert read_state(tmp_path, 3, {"step"}) == {"step": 3}


def test_the_model_folder_contains_its_tokenizer(tmp_path: Path) -> None:
    original = trained(1)
    tokenizer = char_tokenizer()
    save(tmp_path, STATE, original.policy, original.optimizer, tokenizer)
    loaded = load_tokenizer(str(checkpoints.folder(tmp_path, 3) / "model"))
    text = "12 + 3 = 15\n"
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.eos_ids == tokenizer.eos_ids
    assert loaded.has_chat_template


def test_moments_of_another_shape_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from train_parts import SPEC

    original = trained(1)
    save(tmp_path, STATE, original.policy, original.optimizer, char_tokenizer())
    other: PolicyModel = tiny_decoder(dtype=torch.float32, spec=replace(SPEC, hidden=32))
    with pytest.raises(UserError, match="does not fit"):
        load_optimizer(tmp_path, 3, other, make_adamw(other, 1e-2))


@pytest.mark.parametrize("content", ["[1, 2]", '{"step": 3}', json.dumps(STATE | {"colour": 3}), "{"])
def test_an_invalid_state_json_is_refused(tmp_path: Path, content: str) -> None:
    folder = checkpoints.folder(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json is not the state of a run"):
        read_state(tmp_path, 3, STATE)
