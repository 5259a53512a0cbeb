"""The same numbers as TRL, loss by loss, on random batches. Its trainer's methods are asked on a stand-in for it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.algos import Algorithm, LossBatch, Scorers, make_algorithm
from assay.algos.advantages import ADVANTAGES
from assay.algos.terms import EntropyControl
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

pytestmark = pytest.mark.peer
LENGTHS, LIMIT = [4, 7, 1, 5, 2, 6], 9


class Tokens:
    """Padded for TRL, packed for us; in double precision."""

    def __init__(self, seed: int, spread: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shape = len(LENGTHS), max(LENGTHS)
        self.mask = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double()
        self.behaviour = -2 + 0.7 * normal(*shape)
        self.logprobs = self.behaviour + spread * normal(*shape)
        self.reference = self.behaviour + spread * normal(*shape)
        self.engine = self.behaviour + 0.5 * normal(*shape)
        self.entropy = normal(*shape).abs()
        self.advantages = normal(len(LENGTHS))

    def packed(self, algo: Algorithm, logprobs: Tensor) -> LossBatch:
        counts, at = torch.tensor(LENGTHS), self.mask.bool()
        return LossBatch(
            logprobs=logprobs[at],
            behaviour_logprobs=self.behaviour[at],
            advantages=self.advantages.repeat_interleave(counts),
            weights=algo.token_weights(counts).repeat_interleave(counts),
            entropy=self.entropy[at],
            ref_logprobs=self.reference[at],
            engine_logprobs=self.engine[at],
            lengths=LENGTHS,
        )

    def padded(self) -> dict[str, Tensor]:
        ids = torch.zeros(self.mask.shape, dtype=torch.long)
        return {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.behaviour,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
        }


def trainer(tokens: Tokens, logprobs: Tensor, **settings: Any) -> SimpleNamespace:
    """As much of a GRPOTrainer as its loss looks at: one process, no accumulation."""
    alone = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x, device="cpu"
    )
    known: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, tokens.entropy, None),
        "accelerator": alone,
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            entropy_target=0.2,
            entropy_coef_delta=0.005,
        ),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": LIMIT,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**known | settings)


def theirs(tokens: Tokens, inputs: dict[str, Tensor] | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and its slope at each token."""
    grpo = pytest.importorskip("trl").GRPOTrainer
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss = grpo._compute_loss(trainer(tokens, logprobs, **settings), None, tokens.padded() | (inputs or {}))
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def ours(tokens: Tokens, algo: Algorithm) -> tuple[Tensor, Tensor]:
    logprobs = tokens.logprobs.clone().requires_grad_()
    total = algo.loss(tokens.packed(algo, logprobs)).total
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


# Our recipe with what is changed of it, and TRL's settings for the same.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo with a KL term": ("grpo", {"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo's aggregation": ("grpo", {"aggregate": "token"}, {"loss_type": "bnpo"}),
    "gspo": (
        "gspo",
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo, wider": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, tighter": ("cispo", {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAME)
def test_losses_and_gradients(name: str, seed: int) -> None:
    recipe, changes, settings = SAME[name]
    tokens = Tokens(seed)
    algo = make_algorithm(recipe, max_new_tokens=LIMIT, **changes)
    (loss, slope), (their_loss, their_slope) = ours(tokens, algo), theirs(tokens, **settings)
    assert float(loss) == pytest.approx(float(their_loss), abs=1e-5)
    torch.testing.assert_close(slope, their_slope, atol=1e-5, rtol=0)
    assert slope.abs().max() > 1e-3


def prepared(rewards: list[float], tokens: Tokens | None = None, **settings: Any) -> dict[str, Tensor]:
    """What TRL makes of judged answers, before its loss: groups of three, and `tokens` of each where they matter."""
    lengths = LENGTHS if tokens is not None else [1] * len(rewards)
    sampled = [row[:n].tolist() for row, n in zip(tokens.engine, lengths, strict=True)] if tokens is not None else None
    answers = [[1]] * len(rewards), [[2] * n for n in lengths], None, [""] * len(rewards), sampled, {}, None, None
    own = None if tokens is None else tokens.behaviour
    known: dict[str, Any] = {
        "accelerator": SimpleNamespace(device="cpu", process_index=0, num_processes=1, gather=lambda x: x),
        "args": SimpleNamespace(
            per_device_train_batch_size=len(rewards),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        **dict.fromkeys(("environment_factories", "environments", "tools", "pad_to_multiple_of")),
        **dict.fromkeys(("mask_truncated_completions", "use_vllm", "vllm_importance_sampling_correction"), False),
        "_generate": lambda prompts: answers,
        "_calculate_rewards": lambda *_: torch.tensor(rewards, dtype=torch.float64)[:, None],
        "_get_per_token_logps_and_entropies": lambda *_, **__: (own, None, None),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "num_iterations": 1,
        "num_generations": 3,
        "beta": 0.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1),
        "reward_func_names": ["reward"],
        "scale_rewards": "group",
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    grpo = pytest.importorskip("trl").GRPOTrainer
    asked = [{"prompt": "?"} for _ in rewards]
    return grpo._generate_and_score_completions(SimpleNamespace(**known | settings), asked)


@pytest.mark.parametrize(("advantage", "scale"), [("group_norm", "group"), ("group_mean", "none")])
def test_advantages(advantage: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards = torch.cat([torch.rand(9, generator=generator, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    found = torch.cat(ADVANTAGES[advantage](list(rewards.split(3))))
    torch.testing.assert_close(
        found, prepared(rewards.tolist(), scale_rewards=scale)["advantages"].double(), atol=1e-5, rtol=0
    )


def rloo_prepared(rewards: list[float], tokens: Tokens, beta: float) -> Tensor:
    """Advantages as TRL's RLOOTrainer has them: groups of three, the KL of whole answers taken off their rewards."""
    reference = object()
    known: dict[str, Any] = {
        "accelerator": SimpleNamespace(
            device="cpu", process_index=0, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "args": SimpleNamespace(per_device_train_batch_size=6, gradient_checkpointing_kwargs=None),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "ref_model": reference,
        **dict.fromkeys(("pad_to_multiple_of", "reward_clip_range")),
        **dict.fromkeys(("mask_truncated_completions", "normalize_advantages"), False),
        "_generate": lambda prompts: ([[1]] * 6, [[2] * n for n in LENGTHS], [""] * 6),
        "_calculate_rewards": lambda *_: torch.tensor(rewards, dtype=torch.float64)[:, None],
        "_get_per_token_logps_and_entropies": lambda model, *_, **__: (
            tokens.reference if model is reference else tokens.behaviour,
            None,
            None,
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: [""] * len(ids)),
        "num_generations": 3,
        "beta": beta,
        "reward_weights": torch.ones(1),
        "reward_func_names": ["reward"],
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    rloo = pytest.importorskip("trl").RLOOTrainer
    return rloo._generate_and_score_completions(SimpleNamespace(**known), [{"prompt": "?"} for _ in rewards])[
        "advantages"
    ]


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_with_kl_in_the_reward(beta: float) -> None:
    tokens, rewards = Tokens(4), [1.0, 0.0, 0.25, 0.0, 1.0, 0.5]
    wrote = [row[:n].tolist() for row, n in zip(tokens.behaviour, LENGTHS, strict=True)]
    said = [row[:n].tolist() for row, n in zip(tokens.reference, LENGTHS, strict=True)]
    prompt = Prompt("?", ())
    turns = [[Turn([1], Completion([2] * len(own), own, own, Finish.STOP), "")] for own in wrote]
    each = zip(turns, rewards, strict=True)
    answers = [Rollout(prompt, i % 3, turn, Verdict(r, Status.OK)) for i, (turn, r) in enumerate(each)]
    algo = make_algorithm("rloo", max_new_tokens=LIMIT, reward_kl_coef=beta)
    algo.credit([Group(prompt, answers[:3]), Group(prompt, answers[3:])], Scorers(lambda _: said))
    found = torch.tensor([answer.advantage for answer in answers], dtype=torch.float64)
    torch.testing.assert_close(found, rloo_prepared(rewards, tokens, beta).double(), atol=1e-5, rtol=0)


def test_rloo_gradient_on_policy() -> None:
    """Their ratio is of a whole answer; with one update a batch it is 1, and its gradient that of the sum. Ours has
    the same up to the constant that we divide by."""
    tokens = Tokens(5, spread=0.0)
    logprobs = tokens.logprobs.clone().requires_grad_()
    old = {"old_logps": (tokens.behaviour * tokens.mask).sum(1)}
    rloo = pytest.importorskip("trl").RLOOTrainer
    rloo._compute_loss(trainer(tokens, logprobs), None, tokens.padded() | old).backward()
    assert logprobs.grad is not None
    _, slope = ours(tokens, make_algorithm("rloo", max_new_tokens=LIMIT))
    torch.testing.assert_close(slope * LIMIT, logprobs.grad, atol=1e-5, rtol=0)
    assert slope.abs().max() > 1e-3


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_corrections(mode: str) -> None:
    tokens, low, high = Tokens(7), 0.6, 1.8
    both = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    weights = prepared([0.0] * 6, tokens, vllm_importance_sampling_mode=mode, **both, **bounds)[
        "importance_sampling_ratio"
    ]
    algo = make_algorithm("grpo", correction=mode, correction_low=low, correction_high=high)
    loss, slope = ours(tokens, algo)
    their_loss, their_slope = theirs(tokens, {"importance_sampling_ratio": weights}, loss_type="grpo", **both)
    assert float(loss) == pytest.approx(float(their_loss), abs=1e-5)
    torch.testing.assert_close(slope, their_slope, atol=1e-5, rtol=0)
    assert len(set(weights.flatten().tolist())) > 2  # not all of them are held


def test_adaptive_entropy_bonus() -> None:
    entropies = [0.5, 0.19, 0.1, 0.3, 0.15]
    control, coefficients = EntropyControl(0.01), []
    tokens = Tokens(0)
    state: dict[str, Any] = {"entropy_coef": 0.01, "_last_world_entropy": float("inf"), "_entropy_window_stats": None}
    grpo = pytest.importorskip("trl").GRPOTrainer
    for entropy in entropies:
        tokens.entropy = torch.full_like(tokens.entropy, entropy)
        theirs = trainer(
            tokens, tokens.logprobs, loss_type="grpo", _entropy_bonus_enabled=True, use_adaptive_entropy=True, **state
        )
        theirs.args.entropy_coef_min, theirs.args.entropy_coef_max = 0.0, 1.0
        grpo._compute_loss(theirs, None, tokens.padded())
        state = {name: getattr(theirs, name) for name in state}
        control = control.after(entropy, 0.2, 0.005)
        coefficients.append(control.coef)
        assert control.coef == pytest.approx(state["entropy_coef"], abs=1e-12)
        assert control.entropy == pytest.approx(state["_last_world_entropy"], abs=1e-12)
    assert coefficients == pytest.approx([0.005, 0.01, 0.015, 0.01, 0.015])
