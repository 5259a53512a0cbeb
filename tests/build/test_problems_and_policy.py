"""Settings -> components: few-shot examples, sampling of evaluations, mini-batches."""

from __future__ import annotations

import io
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from assay.build import models as policy_module
from assay.build.models import activation_bytes, build_renderer, choose_token_budget, cpu_token_budget
from assay.build.problems import build_algorithm, build_demonstrations, build_task, gold_episodes, select_prompts
from assay.config import PromptConfig, TrainConfig
from assay.envs import make_env
from assay.envs.builtin import GuessNumber
from assay.mesh import Mesh
from assay.models import Decoder, ModelSpec, build_preset
from assay.runs.console import Console
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.training.sources import PromptStream
from assay.types import Prompt, UserError

TASK: Any = make_task("abacus")
SHOTS = [("Ann has 2 coins .", "#### 2"), ("Ann has 3 coins .", "#### 3"), ("Ann has 4 coins .", "#### 4")]
PROMPT = Prompt("p", ({"role": "user", "content": "Ann has 5 coins ."},))


@pytest.fixture
def shots(tmp_path: Path) -> str:
    file = tmp_path / "shots.jsonl"
    file.write_text("".join(json.dumps({"question": q, "solution": s}) + "\n" for q, s in SHOTS))
    return str(file)


def asked(**prompt: Any) -> str:
    """The text of PROMPT as the model reads it."""
    tokenizer = word_tokenizer(TASK.words())
    renderer = build_renderer(PromptConfig(**prompt), tokenizer, TASK)
    return tokenizer.decode(renderer.prompt_ids(PROMPT), skip_special=False)


def turns(*examples: tuple[str, str]) -> str:
    said = [f"<user> {question} <assistant> {solution} <eos> " for question, solution in examples]
    return "".join(said) + f"<user> {PROMPT.question} <assistant>"


def test_few_shot_examples_come_from_a_file(shots: str) -> None:
    assert asked(few_shot_file=shots) == turns(*SHOTS)
    assert asked(few_shot_file=shots, few_shot=2) == turns(*SHOTS[:2])
    assert asked() == turns()
    with pytest.raises(UserError, match="has 3 few-shot examples"):
        asked(few_shot_file=shots, few_shot=4)


def test_few_shot_examples_come_from_the_train_split_without_a_file() -> None:
    first = TASK.prompts("train")[0]
    assert asked(few_shot=1) == turns((first.question, first.solution))


@pytest.mark.parametrize(
    "args", [{"train_size": 24}, {}, {"tasks": [{"name": "abacus"}]}], ids=["file", "endless", "mix"]
)
def test_few_shot_examples_of_the_train_split_are_not_trained_on(args: dict[str, Any]) -> None:
    task = {"name": "mix" if "tasks" in args else "abacus", "args": args}
    cfg = TrainConfig.model_validate({"task": task, "prompt": {"few_shot": 5}, "sft": {"steps": 1}})
    given = build_task(cfg.task).prompts("train")
    renderer = build_renderer(cfg.prompt, word_tokenizer(TASK.words()), build_task(cfg.task))
    lines = io.StringIO()
    trained = select_prompts(given, cfg, renderer, Console(lines))
    demonstrations = build_demonstrations(cfg, renderer, Console(quiet=True))
    for prompts in (trained, demonstrations):
        asked_ids = {prompt.id for prompt in prompts[:24]}
        assert len(asked_ids) == min(24, len(given) - 5) and not asked_ids & {prompt.id for prompt in given[:5]}
    assert len(lines.getvalue().splitlines()) == 1 and "5 few-shot examples" in lines.getvalue()
    assert PromptStream(trained, 0).rejected == 0  # counts prompts that are too long


@pytest.mark.parametrize(
    ("algo", "counts"),
    [
        ({"recipe": "dapo"}, (4, 4)),
        ({"recipe": "dapo", "minibatch_size": 6}, (6, 17)),  # the recipe's four updates give way
        ({"recipe": "dapo", "minibatch_size": 0, "updates": 2}, (2, 2)),
        ({"recipe": "grpo", "minibatch_size": 200}, (1, 1)),
    ],
)
def test_minibatch_size_replaces_the_number_of_updates(algo: dict[str, Any], counts: tuple[int, int]) -> None:
    found = build_algorithm(TrainConfig.model_validate({"algo": algo}))
    assert (found.update_count(32), found.update_count(100)) == counts


def test_minibatch_size_and_updates_exclude_each_other() -> None:
    cfg = TrainConfig.model_validate({"algo": {"minibatch_size": 6, "updates": 2}})
    with pytest.raises(UserError, match="both define how a batch is split") as error:
        build_algorithm(cfg)
    assert "\n" not in str(error.value)


def test_gold_episodes_of_an_environment_train_the_actions_only() -> None:
    env = make_env("guess", high=7, tries=3)
    tokenizer = word_tokenizer(env.words())  # type: ignore[attr-defined]
    prompt = next(one for one in gold_episodes(env)[:20] if len(one.episode) == 3)
    ids, mask = Renderer(tokenizer).worked_example(prompt)
    first, second, third = (action for action, _ in prompt.episode)
    trained = [token for token, mark in zip(ids, mask, strict=True) if mark]
    assert tokenizer.decode(trained, skip_special=False) == f"{first} <eos> {second} <eos> {third} <eos>"
    said = tokenizer.decode(ids, skip_special=False)
    asked, _, rest = said.partition(f"<assistant> {first} <eos>")
    assert prompt.question in asked and ("Higher ." in rest or "Lower ." in rest)
    assert rest.count("<user>") == rest.count("<assistant>") == 2


def test_environment_without_gold_actions_has_no_episodes() -> None:
    class Silent(GuessNumber):
        def gold_action(self) -> Any:
            return None

    with pytest.raises(UserError, match="gold_action"):
        gold_episodes(Silent())


@pytest.mark.parametrize(
    ("gib", "parameters", "token_bytes", "tokens"),
    [
        (0, 860_000, 53_248, 16384),  # small models do not depend on the memory
        (64, 134_515_008, 1_704_960, 16384),
        (21, 134_515_008, 1_704_960, 4096),  # (21 GiB - 2.5 GiB) / 2 is enough for 5,823 tokens
        (8, 134_515_008, 1_704_960, 1024),
        (2, 134_515_008, 1_704_960, 512),  # less than the weights need
    ],
)
def test_the_token_budget_on_a_cpu_fits_into_its_memory(
    gib: int, parameters: int, token_bytes: int, tokens: int
) -> None:
    assert cpu_token_budget(gib * 2**30, parameters, token_bytes) == tokens


def test_the_token_budget_is_16384_on_a_gpu_and_for_small_models() -> None:
    spec = ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192)
    with torch.device("meta"):
        large = Decoder(spec)
    assert (
        activation_bytes(spec, torch.float32, False) == 1_704_960 == 2 * activation_bytes(spec, torch.bfloat16, False)
    )
    assert choose_token_budget(large, torch.bfloat16, Mesh(torch.device("cuda"))) == 16384
    assert choose_token_budget(build_preset("tiny", 100, 64, 0), torch.float32, Mesh()) == 16384


def peak_bytes(model: Decoder, tokens: int) -> int:
    """The most memory that a forward and a backward pass allocate, as the profiler of torch counts it."""
    ids = torch.arange(tokens) % model.vocab_size
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model.hidden(ids, [tokens // 2] * 2).sum().backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("recompute", [False, True])
def test_estimated_activations_are_those_of_a_backward_pass(recompute: bool) -> None:
    model = Decoder(ModelSpec("llama", 50, 96, 6, 3, 3, 32, 256, 1024))
    model.recompute = recompute
    measured = (peak_bytes(model, 512) - peak_bytes(model, 256)) / 256
    assert activation_bytes(model.spec, torch.float32, recompute) == pytest.approx(measured, rel=0.25)


def test_recomputation_allows_a_larger_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        large = Decoder(ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192))
    monkeypatch.setattr(policy_module, "free_memory", lambda device: 8 * 2**30)
    budgets = [choose_token_budget(large, torch.float32, Mesh(), recompute) for recompute in (False, True)]
    assert budgets == [1024, 16384]


def check_shares(mesh: Mesh, free: list[int], hosts: list[str], expected: int) -> None:
    with torch.device("meta"):
        large = Decoder(ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "free_memory", lambda device: free[mesh.rank] * 2**30)
        patch.setattr("socket.gethostname", lambda: hosts[mesh.rank])
        assert choose_token_budget(large, torch.float32, mesh) == expected


def check_all_shares(mesh: Mesh) -> None:
    check_shares(mesh, [40, 40], ["a", "a"], 4096)  # one rank alone would choose 8192
    check_shares(mesh, [40, 40], ["a", "b"], 8192)
    check_shares(mesh, [40, 21], ["a", "b"], 4096)  # the rank with less memory decides, also if it is not the first
    check_shares(mesh, [21, 40], ["a", "b"], 4096)


@pytest.mark.slow
def test_ranks_on_one_host_share_its_memory_and_all_ranks_agree() -> None:
    processes.start(2, check_all_shares)
