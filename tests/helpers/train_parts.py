"""A tiny decoder in double precision, and rollouts that exercise every branch of the losses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from engine_parts import small_decoder, small_spec
from torch import Tensor, nn

from assay.config import OptimConfig
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec
from assay.training.learner.optim import make_optimizer
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

VOCABULARY = 23
SIZES = {"hidden": 16, "layers": 2, "head_dim": 4, "intermediate": 24, "max_length": 64}
SPEC = small_spec("qwen3", vocab_size=VOCABULARY, **SIZES)


def tiny_decoder(seed: int = 0, dtype: torch.dtype = torch.float64, spec: ModelSpec = SPEC) -> Decoder:
    return small_decoder(spec, seed, scale=0.3, spread=0.2).to(dtype)


@torch.no_grad()
def full_logprobs(model: PolicyModel, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T, V] by a plain softmax over one whole sequence."""
    packed = torch.tensor(list(ids))
    return torch.log_softmax(model.unembed(model.hidden(packed, [len(ids)])) / temperature, -1)


def make_groups(
    model: PolicyModel, groups: int = 4, samples: int = 4, seed: int = 0, off_policy: float = 0.4
) -> list[Group]:
    """Rollouts of unequal lengths, one of two turns, sampled by the model give or take `off_policy`."""
    draw = random.Random(seed)
    found = []
    for number in range(groups):
        prompt = Prompt(f"p/{number}", ({"role": "user", "content": "?"},))
        context = tokens(draw, 3, 9)
        rollouts = []
        for sample in range(samples):
            turns = [make_turn(draw, context)]
            if number == 0 and sample == 1:  # a tool's answer in between, which is not trained on
                turns.append(make_turn(draw, tokens(draw, 2, 4)))
            rollout = Rollout(prompt, sample, turns, reward=draw.choice([0.0, 0.0, 1.0, 0.25]))
            rollout.verdict = Verdict(rollout.reward, Status.OK if rollout.reward == 1 else Status.WRONG)
            give_logprobs(model, rollout, draw, off_policy)
            rollouts.append(rollout)
        found.append(Group(prompt, rollouts))
    return found


def tokens(draw: random.Random, shortest: int, longest: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(draw.randint(shortest, longest))]


def make_turn(draw: random.Random, context: list[int]) -> Turn:
    written = tokens(draw, 1, 12)
    finish = draw.choice([Finish.STOP, Finish.STOP, Finish.LENGTH])
    return Turn(context, Completion(written, [0.0] * len(written), [0.0] * len(written), finish), "text")


def give_logprobs(model: PolicyModel, rollout: Rollout, draw: random.Random, off_policy: float) -> None:
    ids = rollout.token_ids
    every = full_logprobs(model, ids)
    place = 0
    for turn in rollout.turns:
        place += len(turn.context_ids)
        for index, token in enumerate(turn.completion.token_ids):
            exact = float(every[place + index - 1, token])
            turn.completion.engine_logprobs[index] = exact + draw.uniform(-off_policy, off_policy)
        place += len(turn.completion.token_ids)


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors if t is not None])


def weights_of(model: PolicyModel) -> Tensor:
    return flat(model.parameters())


def gradients_of(model: PolicyModel) -> Tensor:
    assert all(p.grad is not None for p in model.parameters())
    return flat(p.grad for p in model.parameters())


class Cramped(Decoder):
    """Has memory for `room` tokens."""

    room = 10**9
    error: type[RuntimeError] = torch.OutOfMemoryError

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        found = super().hidden(ids, lengths, shared)
        if len(ids) - sum(shared or ()) > self.room:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        return found


def cramped(room: int, error: type[RuntimeError] = torch.OutOfMemoryError, seed: int = 0) -> Cramped:
    model = tiny_decoder(seed)
    model.__class__ = Cramped
    assert isinstance(model, Cramped)
    model.room, model.error = room, error
    return model


def make_adamw(
    model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    return make_optimizer(model, OptimConfig(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
