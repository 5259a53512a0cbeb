"""Log-probabilities and entropies of given tokens, and losses computed from them.

Logits of many tokens over a large vocabulary would be the largest tensor of a pass. They are computed for a slice of
tokens at a time, and replaced by their gradient in place where possible, so that only one slice is ever in memory.

`scores_of` and `gradient_of` are the two passes over logits. On a GPU they run as Triton kernels (`kernels`);
the torch code here is the reference, and computes everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assay.models.base import PolicyModel, autocast_dtype
from assay.models.device import upload, uses_triton

# (slice of the tokens, their log-probabilities, their entropies) -> their part of the loss
TokenLoss = Callable[[slice, Tensor, Tensor], Tensor]
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 30}  # elements: 128 MiB in float32, 2 GiB in bfloat16


def scores_of(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `targets` [M], entropies [M] and log-partition sums [M] of logits [M, V] / temperature.

    In float32, or float64 for such logits. No gradients.
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
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    present: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits, given the gradients of log-probabilities and entropies. It may overwrite the logits.

    With p the probabilities: d logprob / d logit = [target] - p, d entropy / d logit = -p (log p + entropy).
    `present`: which targets are among the columns; None: all. (Others are with other ranks.)
    """
    if present is None and (kernels := triton_for(logits)):
        return kernels.gradient_of(logits, targets, temperature, entropies, partition, grad_logprobs, grad_entropy)
    logs = at_least_float32(logits) / temperature - partition[:, None]
    probs = logs.exp()
    logs.masked_fill_(probs == 0, 0.0)  # as in `scores_of`
    factor = grad_logprobs[:, None]
    if grad_entropy is not None:
        factor = factor + grad_entropy[:, None] * (logs + entropies[:, None])
    grad = -probs * factor
    grad.scatter_add_(1, targets[:, None], (grad_logprobs if present is None else grad_logprobs * present)[:, None])
    return (grad / temperature).to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    """The sum of a token-level loss of `targets` [M], predicted from hidden [M, D] by the head's weight [V, D].

    The loss of a token must not depend on other slices: each slice is computed forward and backward at once, so that
    its logits are computed only once.
    """

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
        for start in range(0, max(len(hidden), 1), size):  # without tokens the loss is still called once
            at = slice(start, start + size)
            part = hidden[at].to(dtype)
            logits = part @ table.t()
            logprobs, entropies, partition = scores_of(logits, targets[at], temperature)
            with torch.enable_grad():
                leaves = logprobs.requires_grad_(), entropies.requires_grad_()
                value = loss(at, *leaves)
            grads = torch.autograd.grad(value, leaves, allow_unused=True)
            grad_logprobs = torch.zeros_like(logprobs) if grads[0] is None else grads[0]
            scores = entropies.detach(), partition
            grad = gradient_of(logits, targets[at], temperature, *scores, grad_logprobs, grads[1])
            hidden_grad[at] = (grad @ table).to(hidden.dtype)
            if weight_grad is not None:
                weight_grad += outer(grad, part, weight.dtype)
            total += value.detach()
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        grad = grad.to(hidden_grad.dtype)
        weight_grad = None if weight_grad is None else weight_grad * grad
        return hidden_grad * grad, weight_grad, None, None, None, None, None


def outer(grad: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    """grad.T @ part in `dtype`, without intermediate rounding if the device supports it."""
    if grad.device.type == "cuda" and grad.dtype != dtype:
        return torch.mm(grad.t(), part, out_dtype=dtype)
    return (grad.t() @ part).to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def triton_for(logits: Tensor) -> Any:
    """The module of Triton kernels for logits on a GPU; None elsewhere."""
    if logits.dtype == torch.float64 or not uses_triton(logits.device):
        return None
    from assay.models import kernels

    return kernels


def token_logprobs(
    model: PolicyModel,
    ids: Tensor,
    lengths: Sequence[int],
    chosen: Tensor,
    temperature: float = 1.0,
    logits_at_once: int = 0,
    shared: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [M] of the M tokens selected by the mask `chosen` [N].

    `ids` [N]: packed sequences. The first token of a sequence has no context and must not be chosen. With `chosen` on
    the CPU, the selection does not synchronize with a GPU. `shared`: see `PolicyModel.hidden`.
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
    """The sum of a token-level loss of the log-probabilities and entropies of `token_logprobs`.

    `loss` is called with slices of the tokens, and its value for one slice must not depend on others. If logits are a
    plain product (`PolicyModel.head`), they are computed only once, not again in the backward pass.
    `whole`: call `loss` once, with all tokens.
    `also`: an additional loss of the hidden states [M, D] that predict these tokens.
    """
    before, targets = predictors(model, ids, lengths, chosen, shared)
    added = 0.0 if also is None else also(before)
    weight = None if whole else model.head()
    if weight is None or sharded_head(model) is not None or not torch.is_grad_enabled():
        return added + loss(slice(None), *scores(model, before, targets, temperature, logits_at_once))
    size = max((logits_at_once or at_once(before)) // len(weight), 1)
    return added + _HeadLoss.apply(before, weight, targets, temperature, loss, size, autocast_dtype(before))


def predictors(
    model: PolicyModel, ids: Tensor, lengths: Sequence[int], chosen: Tensor, shared: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """The hidden states [M, D] that predict the chosen tokens, and these tokens [M]."""
    indices = chosen.nonzero().squeeze(1)  # first: later, the host would wait for the GPU
    if indices.device != ids.device:
        indices = upload(indices, ids.device)
    hidden = model.hidden(ids, lengths, shared)
    return hidden.index_select(0, indices - 1), ids.index_select(0, indices)


def at_once(x: Tensor) -> int:
    return LOGITS_AT_ONCE.get(x.device.type, LOGITS_AT_ONCE["cpu"])


def scores(
    model: PolicyModel, before: Tensor, targets: Tensor, temperature: float, logits_at_once: int
) -> tuple[Tensor, Tensor]:
    logits_at_once = logits_at_once or at_once(before)
    if (head := sharded_head(model)) is not None:
        return head.scores(before, targets, temperature, logits_at_once)
    size = max(logits_at_once // model.vocab_size, 1)
    parts = zip(before.split(size), targets.split(size), strict=True)

    def score(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(model.unembed(part)) / temperature
        every = torch.log_softmax(logits, dim=-1)
        probs = every.exp()
        logs = every.masked_fill(probs == 0, 0.0)  # as in `scores_of`
        return every.gather(-1, target[:, None]).squeeze(-1), -(probs * logs).sum(-1)

    if not torch.is_grad_enabled():
        slices = [scores_of(model.unembed(part), target, temperature)[:2] for part, target in parts]
    elif len(targets) <= size:
        return score(before, targets)
    else:  # slices are recomputed in the backward pass, so that only one slice of logits is in memory
        slices = [checkpoint(score, part, target, use_reentrant=False) for part, target in parts]
    return torch.cat([part[0] for part in slices]), torch.cat([part[1] for part in slices])


def sharded_head(model: PolicyModel) -> Any:
    """The output head if its vocabulary is sharded over ranks (`parallel.VocabularyHead`), else None."""
    head = getattr(model, "lm_head", None)
    return head if hasattr(head, "scores") else None
