"""Weight sync with proof: after every update, the engine must serve the weights of the trainer.

Engines that can compute a fingerprint of their weights are compared with the trainer bit by bit. Other engines are
probed: trainer and engine score the same fixed sequences. Both use the same weights in the same dtype, so the root mean
square difference of their log-probabilities (the gap) is numerical noise, which does not grow. A weight that was not
copied adds a difference that grows as training changes it. `WeightSync` does either, and an error names the weights or
the tokens that differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from assay.algos import Algorithm
from assay.config import AlgoConfig, EngineConfig
from assay.engine.base import BaseEngine
from assay.engine.remote.scoring import gap_problem, rms_gap
from assay.mesh import Mesh, local_tensor, reshard
from assay.models import PolicyModel
from assay.models.base import digests, fingerprint
from assay.models.fp8 import served_weights
from assay.models.lora import merged_weights
from assay.models.quantize import NF4Linear, quantized_layers
from assay.training.learner.pack import Row
from assay.training.learner.update import Updater
from assay.training.parallel import is_fsdp
from assay.types import UserError, plural

Method = Literal["fingerprint", "probe", "off"]
SHOWN = 3  # names of weights in an error message
REMEDY = "resume from the last checkpoint; if this happens again, the engine or its weight transport is at fault"


class SyncError(UserError):
    """After a weight sync, the engine does not serve the weights of the trainer."""


def sync_weights(policy: PolicyModel, engine: BaseEngine, version: int, mesh: Mesh | None = None) -> str | None:
    """Copy the weights of the policy to the engine, and compare fingerprints if the engine can compute one.

    Returns the fingerprint.
    """
    engine.update_weights(policy, version)
    return compare_fingerprints(policy, engine, version, mesh or Mesh())


def compare_fingerprints(policy: PolicyModel, engine: BaseEngine, version: int, mesh: Mesh) -> str | None:
    """The fingerprint of the served weights; None if the engine has none. Raises on all ranks if it differs on one."""
    served = engine.fingerprint()
    if served is None:
        return None
    expected = fingerprint(*as_served_by(engine, policy))
    if mesh.any(expected != served):
        ours = digests(*as_served_by(engine, policy))
        theirs = engine.digests()
        problem = f"fingerprints {served[:12]} and {expected[:12]}" if expected != served else ""
        if problem and theirs is not None:
            problem = f"{differing_weights(ours, theirs)} ({problem})"
        raise_together(problem, version, mesh)
    return served


def as_served_by(engine: BaseEngine, policy: PolicyModel) -> tuple[Iterable[tuple[str, Tensor]], torch.dtype | None]:
    """The weights that the engine must have, and the dtype that they are to be cast to."""
    if engine.info.quantize:
        return served_weights(policy.weights(), engine.info.dtype, engine.info.quantize == "fp8_head"), None
    return policy.weights(), engine.info.dtype


def differing_weights(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Names of the first weights that differ, in the order of the trainer."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return "no single weight differs"
    shown = [name if name in theirs else f"{name} (missing in the engine)" for name in names[:SHOWN]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{plural(len(names), 'weight')} of {len(ours)}: {', '.join(shown)}{more}"


def raise_together(problem: str, version: int, mesh: Mesh) -> None:
    """Raise the same error on all ranks if any of them has a problem."""
    problems = mesh.all_gather_objects(problem)
    rank, first = next(((rank, text) for rank, text in enumerate(problems) if text), (0, ""))
    if first:
        where = f" of rank {rank}" if mesh.world > 1 else ""
        raise SyncError(
            f"after the weight sync of version {version}, the weights of the engine{where} differ from those of the "
            f"trainer: {first}; {REMEDY}"
        )


# -- the probe

PROBE_PROMPTS = 12  # probe sequences from prompts of the run; equally many of random tokens
LENGTH = 32  # tokens of each
LONG = 256  # tokens of one further sequence, so that weights of later positions take part
# Gaps in nats that count as numerical noise, by the dtype of the less precise side.
FLOORS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3}
FLOOR = 1e-2  # of bfloat16 and narrower dtypes
START_LIMIT = 10.0  # largest gap before training, in units of the effect of rounding all weights,
START_FLOOR = 0.02  # or in nats; a wrong weight causes far more
LIMIT = 2.5  # largest gap afterwards, in units of the numerical noise
PERTURBATION = 2.0**-17  # smallest relative change that stands for rounding: it must exceed the precision of weights

NEUTRAL = Algorithm(AlgoConfig(advantage="none", policy_loss="reinforce"))  # scores do not depend on an algorithm


def probe_sequences(prompts: Iterable[Sequence[int]], vocab_size: int, max_length: int, seed: int) -> list[list[int]]:
    """Fixed sequences: the ends of prompts, filled up with random tokens, and random tokens alone.

    A server may need a place for a new token, so no sequence has `max_length` tokens.
    """
    draw = random.Random(f"probe/{seed}")
    sizes = [min(LENGTH, max_length - 1)] * (2 * PROBE_PROMPTS) + [min(LONG, max_length - 1)]
    ends = [list(prompt)[-sizes[0] :] for prompt, _ in zip(prompts, range(PROBE_PROMPTS), strict=False)]
    ends += [[] for _ in range(len(sizes) - len(ends))]
    return [
        [*end, *(draw.randrange(vocab_size) for _ in range(size - len(end)))]
        for end, size in zip(ends, sizes, strict=True)
    ]


@contextmanager
def as_served(policy: PolicyModel, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Within this context the policy has the weights that the engine must have: adapters merged, rounded to `dtype`.

    Yields this rank's shards of them, which may be changed: afterwards all weights are as before, bit by bit. The saved
    copy takes as much memory as the gradients of an update of all weights. Quantized weights are not changed, but
    replaced by dequantized ones.
    """
    reshard(policy)
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(policy.network)}
    replaced: list[tuple[NF4Linear, Tensor]] = []
    parameters, saved = dict(policy.network.named_parameters()), list[tuple[Tensor, Tensor]]()
    try:
        with torch.no_grad():
            for name, weight in merged_weights(policy.network):
                if (layer := quantized.get(name)) is not None:
                    replaced.append((layer, weight.to(dtype).to(layer.weight_scales.dtype, copy=True)))
                    continue
                local_parameter = local_tensor(parameters[name].detach())
                saved.append((local_parameter, local_parameter.clone()))
                local_parameter.copy_(local_tensor(like(weight, parameters[name])).to(dtype))
        for layer, weight in replaced:
            layer.substitute = weight
        with policy.adapters_off():
            yield [*(local_parameter for local_parameter, _ in saved), *(weight for _, weight in replaced)]
    finally:
        reshard(policy)
        for layer, _ in replaced:
            layer.substitute = None
        with torch.no_grad():
            for local_parameter, before in saved:
                local_parameter.copy_(before)


def like(weight: Tensor, parameter: Tensor) -> Tensor:
    """A merged weight, sharded like its parameter."""
    placements = getattr(parameter, "placements", None)
    return weight if placements is None else weight.redistribute(placements=placements)  # type: ignore[attr-defined]


@torch.no_grad()
def perturb(weights: Sequence[Tensor], relative: float) -> None:
    """Multiply each number by 1 + `relative` or 1 - `relative`, at random; equal on ranks with the same weight."""
    for index, weight in enumerate(weights):
        generator = torch.Generator(weight.device).manual_seed(index)
        signs = torch.empty_like(weight).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
        weight.mul_(signs.mul_(relative).add_(1.0))


def scoring_dtype(updater: Updater) -> torch.dtype:
    """The dtype of the trainer's scores: float32 or more, since an engine cannot follow the noise of bfloat16.

    FSDP computes in the dtype that it was made for, and weights that are stored in bfloat16 are not computed with in
    another one.
    """
    fixed = any(is_fsdp(parameter) or parameter.dtype == torch.bfloat16 for parameter in updater.policy.parameters())
    return updater.dtype if fixed or updater.dtype.itemsize >= 4 else torch.float32


def trainer_scores(updater: Updater, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The trainer's log-probabilities of every token but the first of each sequence, on every rank.

    They are computed in this process, also for an updater that works in another one.
    """
    scorer = Updater(
        updater.policy,
        updater.optimizer,
        token_budget=updater.token_budget,
        dtype=scoring_dtype(updater),
        mesh=updater.mesh,
    )
    rows = [Row(list(ids), [0] + [1] * (len(ids) - 1), [0.0] * len(ids), 0.0, 0.0) for ids in sequences]
    return np.concatenate([np.array(row_scores) for row_scores in scorer.scores(rows, NEUTRAL, "trainer")])


@dataclass(frozen=True)
class ProbeStart:
    """The probe before training."""

    trainer: np.ndarray  # log-probabilities of all probe tokens
    gap: float  # largest of all servers of the main rank
    rounding: float  # root mean square effect of rounding all weights once more


@dataclass
class WeightSync:
    """Copies the policy's weights to the engine, and verifies every `every`-th version.

    With several ranks, all of them call every method, and all raise the same error. A checkpoint stores the scores
    before training, so that a resumed run compares with the same ones.
    """

    updater: Updater
    engine: BaseEngine
    method: Method = "fingerprint"
    every: int = 1
    sequences: list[list[int]] = field(default_factory=list)  # of the probe
    start: ProbeStart | None = None
    fingerprint: str | None = None  # of the weights that were verified last

    @property
    def mesh(self) -> Mesh:
        return self.updater.mesh

    def sync(self, version: int) -> dict[str, float]:
        """Copy the weights; returns the metrics of the verification."""
        self.engine.update_weights(self.updater.policy, version)
        return self.verify(version) if version % self.every == 0 else {}

    def verify(self, version: int) -> dict[str, float]:
        """Raise a `SyncError` on all ranks unless the engine of each serves the weights of the trainer."""
        if self.method == "off":
            return {}
        served = self.engine.info.version
        raise_together(f"it serves version {served}" if served != version else "", version, self.mesh)
        return self._compare_fingerprints(version) if self.method == "fingerprint" else self._probe(version)

    def _compare_fingerprints(self, version: int) -> dict[str, float]:
        """`weights/changed`: whether the engine's weights differ from those verified before."""
        before = self.fingerprint
        self.fingerprint = compare_fingerprints(self.updater.policy, self.engine, version, self.mesh)
        return {"weights/changed": float(self.fingerprint != before)} if before and self.fingerprint else {}

    def _probe(self, version: int) -> dict[str, float]:
        trainer, rounding = self._trainer_scores()
        if not np.isfinite(trainer).all():
            return {}  # training has diverged, which other checks report
        scores, problem = dict[str, list[list[float]]](), None
        try:
            scores = self.engine.score_each(self.sequences)  # of the engine, or of each of its servers, by name
        except UserError as error:  # raised on all ranks, which go on together
            problem = error
        if failed := next(filter(None, self.mesh.all_gather_objects(problem)), None):
            raise failed
        by_server = {
            name: np.concatenate([np.array(row, dtype=float) for row in rows]) for name, rows in scores.items()
        }
        gaps = {name: rms_gap(engine, trainer) for name, engine in by_server.items()}
        if version == 0 or self.start is None:
            self._check_gaps(version, trainer, by_server, max(START_LIMIT * rounding, START_FLOOR))
            self.start = ProbeStart(trainer, self.mesh.broadcast_object(max(gaps.values())), rounding)
        limit = LIMIT * self._noise(self.start, rounding)
        self._check_gaps(version, trainer, by_server, limit)
        return {
            "sync/probe_gap": max(gaps.values()),
            "sync/probe_limit": limit,
            "sync/probe_change": rms_gap(trainer, self.start.trainer),
        }

    def _noise(self, start: ProbeStart, rounding: float) -> float:
        """Expected gap of the right weights: that before training, more if rounding has more effect now."""
        growth = max(1.0, rounding / start.rounding) if start.rounding else 1.0
        return max(start.gap * growth, FLOORS.get(self._precision, FLOOR))

    def _check_gaps(self, version: int, trainer: np.ndarray, by_server: Mapping[str, np.ndarray], limit: float) -> None:
        problems = (self._problem(name, engine, trainer, limit) for name, engine in by_server.items())
        raise_together(next(filter(None, problems), ""), version, self.mesh)

    @property
    def _engine_kind(self) -> str:
        return f"{type(self.engine).__name__}, {self.engine.info.dtype}"

    @property
    def _precision(self) -> torch.dtype:
        """Of the less precise side."""
        return min(self.engine.info.dtype, self.updater.dtype, key=lambda dtype: dtype.itemsize)

    def _trainer_scores(self) -> tuple[np.ndarray, float]:
        """Scores with the weights that the engine must have, and the effect of rounding them once more."""
        rounding = torch.finfo(self._precision).eps / 4  # about the root mean square of rounding errors
        applied = max(rounding, PERTURBATION, torch.finfo(scoring_dtype(self.updater)).eps)  # less is rounded away
        with as_served(self.updater.policy, self.engine.info.dtype) as weights:
            exact = trainer_scores(self.updater, self.sequences)
            reshard(self.updater.policy)
            perturb(weights, applied)
            return exact, rms_gap(trainer_scores(self.updater, self.sequences), exact) * rounding / applied

    def _problem(self, server: str, engine: np.ndarray, trainer: np.ndarray, limit: float) -> str:
        """What shows that a server has other weights, with the token that shows it best; empty if nothing does."""
        text = gap_problem(engine, trainer, limit)
        if not text:
            return ""
        gap = np.abs(engine - trainer)
        at = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf)))
        sequence, position = 0, at + 1
        while position >= len(self.sequences[sequence]):
            position -= len(self.sequences[sequence]) - 1
            sequence += 1
        return (
            f"{f'{server}: ' if server else ''}{text}; most at token {position} (id "
            f"{self.sequences[sequence][position]}) of probe sequence {sequence}: {engine[at]:.4f} in the engine, "
            f"{trainer[at]:.4f} in the trainer"
        )

    def state_dict(self) -> dict[str, Any]:
        """Empty unless there is a probe. JSON keeps all digits."""
        if self.start is None:
            return {}
        start = {"trainer": self.start.trainer.tolist(), "gap": self.start.gap, "rounding": self.start.rounding}
        return {"engine": self._engine_kind, "sequences": self.sequences, **start}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Scores of another kind of engine, or of another probe, are not used: the next verification is the first."""
        complete = saved.keys() >= {"engine", "sequences", "trainer", "gap", "rounding"}
        if self.method == "probe" and complete and saved["engine"] == self._engine_kind:
            self.sequences = saved["sequences"]
            self.start = ProbeStart(np.array(saved["trainer"]), saved["gap"], saved["rounding"])


def verify_method(cfg: EngineConfig, engine: BaseEngine) -> Method:
    """How weight syncs are verified. "off" if the engine supports neither."""
    has = engine.info.capabilities
    supported = {"fingerprint": has.fingerprint, "probe": has.score, "off": True}
    if cfg.verify == "auto":
        return "fingerprint" if has.fingerprint else "probe" if has.score else "off"
    if not supported[cfg.verify]:
        needs = "a fingerprint of its weights (fingerprint)" if cfg.verify == "fingerprint" else "score"
        raise UserError(f"engine.verify = '{cfg.verify}' needs {needs}, which engine {cfg.name} lacks: set it to auto")
    return cfg.verify
