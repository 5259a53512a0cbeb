"""Proof of weight sync: fingerprints and the probe find weights that were not copied, and give no false alarms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broken_sync import KINDS, BrokenWeights, break_sync, break_with
from processes import start
from safetensors.torch import load_file
from serve_parts import byte_tokenizer
from small_run import SmallRuns
from sync_parts import LR, Learning
from train_parts import make_adamw, tiny_decoder

from assay.config import EngineConfig, ServerConfig
from assay.engine import make_engine
from assay.engine.native.engine import NativeEngine
from assay.engine.remote.assay import AssayEngine
from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import HFModel, Lora, PolicyModel
from assay.models.base import digests, fingerprint
from assay.runs import checkpoints
from assay.training import sync
from assay.training.learner.update import Updater
from assay.training.parallel import parallelise
from assay.training.run import TrainingRun
from assay.types import UserError

pytestmark = pytest.mark.usefixtures("no_curves")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_copies_all_weights_and_sets_the_version(dtype: torch.dtype) -> None:
    first, second = tiny_decoder(0, torch.float32), tiny_decoder(1, torch.float32)
    engine = make_engine("native", first, device="cpu", dtype=dtype)
    before = engine.fingerprint()
    sync.sync_weights(second, engine, version=7)
    assert engine.info.version == 7 and engine.fingerprint() != before
    sync.sync_weights(first, engine, version=8)
    assert engine.fingerprint() == before
    with torch.no_grad():
        next(first.parameters()).add_(1.0)
    assert engine.fingerprint() == before  # copied, not shared


def policy_for(backend: str, kind: str) -> PolicyModel:
    """A decoder for the native engine; another architecture for the hf engine."""
    policy = tiny_neox() if backend == "hf" else tiny_decoder(0, torch.float32)
    if kind == "unmerged":
        policy.add_lora(Lora(2, 4.0))
    return policy


def tiny_neox() -> PolicyModel:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = GPTNeoXConfig(vocab_size=23, max_position_embeddings=64, initializer_range=0.3, **sizes)
    return HFModel(GPTNeoXForCausalLM(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "hf"])
def test_fingerprints_detect_every_broken_sync_at_once_and_name_the_weights(backend: str, kind: str) -> None:
    learning = Learning(policy_for(backend, kind), "fingerprint")
    broken = break_sync(learning.engine, learning.policy, kind)
    steps, text = learning.steps_to_error()
    assert steps == 1 and "differ from those of the trainer" in text and "\n" not in text
    if kind in ("skipped", "rows", "transposed"):
        assert f": 1 weight of {len(broken.first)}: {broken.name} (fing" in text
    else:
        wrong = learning.engine.digests().items() - digests(learning.policy.weights()).items()  # type: ignore[attr-defined]
        assert len(wrong) > 3 and f": {len(wrong)} weights of" in text and f" and {len(wrong) - 3} more (" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "hf"])
def test_the_probe_detects_every_broken_sync_in_float32(backend: str, kind: str) -> None:
    """At the learning rate of the demo, without fingerprints."""
    learning = Learning(policy_for(backend, kind))
    break_sync(learning.engine, learning.policy, kind)
    steps, text = learning.steps_to_error()
    assert steps <= 2, text  # the first step of "unmerged" changes one of two factors, and the other one is 0
    assert "differ from those of the trainer" in text and "of probe sequence" in text and "\n" not in text


@pytest.fixture(scope="module")
def served() -> Iterator[AssayEngine]:
    """The engine assay with two servers, in processes of their own."""
    settings = {"settings": ServerConfig(servers=2), "save_tokenizer": byte_tokenizer().save}
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_batch": 8}
    engine = make_engine("assay", tiny_decoder(0, torch.float32), settings, **options)
    assert isinstance(engine, AssayEngine)
    yield engine
    engine.close()


@pytest.mark.slow
def test_the_probe_names_the_one_server_with_stale_weights(
    served: AssayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_decoder(0, torch.float32)
    served.update_weights(policy, 0)
    learning = Learning(policy, engine=served)
    first, second = served.servers
    with monkeypatch.context() as patch:
        patch.setattr(AssayEngine, "servers", [first])
        with pytest.raises(sync.SyncError, match=f"trainer: {second.url}: "):
            learning.update()


@pytest.mark.parametrize("kind", ["skipped", "transposed", "late", "frozen"])
def test_the_probe_detects_broken_syncs_of_a_bfloat16_engine(kind: str) -> None:
    learning = Learning(tiny_decoder(0, torch.float32), dtype=torch.bfloat16, lr=5 * LR)
    break_sync(learning.engine, learning.policy, kind)
    steps, _ = learning.steps_to_error(60)
    assert steps <= {"transposed": 1, "frozen": 12, "late": 40, "skipped": 60}[kind]


@pytest.mark.slow
def test_hundreds_of_healthy_steps_give_no_false_alarm() -> None:
    """bfloat16 engine, float32 trainer. The first weights are exact in bfloat16, as those of most models."""
    policy = tiny_decoder(3, torch.float32)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(weight.bfloat16())
    learning = Learning(policy, dtype=torch.bfloat16, length=8)
    rows = [learning.update() for _ in range(200)]
    gaps = [row["sync/probe_gap"] / row["sync/probe_limit"] for row in rows]
    assert rows[-1]["sync/probe_change"] > 20 * rows[-1]["sync/probe_gap"]  # the policy has changed a lot
    assert max(gaps) < 0.9 and np.mean(gaps[-50:]) < 1.5 * np.mean(gaps[:50])  # far from the limit, without a trend


@pytest.mark.parametrize("sharded", [False, True])
def test_a_trainer_in_bfloat16_gives_no_false_alarm_while_little_changes(
    monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """The noise of its own scores would look like changes that the engine misses. FSDP cannot score in float32."""
    if sharded:
        monkeypatch.setattr(sync, "is_fsdp", lambda weight: True)
    learning = Learning(tiny_decoder(3, torch.float32), dtype=torch.bfloat16, trainer_dtype=torch.bfloat16, lr=LR / 100)
    rows = [learning.update() for _ in range(20)]
    assert rows[-1]["sync/probe_change"] < 2 * rows[-1]["sync/probe_gap"]  # or the test shows nothing


def test_the_effect_of_rounding_is_known_in_every_precision_of_the_trainer() -> None:
    """It is measured by changing weights, and a change must survive the trainer's own rounding."""
    policy = tiny_decoder(0, torch.float32)
    effects = {}
    for dtype in (torch.bfloat16, torch.float32):
        learning = Learning(policy, dtype=torch.bfloat16, trainer_dtype=dtype)
        effects[dtype] = learning.weight_sync.start.rounding
    with sync.as_served(policy, torch.bfloat16):
        rounded = sync.trainer_scores(learning.updater, learning.weight_sync.sequences)
    exact = sync.trainer_scores(learning.updater, learning.weight_sync.sequences)
    assert 0.5 < effects[torch.bfloat16] / effects[torch.float32] < 2
    assert 0.3 < effects[torch.float32] / np.sqrt(np.mean((rounded - exact) ** 2)) < 3


@pytest.mark.parametrize("kind", ["plain", "adapters", "quantized"])
def test_the_probe_leaves_the_weights_of_the_trainer_as_they_are(kind: str) -> None:
    policy = tiny_decoder(0, torch.float32)
    if kind == "quantized":
        policy.quantize("cpu")
    if kind != "plain":
        policy.add_lora(Lora(2, 4.0))
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.add_(0.1)
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    served = {name: weight.detach().to(torch.bfloat16).float() for name, weight in policy.weights()}
    with sync.as_served(policy, torch.bfloat16) as weights:
        assert all(torch.equal(weight, served[name]) for name, weight in policy.weights())
        sync.perturb(weights, 0.1)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())
    with pytest.raises(ZeroDivisionError), sync.as_served(policy, torch.bfloat16):
        raise ZeroDivisionError
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


def test_trainer_scores_equal_those_of_the_engine_with_adapters_merged() -> None:
    policy = tiny_decoder(0, torch.float64)
    policy.add_lora(Lora(2, 4.0))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.add_(0.1 if "lora_B" in name else 0.0)
    engine = make_engine("native", policy, device="cpu", dtype=torch.float64)
    sequences = sync.probe_sequences([[1, 2, 3]], 23, 40, seed=1)
    ours = sync.trainer_scores(Updater(policy, make_adamw(policy, LR), temperature=0.5), sequences)
    theirs = np.concatenate([np.array(one) for one in engine.score(sequences)])
    assert len(ours) == sum(len(ids) - 1 for ids in sequences) and np.abs(ours - theirs).max() < 1e-9


def test_a_wrong_model_is_detected_before_training() -> None:
    learning = Learning(tiny_decoder(0, torch.float32))
    learning.engine.update_weights(tiny_decoder(1, torch.float32), 0)
    with pytest.raises(sync.SyncError, match=r"version 0.* rounding explains at most 0.02.* of probe sequence"):
        learning.weight_sync.verify(0)


def test_an_engine_that_reports_another_version_is_refused() -> None:
    learning = Learning(tiny_decoder(0, torch.float32), "fingerprint")
    with pytest.raises(sync.SyncError, match=r"sync of version 3.*: it serves version 0"):
        learning.weight_sync.verify(3)


def test_scores_that_are_not_finite_are_reported() -> None:
    learning = Learning(tiny_decoder(0, torch.float32))
    scores = learning.engine.score(learning.weight_sync.sequences)
    scores[2][3] = float("nan")
    learning.engine.score = lambda sequences: scores  # type: ignore[method-assign,assignment,misc]
    _, text = learning.steps_to_error()
    assert "is nan, " in text and "most at token 4 (id" in text and "of probe sequence 2: nan in the engine" in text


def test_verification_every_n_versions() -> None:
    learning = Learning(tiny_decoder(0, torch.float32), "fingerprint")
    learning.weight_sync.every = 3
    break_sync(learning.engine, learning.policy, "frozen")
    assert learning.steps_to_error()[0] == 3
    assert learning.weight_sync.fingerprint is not None


def test_without_verification_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = Learning(tiny_decoder(0, torch.float32), "off")
    monkeypatch.setattr(learning.engine, "fingerprint", None)
    monkeypatch.setattr(learning.engine, "score", None)
    assert learning.update() == {}


def test_the_state_of_the_probe_survives_json() -> None:
    learning = Learning(tiny_decoder(0, torch.float32), dtype=torch.bfloat16)
    other = sync.WeightSync(learning.updater, learning.engine, "probe", sequences=[[1, 2]])
    for _ in range(2):
        learning.update()
    saved = json.loads(json.dumps(learning.weight_sync.state_dict()))
    other.load_state_dict(saved)
    assert other.state_dict() == learning.weight_sync.state_dict()
    assert other.verify(2) == learning.weight_sync.verify(2)
    other.load_state_dict(saved | {"engine": "NativeEngine, torch.float32", "sequences": []})
    other.load_state_dict({"engine": saved["engine"], "sequences": [], "gaps": [0.1]})
    assert other.sequences == learning.weight_sync.sequences  # of another engine, or of another probe: not used


def test_probe_sequences_contain_prompts_and_random_tokens() -> None:
    prompts = [[number] * 100 for number in range(20)]
    sequences = sync.probe_sequences(prompts, 50_000, 4096, seed=0)
    assert [len(ids) for ids in sequences] == [32] * 24 + [256]
    assert sequences[:12] == [[number] * 32 for number in range(12)]
    assert len({token for ids in sequences[12:] for token in ids}) > 600  # of 640
    assert sync.probe_sequences([[5, 6]], 100, 16, seed=0)[0][:2] == [5, 6]
    assert {len(ids) for ids in sync.probe_sequences([], 100, 16, seed=0)} == {15}
    assert sync.probe_sequences([], 100, 16, seed=0) != sync.probe_sequences([], 100, 16, seed=1)


def test_names_of_differing_missing_and_unknown_weights() -> None:
    ours = {"a": "a:1", "b": "b:1", "c": "c:1"}
    assert sync.differing_weights(ours, ours | {"b": "b:2"}) == "1 weight of 3: b"
    assert sync.differing_weights(ours, {"a": "a:1", "c": "c:1"}) == "1 weight of 3: b (missing in the engine)"
    assert sync.differing_weights(ours, ours | {"d": "d:1"}) == "1 weight of 3: d"
    assert sync.differing_weights(ours, {}).endswith("b (missing in the engine), c (missing in the engine)")


@pytest.mark.parametrize(
    ("verify", "lacks", "method"),
    [
        ("auto", (), "fingerprint"),
        ("auto", ("fingerprint",), "probe"),
        ("auto", ("fingerprint", "score"), "off"),
        ("probe", (), "probe"),
        ("off", (), "off"),
        ("fingerprint", ("fingerprint",), ""),
        ("probe", ("score",), ""),
    ],
)
def test_the_method_follows_settings_and_capabilities(verify: Any, lacks: tuple[str, ...], method: str) -> None:
    engine = make_engine("native", tiny_decoder(), device="cpu", dtype=torch.float64)
    assert isinstance(engine, NativeEngine)
    able = replace(engine.info.capabilities, **dict.fromkeys(lacks, False))
    engine.info = replace(engine.info, capabilities=able)
    cfg = EngineConfig(verify=verify)
    if method:
        assert sync.verify_method(cfg, engine) == method
    else:
        with pytest.raises(UserError, match=f"engine.verify = '{verify}' needs .*: set it to auto"):
            sync.verify_method(cfg, engine)


@pytest.mark.slow
def test_a_run_is_verified_by_the_probe_and_resumes_exactly(small: SmallRuns) -> None:
    words = ("--engine.verify", "probe", "--train.steps", 4, "--save.every", 2)
    assert small.train(*words, "--name", "whole") == 0
    assert small.train(*words, "--name", "part", "--train.steps", 2) == 0
    assert small.resume("part", "--train.steps", 4) == 0
    steps, whole = ([row for row in small.timeless(name) if "reward/mean" in row] for name in ("part", "whole"))
    kinds = ("sync/", "loss/", "optim/", "policy/")
    for ours, theirs in zip(steps, whole, strict=True):
        assert all(ours[key] == theirs[key] for key in theirs if key.startswith(kinds))
    models = [load_file(small.checkpoint(4, name) / "model" / "model.safetensors") for name in ("part", "whole")]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())
    assert all(0 < row["sync/probe_gap"] < row["sync/probe_limit"] for row in steps)
    assert steps[3]["sync/probe_change"] > steps[0]["sync/probe_change"] > 0
    states = [json.loads((small.checkpoint(step, "part") / "state.json").read_text()) for step in (0, 4)]
    assert states[0]["weight_sync"] == states[1]["weight_sync"] != {}


@pytest.mark.parametrize("method", ["fingerprint", pytest.param("probe", marks=pytest.mark.slow)])
def test_a_broken_sync_ends_the_run_with_one_line_and_the_checkpoint_before_is_kept(
    small: SmallRuns, method: str, monkeypatch: pytest.MonkeyPatch, stderr_of: Callable[..., str]
) -> None:
    built = TrainingRun.begin

    def begin(run: TrainingRun) -> None:
        built(run)
        break_sync(run.collector.engine, run.learner.policy, "skipped")

    monkeypatch.setattr(TrainingRun, "begin", begin)
    error = stderr_of(small.train("--engine.verify", method))
    assert "after the weight sync of version 1, the weights of the engine differ" in error and error.count("\n") == 1
    status = json.loads((small.runs / "small" / "status.json").read_text())
    assert status["state"] == "failed" and "resume from the last checkpoint" in status["error"]
    monkeypatch.undo()
    assert checkpoints.last_intact(small.runs / "small") == (0, [])
    assert small.resume("small") == 0


def verify_on_ranks(_: Mesh, folder: Path) -> None:
    """Train and verify on FSDP x TP ranks; then the engine of the last data-parallel rank becomes stale."""
    mesh = init_mesh(2)
    for method, dtype in (("probe", torch.bfloat16), ("fingerprint", torch.bfloat16), ("probe", torch.float32)):
        policy = parallelise(tiny_decoder(0, torch.float32), mesh, "fsdp")
        learning = Learning(policy, method, dtype, mesh=mesh, lr=10 * LR)  # type: ignore[arg-type]
        for _ in range(3):
            shards = [local_tensor(weight.detach()).clone() for weight in policy.parameters()]
            before, metrics = fingerprint(policy.weights()), learning.weight_sync.verify(learning.step)
            assert fingerprint(policy.weights()) == before
            now = [local_tensor(weight.detach()) for weight in policy.parameters()]
            assert all(torch.equal(*pair) for pair in zip(shards, now, strict=True))
            assert len(set(map(str, mesh.all_gather_objects(metrics)))) == 1
            metrics = learning.update()
        scores = learning.weight_sync._trainer_scores()[0] if method == "probe" else np.zeros(1)
        weights = {name: weight.clone() for name, weight in policy.weights()}
        if mesh.is_main:
            torch.save((scores.tolist(), weights), folder / f"{method}-{dtype}.pt")
        broken = BrokenWeights(policy, "frozen")
        if mesh.dp_rank == mesh.dp_size - 1:
            break_with(learning.engine, broken)
        text = learning.steps_to_error(40)[1]
        assert f"the weights of the engine of rank {mesh.world - mesh.tp_size} differ" in text
        assert len(set(mesh.all_gather_objects((text, learning.step)))) == 1


@pytest.mark.slow
def test_fsdp_and_tensor_parallel_ranks_verify_together_and_stop_together(tmp_path: Path) -> None:
    start(4, verify_on_ranks, tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        scores, weights = torch.load(tmp_path / f"probe-{dtype}.pt")
        policy = tiny_decoder(1, torch.float32)
        policy.load_state_dict(weights, strict=False)
        learning = Learning(policy, dtype=dtype)
        alone = learning.weight_sync._trainer_scores()[0]
        assert np.abs(alone - np.array(scores)).max() < 1e-4  # the same weights, rounded alike
