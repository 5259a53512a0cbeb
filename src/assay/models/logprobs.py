"""From logits to log-probabilities and entropies and back, in two passes; and losses through the output head.

Logits of many tokens over a large vocabulary are the largest tensor there could be. They are made for a slice of tokens
at a time, turned into the gradient in their own place, and gone before the next slice.

Log-probabilities of given tokens, and losses made of them, without ever holding logits for more than a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assay.models.base import PolicyModel
from assay.models.device import upload, uses_triton
from assay.models.parallel import VocabularyHead

# (which tokens, their log-probabilities, their entropies) -> what they add to the loss
TokenLoss = Callable[[slice, Tensor, Tensor], Tensor]


def scores_of(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `targets` [M], entropies [M] and log-partition sums [M] of logits [M, V] over a temperature.

    Not less than float32, whatever the logits are; no gradients.
    """
    if kernels := triton_for(logits):
        return kernels.scores_of(logits, targets, temperature)
    logits = at_least_float32(logits) / temperature
    partition = logits.logsumexp(-1)
    probs = torch.exp(logits - partition[:, None])
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    logits.masked_fill_(probs == 0, 0.0)  # a blocked token has a logit of -inf, and 0 * -inf would be NaN
    return chosen - partition, partition - (probs * logits).sum(-1), partition


def gradient_of(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropies: Tensor,
    partition: Tensor,
    up: Tensor,
    spread: Tensor | None,
) -> Tensor:
    """The gradient of logits, perhaps in their place, given those of log-probabilities (`up`) and entropies (`spread`).

    With p the probabilities: d logprob / d logit = [target] - p, d entropy / d logit = -p (log p + entropy).
    """
    if kernels := triton_for(logits):
        return kernels.gradient_of(logits, targets, temperature, entropies, partition, up, spread)
    logs = at_least_float32(logits) / temperature - partition[:, None]
    probs = logs.exp()
    logs.masked_fill_(probs == 0, 0.0)  # as in `scores_of`
    factor = up[:, None] if spread is None else up[:, None] + spread[:, None] * (logs + entropies[:, None])
    grad = -probs * factor
    grad.scatter_add_(1, targets[:, None], up[:, None])
    return (grad / temperature).to(logits.dtype)


def loss_through_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    loss: TokenLoss,
    logits_at_once: int,
    dtype: torch.dtype,
) -> Tensor:
    """The sum of a loss of single tokens `targets` [M], predicted by hidden [M, D] through the head's weight [V, D].

    What a token adds to the loss must not depend on other slices: each slice goes forward and backward at once, so that
    its logits need not be computed twice.
    """
    size = max(logits_at_once // len(weight), 1)
    return _HeadLoss.apply(hidden, weight, targets, temperature, loss, size, dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        loss: TokenLoss,
        size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        table = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, max(len(hidden), 1), size):  # once for no tokens too: the loss may want to be asked
            at = slice(start, start + size)
            part = hidden[at].to(dtype)
            logits = part @ table.t()
            logprobs, entropies, partition = scores_of(logits, targets[at], temperature)
            with torch.enable_grad():
                leaves = logprobs.requires_grad_(), entropies.requires_grad_()
                value = loss(at, *leaves)
            up, spread = torch.autograd.grad(value, leaves, allow_unused=True)
            up = torch.zeros_like(logprobs) if up is None else up
            grad = gradient_of(logits, targets[at], temperature, entropies.detach(), partition, up, spread)
            hidden_grad[at] = (grad @ table).to(hidden.dtype)
            if weight_grad is not None:
                weight_grad += outer(grad, part, weight.dtype)
            total += value.detach()
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        up = up.to(hidden_grad.dtype)
        weight_grad = None if weight_grad is None else weight_grad * up
        return hidden_grad * up, weight_grad, None, None, None, None, None


def outer(grad: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    """grad.T @ part, in `dtype` without a rounding in between where the device can."""
    if grad.device.type == "cuda" and grad.dtype != dtype:
        return torch.mm(grad.t(), part, out_dtype=dtype)
    return (grad.t() @ part).to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def triton_for(logits: Tensor) -> Any:
    """The kernels, for logits on a GPU; None elsewhere."""
    if logits.dtype == torch.float64 or not uses_triton(logits.device):
        return None
    from assay.models import scoring_kernels

    return scoring_kernels


LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 30}  # numbers: 128 MiB in float32, 2 GiB in bfloat16


def token_logprobs(
    model: PolicyModel,
    ids: Tensor,
    lengths: Sequence[int],
    chosen: Tensor,
    temperature: float = 1.0,
    logits_at_once: int = 0,
    shared: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [M] of the M tokens marked in `chosen` [N], given those before each in its sequence.

    `ids` [N] are packed sequences. The first token of a sequence has nothing before it and must not be chosen.
    `chosen` may lie on the CPU, where finding the marked ones does not wait for a GPU.
    `shared`: see `PolicyModel.hidden`.
    """
    before, targets = predictors(model, ids, lengths, chosen, shared)
    return scores(model, before, targets, temperature, logits_at_once)


def token_loss(
    model: PolicyModel,
    ids: Tensor,
    lengths: Sequence[int],
    chosen: Tensor,
    loss: TokenLoss,
    temperature: float = 1.0,
    logits_at_once: int = 0,
    shared: Sequence[int] | None = None,
    whole: bool = False,
    also: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The sum of a loss of single tokens, given their log-probabilities and entropies as in `token_logprobs`.

    It is asked for with some of the tokens at a time, and what it says of them must not depend on the rest. Where the
    model ends in a plain product, their logits are computed once, not again in the backward pass.
    `whole`: it is asked once, for all of them.
    `also`: a loss of the hidden states [M, D] that these tokens are predicted from, which is added.
    """
    before, targets = predictors(model, ids, lengths, chosen, shared)
    added = 0.0 if also is None else also(before)
    weight = None if whole else model.head()
    if weight is None or isinstance(getattr(model, "lm_head", None), VocabularyHead) or not torch.is_grad_enabled():
        return added + loss(slice(None), *scores(model, before, targets, temperature, logits_at_once))
    kind = before.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else before.dtype
    at_a_time = logits_at_once or at_once(before)
    return added + loss_through_head(before, weight, targets, temperature, loss, at_a_time, dtype)


def predictors(
    model: PolicyModel, ids: Tensor, lengths: Sequence[int], chosen: Tensor, shared: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """The hidden states [M, D] from which the chosen tokens are predicted, and these [M]."""
    places = chosen.nonzero().squeeze(1)  # before anything is computed: on a GPU the host would wait for that
    if places.device != ids.device:
        places = upload(places, ids.device)
    hidden = model.hidden(ids, lengths, shared)
    return hidden.index_select(0, places - 1), ids.index_select(0, places)


def at_once(x: Tensor) -> int:
    return LOGITS_AT_ONCE.get(x.device.type, LOGITS_AT_ONCE["cpu"])


def scores(
    model: PolicyModel, before: Tensor, targets: Tensor, temperature: float, logits_at_once: int
) -> tuple[Tensor, Tensor]:
    logits_at_once = logits_at_once or at_once(before)
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabularyHead):
        return head.scores(before, targets, temperature, logits_at_once)
    size = max(logits_at_once // model.vocab_size, 1)
    if not torch.is_grad_enabled():
        parts = zip(before.split(size), targets.split(size), strict=True)
        found = [scores_of(model.unembed(part), target, temperature)[:2] for part, target in parts]
        return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])

    def score(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(model.unembed(part)) / temperature
        every = torch.log_softmax(logits, dim=-1)
        probs = every.exp()
        logs = every.masked_fill(probs == 0, 0.0)  # of a blocked token -inf, and 0 * -inf would be NaN
        return every.gather(-1, target[:, None]).squeeze(-1), -(probs * logs).sum(-1)

    if len(targets) <= size:
        return score(before, targets)
    # Several slices: each is recomputed in the backward pass, so only one slice of logits is alive at a time.
    parts_with_gradient = [
        checkpoint(score, part, target, use_reentrant=False)
        for part, target in zip(before.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts_with_gradient]), torch.cat([p[1] for p in parts_with_gradient])
