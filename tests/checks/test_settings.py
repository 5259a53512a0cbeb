"""Rules on settings and data: settings without effect, with risks or far off, and repeated ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_parts import make_adamw, make_groups, tiny_decoder, weights_of

from assay.build.problems import build_algorithm
from assay.build.run import load_problems
from assay.checks.settings import LARGE, REASONABLE, diagnose_settings, risky_settings, unused_settings
from assay.config import TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.envs import make_env
from assay.runs.console import Console
from assay.tasks import Task, make_task
from assay.training.learner.update import Updater


def found(parameters: int | None = None, **changes: Any) -> list[tuple[str, str]]:
    config = TrainConfig.model_validate(changes).model_dump()
    return [(cause.name, str(cause)) for cause in diagnose_settings(config, parameters)]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"reward": {"accuracy": 0.0}}, "reward.accuracy"),
        ({"reward": {"correct": 0.0}}, "reward.correct"),
        ({"reward": {"functions": ["task", "a.py:f"], "weights": [0.0, 0.0]}}, "reward.weights"),
        ({"train": {"samples": 1}, "algo": {"drop_zero_variance": True}}, "train.samples (now 1)"),
    ],
)
def test_a_loss_that_is_zero_by_construction_is_an_error(changes: dict[str, Any], key: str) -> None:
    ((name, text),) = found(1_000_000, **changes)
    assert name == "zero_loss" and key in text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward": {"accuracy": 0.0, "format": 1.0}},
        {"reward": {"correct": 0.0, "wrong": -1.0}},
        {"reward": {"accuracy": 0.0, "function": "a.py:f"}},
        {"reward": {"accuracy": 0.0}, "env": {"name": "guess"}},
        {"reward": {"functions": ["task"]}},
        {"train": {"samples": 1}},
        {"train": {"steps": 3, "epochs": 2.0}, "optim": {"warmup": 10}},
    ],
)
def test_settings_that_can_learn_are_silent(changes: dict[str, Any]) -> None:
    assert found(1_000_000, **changes) == []


def test_few_answers_per_step_are_noted_for_models_that_are_not_small() -> None:
    few, replayed = {"train": {"prompts": 8, "samples": 8}}, {"replay": {"groups": 8}}
    for parameters in (LARGE, None):  # None: a model on the hub
        ((name, text),) = found(parameters, **few)
        assert name == "small_batch" and "64 answers" in text and "train.prompts (now 8)" in text
    assert not found(LARGE - 1, **few) and not found(LARGE, **few, **replayed)


def test_a_warm_up_that_is_not_shorter_than_the_run_is_reported() -> None:
    ((name, text),) = found(train={"steps": 10}, optim={"warmup": 10})
    assert name == "learning_rate_low" and "optim.warmup (now 10)" in text
    assert not found(train={"steps": 10}, optim={"warmup": 9})


@pytest.mark.parametrize("case", REASONABLE)
def test_learning_rates_are_compared_with_the_range_of_their_kind(case: tuple[str, bool]) -> None:
    kind, large = case
    low, high = REASONABLE[case]
    parameters = LARGE if large else LARGE - 1
    for value, name in ((low, None), (high, None), (low / 2, "learning_rate_low"), (high * 2, "learning_rate_high")):
        changes: dict[str, Any] = {"train": {"steps": 10}, "optim": {"lr": 1e-5}}
        if kind == "sft":
            changes["sft"] = {"steps": 5, "lr": value}
        elif kind == "muon":
            changes["optim"] |= {"name": "muon", "matrix_lr": value}
        else:
            changes["optim"] = {"lr": value}
            changes["lora"] = {"rank": 8 if kind == "lora" else 0}
        assert [one for one, _ in found(parameters, **changes)] == ([name] if name else [])


def test_the_repository_s_configs_are_within_the_ranges() -> None:
    """Of models with the sizes of their names."""
    from pathlib import Path

    from assay.config.settings import load_settings

    folder = Path(__file__).resolve().parents[2] / "configs"
    checked = 0
    for file in sorted(folder.glob("*.toml")):
        cfg = load_settings(TrainConfig, file, {})
        large = not cfg.model.source.startswith("preset:")
        assert not list(diagnose_settings(cfg.model_dump(), 135_000_000 if large else 200_000)), file
        checked += 1
    assert checked >= 6


ROOT = Path(__file__).resolve().parents[2]


def settings(file: Path | None = None, **changes: Any) -> TrainConfig:
    return load_settings(TrainConfig, file, {key.replace("__", "."): value for key, value in changes.items()})


def unused(file: Path | None = None, task: Task | None = None, **changes: Any) -> list[str]:
    cfg = settings(file, **changes)
    return [str(problem) for problem in unused_settings(cfg, build_algorithm(cfg), task)]


def test_shipped_settings_have_an_effect() -> None:
    assert not [line for file in (ROOT / "configs").rglob("*.toml") for line in unused(file)]


@pytest.mark.parametrize(
    ("changes", "missing", "then"),
    [
        ({"algo__reference": "big"}, "algo.kl_coef and algo.reward_kl_coef are 0", {"algo__kl_coef": 0.1}),
        ({"algo__correction_high": 3.0}, "algo.correction is not set", {"algo__correction": "token_mask"}),
        ({"algo__cov_fraction": 0.1}, "algo.cov is not set", {"algo__cov": "clip_cov"}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"algo__updates": 2}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"replay__groups": 2}),
        ({"algo__entropy_delta": 0.1}, "algo.entropy_target is not set", {"algo__entropy_target": 0.5}),
        ({"algo__pass_rate_retry": 5}, "neither algo.pass_rate_low", {"algo__pass_rate_low": 0.1}),
        ({"algo__recipe": "simple", "algo__dual_clip": 3.0}, "algo.policy_loss is not", {"algo__recipe": "grpo"}),
        ({"critic__gae_lambda": 0.9}, "algo.critic is off", {"algo__recipe": "ppo"}),
        ({"env__max_tokens": 5}, "no environment is set", {"env__name": "guess"}),
        ({"lora__alpha": 16.0}, "all weights are trained", {"lora__rank": 4}),
        ({"judge__rubric": "polite?"}, "no model judges answers", {"reward__function": "judge"}),
        ({"vllm__servers": 4}, "engine.name is not 'vllm'", {"engine__name": "vllm"}),
        ({"source__max_staleness": 3}, "source.name is not 'async'", {"source__name": "async"}),
        ({"optim__momentum": 0.5}, "optim.name is not 'muon'", {"optim__name": "muon"}),
        ({"optim__min_lr_ratio": 0.5}, "optim.schedule is 'constant'", {"optim__schedule": "linear"}),
        ({"reward__target_length": 10}, "reward.length is 0", {"reward__length": 0.1}),
        ({"algo__step_credit": True}, "no environment is set", {"env__name": "guess"}),
        (
            {"algo__critic": True, "algo__advantage": "none"},
            "the critic determines advantages",
            {"algo__critic": False},
        ),
    ],
)
def test_a_setting_without_effect_is_reported_with_the_setting_that_it_needs(
    changes: Any, missing: str, then: Any, tmp_path: Path
) -> None:
    (found,) = unused(**changes)
    name = list(changes)[-1].replace("__", ".")
    assert found.startswith(f"{name} has no effect: ") and missing in found
    assert unused(**changes | then) == []
    resolved = tmp_path / "config.toml"  # as a resumed run reads it, with every setting in it
    resolved.write_text(to_toml(settings(**changes)))
    assert unused(resolved) == [found]


@pytest.mark.parametrize(
    ("staleness", "correction", "passes"), [(0, None, 1), (1, None, 1), (1, "token_truncate", 1), (0, None, 2)]
)
def test_kl_cov_is_reported_exactly_if_it_does_not_change_the_update(
    staleness: int, correction: str | None, passes: int
) -> None:
    """Compares the weights after updates with and without it, on answers of this or of an earlier policy."""
    source = {"source__name": "async", "source__max_staleness": staleness, "train__passes": passes}
    weights = []
    for cov in ("kl_cov", None):
        cfg = settings(**source, algo__correction=correction, algo__cov=cov)
        algo, policy = build_algorithm(cfg), tiny_decoder(seed=1)
        groups = make_groups(tiny_decoder(seed=1 + staleness), off_policy=0.0)
        algo.credit(groups)
        Updater(policy, make_adamw(policy, 1e-2)).update(groups, algo, 1e-2, passes)
        weights.append(weights_of(policy))
    no_effect = (weights[0] - weights[1]).abs().max() < 1e-8
    reported = unused(**source, algo__correction=correction, algo__cov="kl_cov")
    assert bool(reported) == no_effect == (passes == 1 and (not staleness or correction is not None))


@pytest.mark.parametrize("name", ["guess", "countdown_tries", "single"])
def test_reward_settings_have_an_effect_only_with_a_judge(name: str) -> None:
    changes = {"reward__correct": 2.0, "reward__extract": "hash", "reward__function": "f.py:f", "reward__workers": 0}
    env = make_env(name, task=make_task("abacus") if name == "single" else None)
    found = unused(task=env, env__name=name, **changes)
    assert [line.split()[0] for line in found] == (
        [] if name == "single" else ["reward.extract", "reward.correct", "reward.function"]
    )
    assert all(f"has no effect: all rewards come from {name} " in line for line in found)
    assert unused(task=make_task("abacus"), **changes) == [] == unused(task=env, env__name=name)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"algo__recipe": "reinforce", "algo__updates": 3}, "all but the first of 3 updates"),
        ({"algo__recipe": "rloo", "train__prompts": 16, "algo__minibatch_size": 5}, "all but the first of 4 updates"),
        ({"algo__recipe": "dapo", "algo__policy_loss": "reinforce", "algo__minibatch_size": 16}, ""),
        ({"algo__recipe": "simple", "algo__updates": 2, "algo__correction": "token_mask"}, "all but the first of 2"),
        ({"algo__recipe": "reinforce"}, ""),
        ({"algo__recipe": "reinforce", "algo__policy_loss": "ppo_clip", "algo__updates": 4}, ""),
        ({"sampling__top_k": 5}, "sampling is truncated"),
    ],
)
def test_warnings_of_updates_without_a_ratio_and_of_truncated_sampling(changes: Any, warned: str) -> None:
    cfg = settings(**changes)
    found = [str(problem) for problem in risky_settings(cfg, build_algorithm(cfg))]
    assert len(found) == bool(warned) and all(warned in line and "\n" not in line for line in found)


@pytest.mark.parametrize("repeated", [0, 3])
def test_problems_with_the_same_id_are_reported_once(
    repeated: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, count in (("train", 6), ("test", 3)):
        ids = ["same" if index <= repeated * (split == "train") else f"{split}-{index}" for index in range(count)]
        rows = [{"id": name, "question": f"{split} {index}?", "answer": "1"} for index, name in enumerate(ids)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings(task__name="jsonl", task__path=str(tmp_path), task__args={"val_size": 1}, eval__every=0)
    load_problems(cfg, Console())
    warned = [line for line in capsys.readouterr().out.splitlines() if "the id of another problem" in line]
    assert len(warned) == (repeated > 0)
    if repeated:
        assert "'same'" in warned[0] and "pass rate" in warned[0]
