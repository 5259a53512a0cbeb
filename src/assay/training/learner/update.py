"""The update: groups of rollouts -> optimizer steps; and losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from itertools import accumulate, compress, pairwise
from operator import add
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from assay.algos import Algorithm, LossBatch, Sums, metrics
from assay.algos.credit import RETURNS
from assay.mesh import Mesh, full_tensor, local_tensor, reshard
from assay.models import PolicyModel
from assay.models.logprobs import token_logprobs, token_loss
from assay.models.lora import merged_weights
from assay.runs import rollouts
from assay.runs.files import write_json
from assay.runs.metrics import non_finite_terms
from assay.training.learner.critic import Critic
from assay.training.learner.optim import clip_gradients, set_lr
from assay.training.learner.pack import (
    TRAINER_LOGPROBS,
    MicroBatch,
    Row,
    gather_by_row,
    pack,
    partition_rows,
    retry_on_oom,
    score_rows,
    weighted_rollouts,
    with_step_inputs,
)
from assay.training.parallel import sum_gradients
from assay.types import Group, Progress, UserError, plural

MAX_NAMES = 5  # parameters listed per fault


@dataclass(frozen=True)
class Fault:
    """An update that was skipped."""

    loss: float
    grad_norm: float
    weights: list[str]  # parameters that are not finite, the first few
    gradients: list[str]  # parameters whose gradient is not finite, the first few
    terms: str = ""  # loss terms that are not finite although the log-probabilities are

    @property
    def what(self) -> str:
        if self.weights:
            return f"the weight {self.weights[0]}"
        if self.terms:
            return self.terms
        return "the gradient" if math.isfinite(self.loss) else "the loss"


def diagnose_nonfinite(policy: PolicyModel, loss: float, grad_norm: float, terms: str = "") -> Fault:
    """Find the parameters that are affected. Call this before the gradients are cleared."""
    named = list(policy.named_parameters())
    gradients = [(name, p.grad) for name, p in named if p.grad is not None]
    affected = [name for name, gradient in gradients if not full_tensor(gradient).isfinite().all()]
    return Fault(loss, grad_norm, not_finite(named, full_tensor), affected[:MAX_NAMES], terms)


def dump_batch(run_path: Path, step: int, groups: Sequence[Group], faults: Sequence[Fault]) -> None:
    """Write the faults to `skipped/step-N.json` and the batch to rollout files next to it."""
    path = rollouts.write_rollouts(run_path, step, groups, "skipped")
    write_json(
        path.with_suffix(".json"),
        {"step": step, "updates": [{"what": fault.what, **asdict(fault)} for fault in faults]},
    )


class NonFiniteError(UserError):
    """Ends a run because of values that are not finite. `TrainingRun.active` adds the command that continues it.

    `of_term`: a term of the loss is the cause, not the weights or the learning rate.
    """

    of_term = False


def check_faults(faults: Sequence[Fault], consecutive: int, limit: int, run_path: Path | None = None) -> None:
    """End the run if weights are not finite, or `limit` consecutive steps were skipped (0: no limit).

    `run_path`: where the batches of these steps are saved; None: in a warm start, they are not.
    """
    if not any(fault.weights for fault in faults) and not (faults and 0 < limit <= consecutive):
        return
    fault = faults[-1]
    how = "is not finite" if fault.weights else f"was not finite for {plural(consecutive, 'step')} in a row"
    batches = "" if run_path is None else f"; the batches are saved in {run_path / 'skipped'}"
    error = NonFiniteError(f"{fault.what} {how} (loss {fault.loss:g}, gradient norm {fault.grad_norm:g}{batches})")
    error.of_term = bool(fault.terms) and not fault.weights and run_path is not None
    raise error


def check_finite(tensors: Iterable[tuple[str, Tensor]], mesh: Mesh, step: int) -> None:
    """Refuse to save weights that are not finite. All ranks call this together."""
    if names := [name for names in mesh.all_gather_objects(not_finite(tensors)) for name in names]:
        raise NonFiniteError(f"the weight {names[0]} is not finite after step {step}, which is not saved")


def not_finite(tensors: Iterable[tuple[str, Tensor]], part: Callable[[Tensor], Tensor] = local_tensor) -> list[str]:
    """Names of the first tensors that are not finite. `part`: `full_tensor`, or by default the shards of this rank."""
    return [name for name, tensor in tensors if not _is_finite(part(tensor.detach()))][:MAX_NAMES]


def _is_finite(weight: Tensor) -> bool:
    """Whether all values are finite. A bias may contain -inf, which blocks a token."""
    finite = weight.isfinite()
    return bool((finite | weight.isneginf() if weight.dim() == 1 else finite).all())


Scorer = Literal["trainer", "reference"]
REF_LOGPROBS = "ref_logprobs"  # input: the reference's log-probabilities, if a server has computed them
ROUNDING = 1e-12  # gradient norms up to this are rounding errors of a gradient that is 0


def mini_batches(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Split into `count` slices whose sizes differ by at most one."""
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(bounds)]


RowScores = dict[str, np.ndarray]  # values per trained token of a row, by the name of their field of a rollout


@dataclass
class ScoreRecord:
    """Log-probabilities and entropies that an optimizer step computes. They stay on the device until the step is done,
    so that recording them does not synchronize with a GPU.
    """

    parts: list[tuple[Sequence[Row], dict[str, Tensor]]] = field(default_factory=list)

    def put(self, rows: Sequence[Row], values: Sequence[RowScores]) -> None:
        """Store the result of `by_row` in another process."""
        tensors = [{name: torch.from_numpy(array) for name, array in scores.items()} for scores in values]
        self.parts = [([row], row_tensors) for row, row_tensors in zip(rows, tensors, strict=True)]

    def by_row(self, rows: Sequence[Row], mesh: Mesh) -> list[RowScores]:
        """The values of each row, gathered from all ranks."""
        own: list[tuple[Row, RowScores]] = []
        for part, tensors in self.parts:
            arrays = {name: values.cpu().numpy() for name, values in tensors.items()}
            ends = accumulate(row.count for row in part)
            for row, end in zip(part, ends, strict=True):
                own.append((row, {name: values[end - row.count : end] for name, values in arrays.items()}))
        return gather_by_row(rows, own, mesh)


class TokenScorer(Protocol):
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of all tokens but the first of each sequence."""


@dataclass
class Updater:
    """The policy, its optimizer and its reference, and how a batch updates them."""

    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    token_budget: int = 16384  # per micro-batch; halved permanently when one does not fit into memory
    dtype: torch.dtype = torch.float32  # of the computation; weights keep theirs
    reference: PolicyModel | None = None  # the policy itself: its base model, without the adapters
    served: TokenScorer | None = None  # computes the reference's log-probabilities instead
    offload_reference: bool = False  # keep the reference in main memory while it is not used
    critic: Critic | None = None  # a critic that shares the policy's trunk and is updated with it
    mesh: Mesh = field(default_factory=Mesh)  # every rank gets all rows of a step and computes its share
    expects_more: bool = True  # whether another update will follow the next one
    progress: Progress | None = None  # receives the number of tokens of a step that are done
    faults: Sequence[Fault] = ()  # steps of the last `update` that were skipped because of non-finite values

    def update(self, groups: Sequence[Group], algo: Algorithm, lr: float, passes: int = 1) -> dict[str, float]:
        """Iterate `passes` times over the groups, with one optimizer step per mini-batch.

        Sets the log-probabilities of trainer and reference, and the entropies, that the first pass computes.
        """
        self.faults = []
        batches = [weighted_rollouts(part, algo) for part in mini_batches(groups, algo.update_count(len(groups)))]
        parts = [[Row.of(rollout, weight, algo.inputs) for rollout, weight in batch] for batch in batches]
        records = [ScoreRecord() for _ in parts]
        with self.working(algo.needs.ref_logprobs_in_loss):
            if algo.needs.trainer_logprobs and len(parts) * passes > 1:
                parts = [self.with_scores(rows, algo, "trainer") for rows in parts]
            if algo.needs.ref_logprobs_in_loss and self.served is not None:
                parts = [self.with_scores(rows, algo, "reference") for rows in parts]
            parts = [with_step_inputs(rows, algo) for rows in parts]
            steps = [
                self.step(rows, algo, lr, None if later else record)
                for later in range(passes)
                for rows, record in zip(parts, records, strict=True)
                if rows
            ]
        for batch, rows, record in zip(batches, parts, records, strict=True):
            for (rollout, _), scores in zip(batch, record.by_row(rows, self.mesh), strict=True):
                for name, values in scores.items():
                    setattr(rollout, name, values)
        if not steps:
            return {"optim/lr": lr, "optim/skipped": 1.0, "optim/non_finite": 0.0}
        sums, norms, skipped = zip(*steps, strict=True)
        return metrics(reduce(add, sums), updates=len(steps)) | {
            "optim/lr": lr,
            "optim/grad_norm": sum(norms) / len(norms),
            "optim/updates": float(len(steps)),
            "optim/skipped": float(sum(skipped)),
            "optim/non_finite": float(len(self.faults)),
        }

    def with_scores(self, rows: Sequence[Row], algo: Algorithm, by: Scorer) -> list[Row]:
        """Rows with log-probabilities before the first step as an input: of the trainer, or of a served reference."""
        name = TRAINER_LOGPROBS if by == "trainer" else REF_LOGPROBS
        scores = self.scores(rows, algo, by)
        return [row.with_input(name, values) for row, values in zip(rows, scores, strict=True)]

    def ref_logprobs(self, groups: Sequence[Group], algo: Algorithm) -> list[list[float]]:
        """The reference's log-probabilities of the trained tokens, one list per rollout; stored in the rollouts too."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with self.working(reference=True):
            scores = self.scores([Row.of(rollout) for rollout in rollouts], algo, "reference")
        for rollout, values in zip(rollouts, scores, strict=True):
            rollout.ref_logprobs = values
        return scores

    def scores(self, rows: Sequence[Row], algo: Algorithm, by: Scorer) -> list[list[float]]:
        """Log-probabilities of the trained tokens, one list per row, on every rank."""
        if by == "reference" and self.served is not None:
            return self._served_scores(self.served, rows)
        logprobs = partial(self._logprobs, self.policy) if by == "trainer" else self._ref_logprobs
        trained = [row for row in rows if row.count]  # other rows need no forward pass
        share_prefixes = self.policy.supports_prefix_sharing
        scores = iter(score_rows(self, self.policy, trained, logprobs, self._loss_dtype, share_prefixes))
        return [next(scores) if row.count else [] for row in rows]

    def _served_scores(self, server: TokenScorer, rows: Sequence[Row]) -> list[list[float]]:
        every = iter(self.mesh.on_main(lambda: server.score([row.ids for row in rows if row.count])))
        return [list(compress(next(every), row.trained[1:])) if row.count else [] for row in rows]

    def step(
        self, rows: Sequence[Row], algo: Algorithm, lr: float, record: ScoreRecord | None = None
    ) -> tuple[Sums, float, bool]:
        """One optimizer step. The split into micro-batches and over ranks affects memory and time, not the result.

        `record`: is filled with the log-probabilities and entropies of the rows.
        """
        sums = retry_on_oom(self, self.policy, rows, lambda: self._accumulate(rows, algo, record))
        if self.mesh.dp_size > 1:
            sums = sums.all_reduce(self.mesh.dp_group)
            sum_gradients(self.policy.parameters(), self.mesh)
        norm = float(clip_gradients(self.policy.parameters(), self.max_grad_norm))
        loss = float(sums.losses["loss/total"])
        finite = math.isfinite(norm) and math.isfinite(loss)
        useful = finite and norm > ROUNDING  # else momentum and weight decay must not change the weights either
        if useful:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        elif not finite:
            self.faults = [*self.faults, diagnose_nonfinite(self.policy, loss, norm, non_finite_terms(metrics(sums)))]
            warnings.warn(f"{self.faults[-1].what} is not finite: this update is skipped", stacklevel=2)
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic:
            self.critic.step(finite)
        return sums, norm, not useful

    def _accumulate(self, rows: Sequence[Row], algo: Algorithm, record: ScoreRecord | None = None) -> Sums:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic:
            self.critic.step(usable=False)
        record = record or ScoreRecord()
        record.parts.clear()
        shares = partition_rows(
            rows, self.mesh.dp_size, self.mesh.dp_rank, self.token_budget, self.policy.supports_prefix_sharing
        )
        # A generator: the next micro-batch is packed while the GPU computes the current one.
        parts = ((part, pack(part, self.policy.device, self._loss_dtype)) for part in self._shown(shares))
        return reduce(add, (self._backward(part, packed, algo, record) for part, packed in parts))

    def _shown(self, shares: Sequence[list[Row]]) -> Iterator[list[Row]]:
        """The micro-batches of a step; `progress` receives how many tokens they have before each of them, and at the
        end. On a GPU it is ahead of the computation.
        """
        done, total = 0, sum(len(row.ids) for share in shares for row in share)
        for share in shares:
            if self.progress is not None:
                self.progress("training", done, total, "tokens")
            yield share
            done += sum(len(row.ids) for row in share)
        if self.progress is not None:
            self.progress("training", total, total, "tokens")

    def _backward(self, rows: Sequence[Row], part: MicroBatch, algo: Algorithm, record: ScoreRecord) -> Sums:
        needs = algo.needs
        ref_logprobs = self._ref_logprobs(part) if needs.ref_logprobs_in_loss else None
        sums: list[Sums] = []
        trainer_logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        values: list[Tensor] = []

        def loss(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
            sampled = part.behaviour_logprobs[at]
            inputs = {name: values[at] for name, values in part.inputs.items()}
            # If this is the only step on the batch, the current log-probabilities equal the old ones.
            old_logprobs = inputs.get(TRAINER_LOGPROBS, logprobs.detach())
            trainer_logprobs.append(old_logprobs)
            entropies.append(entropy.detach())
            out = algo.loss(
                LossBatch(
                    logprobs=logprobs,
                    behaviour_logprobs=old_logprobs if needs.trainer_logprobs else sampled,
                    advantages=part.advantages[at],
                    weights=part.weights[at],
                    entropy=entropy if needs.entropy_gradient else entropy.detach(),
                    ref_logprobs=None if ref_logprobs is None else ref_logprobs[at],
                    engine_logprobs=sampled if needs.trainer_logprobs else None,
                    lengths=part.trained_lengths if needs.whole_sequences else None,
                    inputs=inputs,
                )
            )
            sums.append(out.sums)
            return out.total

        def value_loss(hidden: Tensor) -> Tensor:
            assert self.critic is not None
            values.append(self.critic.loss(hidden, part))
            return values[0]

        with self._computing():
            total = token_loss(
                self.policy,
                part.ids,
                part.lengths,
                part.trained,
                loss,
                self.temperature,
                shared=part.shared,
                whole=needs.whole_sequences,
                also=value_loss if self.critic and RETURNS.name in part.inputs else None,
            )
        total.backward()
        scores = {TRAINER_LOGPROBS: torch.cat(trainer_logprobs), "entropies": torch.cat(entropies)}
        record.parts.append((rows, scores if ref_logprobs is None else {**scores, REF_LOGPROBS: ref_logprobs}))
        total_sums = reduce(add, sums)
        return total_sums.and_loss("loss/value", values[0]) if values else total_sums

    def _ref_logprobs(self, part: MicroBatch) -> Tensor:
        if REF_LOGPROBS in part.inputs:
            return part.inputs[REF_LOGPROBS]
        assert self.reference is not None, "needs.reference: there is no reference model"
        with self.reference.adapters_off():
            return self._logprobs(self.reference, part)

    @torch.no_grad()
    def _logprobs(self, model: PolicyModel, part: MicroBatch) -> Tensor:
        ids, lengths, trained = part.ids, part.lengths, part.trained
        with self._computing():
            return token_logprobs(model, ids, lengths, trained, self.temperature, shared=part.shared)[0]

    @torch.no_grad()
    def update_reference(self, keep: float) -> None:
        """reference = keep * reference + (1 - keep) * policy, with adapters merged."""
        assert self.reference is not None and self.reference is not self.policy, "the reference must be a model itself"
        reshard(self.reference)
        weights = dict(self.reference.network.named_parameters())
        for name, weight in merged_weights(self.policy.network):
            reference_weight = weights[name]
            if keep:
                reference_weight.mul_(keep).add_(
                    weight.to(reference_weight.device, reference_weight.dtype), alpha=1.0 - keep
                )
            else:
                reference_weight.copy_(weight)

    @contextmanager
    def working(self, reference: bool = False) -> Iterator[None]:
        """Context of `step` and `scores`: an offloaded reference is on the device within it."""
        offloaded = self.offload_reference and reference and self.reference is not self.policy
        if not offloaded or self.reference is None:
            yield
            return
        self.reference.to(self.policy.device)
        try:
            yield
        finally:
            self.reference.to("cpu")

    def _computing(self) -> AbstractContextManager:
        return torch.autocast(self.policy.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if next(self.policy.parameters()).dtype == torch.float64 else torch.float32
