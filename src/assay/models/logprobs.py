"""Log-probabilities of given tokens, and losses made of them, without ever holding logits for more than a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assay.models.base import PolicyModel
from assay.models.device import upload
from assay.models.scoring import TokenLoss, at_least_float32, loss_through_head, scores_of
from assay.models.vocab_parallel import VocabularyHead

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
        shares = every.exp()
        logs = every.masked_fill(shares == 0, 0.0)  # of a blocked token -inf, and 0 * -inf would be NaN
        return every.gather(-1, target[:, None]).squeeze(-1), -(shares * logs).sum(-1)

    if len(targets) <= size:
        return score(before, targets)
    # Several slices: each is recomputed in the backward pass, so only one slice of logits is alive at a time.
    parts_with_gradient = [
        checkpoint(score, part, target, use_reentrant=False)
        for part, target in zip(before.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts_with_gradient]), torch.cat([p[1] for p in parts_with_gradient])
