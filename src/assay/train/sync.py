"""Weight sync with proof: after every update, the engine must serve the weights of the trainer.

Engines that can compute a fingerprint of their weights are compared with the trainer bit by bit. Other engines are
probed: trainer and engine score the same fixed sequences. Both use the same weights in the same dtype, so only
numerical noise may remain, and the noise does not grow. A weight that was not copied adds a difference that grows as
training changes it. `WeightSync` does either, and an error names the weights or the tokens that differ.
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
from assay.mesh import Mesh, local_tensor, reshard
from assay.models import PolicyModel
from assay.models.base import digests, fingerprint
from assay.models.lora import merged_weights
from assay.models.quantize import NF4Linear, quantized_layers
from assay.train.learner.pack import Row
from assay.train.learner.parallel import is_fsdp
from assay.train.learner.update import Updater
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
    expected = fingerprint(policy.weights(), engine.info.dtype)
    if mesh.any(expected != served):
        ours = digests(policy.weights(), engine.info.dtype)
        theirs = engine.digests()
        problem = f"fingerprints {served[:12]} and {expected[:12]}" if expected != served else ""
        if problem and theirs is not None:
            problem = f"{differing_weights(ours, theirs)} ({problem})"
        raise_together(problem, version, mesh)
    return served


def differing_weights(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Names of the first weights that differ, in the order of the trainer."""
    differing = [name for name, text in ours.items() if theirs.get(name) != text]
    extra = [name for name in theirs if name not in ours]
    names = [*differing, *extra]
    if not names:
        return "no single weight differs"
    kinds = {True: " (missing in the engine)", False: ""}
    shown = [name + kinds[name in ours and name not in theirs] for name in names[:SHOWN]]
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
# Root mean square differences in nats that are never reported, by the dtype of the less precise side.
FLOORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3}
FLOOR = 1e-2  # of bfloat16 and narrower dtypes
START_LIMIT = 10.0  # largest gap before training, in units of the effect of rounding all weights,
START_FLOOR = 0.02  # or in nats; a wrong weight causes far more
LEVEL_LIMIT = 2.5  # largest root mean square gap, in units of that before training
TOKEN_LIMIT = 4.0  # largest gap of a single token, in units of the largest before training
STALE_SHARE = 0.5  # share of the trainer's change that the engine may miss, if the share is known with
CERTAINTY = 8.0  # so many standard errors, so that thousands of checks give no false alarm
PERTURBATION = 2.0**-17  # smallest relative change that stands for rounding: it must exceed the precision of weights
NOISY = 5.0  # changes of scores in bfloat16 below so many effects of rounding may be noise of the trainer
KEPT = 0.98  # weight of earlier versions in the sums over versions: about the last 50 count

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
                own = local_tensor(parameters[name].detach())
                saved.append((own, own.clone()))
                own.copy_(local_tensor(like(weight, parameters[name])).to(dtype))
        for layer, weight in replaced:
            layer.substitute = weight
        with policy.adapters_off():
            yield [*(own for own, _ in saved), *(weight for _, weight in replaced)]
    finally:
        reshard(policy)
        for layer, _ in replaced:
            layer.substitute = None
        with torch.no_grad():
            for own, before in saved:
                own.copy_(before)


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
    """The dtype of the trainer's scores: at least float32, since an engine cannot follow the noise of bfloat16.

    FSDP computes in the dtype that it was made for.
    """
    sharded = any(map(is_fsdp, updater.policy.parameters()))
    return updater.dtype if sharded or updater.dtype.itemsize >= 4 else torch.float32


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
    return np.concatenate([np.array(one) for one in scorer.scores(rows, NEUTRAL, "trainer")])


def engine_scores(engine: BaseEngine, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The same of the engine, or of each of its servers, by name."""
    scores = engine.score_each(sequences).items()
    return {name: np.concatenate([np.array(one, dtype=float) for one in own]) for name, own in scores}


@dataclass(frozen=True)
class ProbeScores:
    """Log-probabilities of all probe tokens at one version."""

    trainer: np.ndarray
    engine: np.ndarray
    rounding: float  # root mean square effect of rounding all weights once more

    @property
    def gap(self) -> np.ndarray:
        return self.engine - self.trainer


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@dataclass
class MissedChange:
    """Regression of an engine's drift on a change of the trainer's scores: which share of it does the engine miss?

    Tokens of a sequence depend on each other, and so do versions. Sums over clusters of neighboring tokens are nearly
    independent, and their spread gives the standard error, whatever the dependence over time.
    """

    products: np.ndarray  # per cluster: sum of change times drift
    squares: np.ndarray  # per cluster: sum of change squared

    @classmethod
    def of(cls, change: np.ndarray, drift: np.ndarray, clusters: np.ndarray) -> MissedChange:
        return cls(np.add.reduceat(change * drift, clusters), np.add.reduceat(change * change, clusters))

    def __add__(self, other: MissedChange) -> MissedChange:
        return MissedChange(self.products + other.products, self.squares + other.squares)

    def __mul__(self, weight: float) -> MissedChange:
        return MissedChange(self.products * weight, self.squares * weight)

    @property
    def share(self) -> float:
        total = float(self.squares.sum())
        return -float(self.products.sum()) / total if total else 0.0

    @property
    def certain(self) -> bool:
        """Whether the share is large, and that is no coincidence."""
        total = float(self.squares.sum())
        error = rms(self.products + self.share * self.squares) * np.sqrt(len(self.products)) / total if total else 0.0
        return bool(self.share > STALE_SHARE and self.share > CERTAINTY * error)


@dataclass
class Comparison:
    """Scores of a version, compared with those before training."""

    start: ProbeScores
    now: ProbeScores
    floor: float

    @property
    def noise(self) -> float:
        """Expected root mean square of the gap: that before training, more if rounding has more effect now."""
        growth = max(1.0, self.now.rounding / self.start.rounding) if self.start.rounding else 1.0
        return max(rms(self.start.gap) * growth, self.floor)

    @property
    def token_noise(self) -> float:
        """Expected largest gap."""
        before = np.abs(self.start.gap)
        return max(float(before.max()) * self.noise / max(rms(before), self.floor), self.floor)

    @property
    def drift(self) -> np.ndarray:
        """Change of the engine's scores minus change of the trainer's: constant differences cancel."""
        return self.now.gap - self.start.gap

    @property
    def change(self) -> np.ndarray:
        return self.now.trainer - self.start.trainer

    def problem(self) -> str:
        """What shows that the engine serves other weights; empty if nothing does."""
        if not np.isfinite(self.now.engine).all():
            return "the engine's log-probabilities of probe tokens are not finite"
        gap, largest = rms(self.now.gap), float(np.abs(self.drift).max())
        if gap > LEVEL_LIMIT * self.noise:
            return (
                f"the root mean square difference of their log-probabilities of probe tokens is {gap:.3g}, and was "
                f"{rms(self.start.gap):.3g} at the start"
            )
        if largest > TOKEN_LIMIT * self.token_noise:
            return f"the difference of their log-probabilities of a probe token has changed by {largest:.3g}"
        return ""


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
    start: ProbeScores | None = None  # before training, of the main rank's engine
    last: np.ndarray | None = None  # the trainer's scores at the last verification
    lag: dict[str, MissedChange] = field(default_factory=dict)  # by server: of changes since the verification before
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
        by_server = engine_scores(self.engine, self.sequences)
        scores = {name: ProbeScores(trainer, engine, rounding) for name, engine in by_server.items()}
        if version == 0 or self.start is None:
            raise_together(self._start_problem(scores), version, self.mesh)
            first = self.mesh.broadcast_object(next(iter(by_server.values())))
            self.start, self.last, self.lag = ProbeScores(trainer, first, rounding), None, {}
        compared = {name: Comparison(self.start, one, self._floor) for name, one in scores.items()}
        problems = (self._problem(name, one) for name, one in compared.items())
        raise_together(next(filter(None, problems), ""), version, self.mesh)
        self.last = trainer
        worst = max(compared.values(), key=lambda one: rms(one.now.gap))
        return {
            "sync/probe_gap": rms(worst.now.gap),
            "sync/probe_limit": LEVEL_LIMIT * worst.noise,
            "sync/probe_change": rms(worst.change),
        }

    @property
    def _engine_kind(self) -> str:
        return f"{type(self.engine).__name__}, {self.engine.info.dtype}"

    @property
    def _precision(self) -> torch.dtype:
        """Of the less precise side."""
        return min(self.engine.info.dtype, self.updater.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def _floor(self) -> float:
        return FLOORS.get(self._precision, FLOOR)

    def _trainer_scores(self) -> tuple[np.ndarray, float]:
        """Scores with the weights that the engine must have, and the effect of rounding them once more."""
        rounding = torch.finfo(self._precision).eps / 4  # about the root mean square of rounding errors
        applied = max(rounding, PERTURBATION, torch.finfo(scoring_dtype(self.updater)).eps)  # less is rounded away
        with as_served(self.updater.policy, self.engine.info.dtype) as weights:
            exact = trainer_scores(self.updater, self.sequences)
            reshard(self.updater.policy)
            perturb(weights, applied)
            return exact, rms(trainer_scores(self.updater, self.sequences) - exact) * rounding / applied

    def _start_problem(self, scores: Mapping[str, ProbeScores]) -> str:
        for name, one in scores.items():
            limit = max(START_LIMIT * one.rounding, START_FLOOR)
            if not rms(one.gap) <= limit:  # also if it is not a number
                text = (
                    f"the root mean square difference of their log-probabilities of probe tokens is {rms(one.gap):.3g}"
                    f", of which rounding explains at most {limit:.3g}"
                )
                return self._with_token(name, text, one)
        return ""

    def _problem(self, server: str, compared: Comparison) -> str:
        """What shows that a server has other weights. Adds its drift to the sums over versions."""
        assert self.start is not None
        text = compared.problem()
        least = NOISY * compared.now.rounding if scoring_dtype(self.updater).itemsize < 4 else 0.0
        if not text and rms(compared.drift) > self._floor and rms(compared.change) > least:
            missed = MissedChange.of(compared.change, compared.drift, self._clusters)
            if missed.certain:
                text = f"the engine misses {missed.share:.0%} of the change of log-probabilities since the start"
        change = compared.now.trainer - (compared.now.trainer if self.last is None else self.last)
        if not text and rms(change) > least:
            latest = MissedChange.of(change, compared.drift, self._clusters)
            self.lag[server] = self.lag[server] * KEPT + latest if server in self.lag else latest
            if self.lag[server].certain and rms(compared.drift) > self._floor:
                text = (
                    f"the engine misses {self.lag[server].share:.0%} of the latest changes of log-probabilities: it "
                    "serves an earlier version"
                )
        return self._with_token(server, text, compared.now, compared.start) if text else ""

    @property
    def _clusters(self) -> np.ndarray:
        """Where clusters of tokens begin; a long sequence has several."""
        starts, begin = list[int](), 0
        for ids in self.sequences:
            starts += range(begin, begin + len(ids) - 1, LENGTH - 1)
            begin += len(ids) - 1
        return np.array(starts)

    def _with_token(self, server: str, text: str, now: ProbeScores, start: ProbeScores | None = None) -> str:
        """A problem, with the token that shows it best."""
        drift = np.abs(now.gap - start.gap if start else now.gap)
        at = int(np.argmax(np.where(np.isfinite(drift), drift, np.inf)))
        sequence, position = 0, at + 1
        while position >= len(self.sequences[sequence]):
            position -= len(self.sequences[sequence]) - 1
            sequence += 1
        before = f" (at the start: {start.engine[at]:.4f} and {start.trainer[at]:.4f})" if start else ""
        return (
            f"{f'{server}: ' if server else ''}{text}; most at token {position} (id "
            f"{self.sequences[sequence][position]}) of probe sequence {sequence}: {now.engine[at]:.4f} in the engine, "
            f"{now.trainer[at]:.4f} in the trainer{before}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Empty unless there is a probe. JSON keeps all digits."""
        if self.start is None or self.last is None:
            return {}
        lag = {name: [one.products.tolist(), one.squares.tolist()] for name, one in self.lag.items()}
        start = [self.start.trainer.tolist(), self.start.engine.tolist(), self.start.rounding]
        rest = {"sequences": self.sequences, "start": start, "last": self.last.tolist(), "lag": lag}
        return {"engine": self._engine_kind} | rest

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Scores of another kind of engine are not used: the next verification is then the first one."""
        if self.method == "probe" and saved.get("engine") == self._engine_kind:
            trainer, engine, rounding = saved["start"]
            self.sequences, self.last = saved["sequences"], np.array(saved["last"])
            self.start = ProbeScores(np.array(trainer), np.array(engine), rounding)
            self.lag = {name: MissedChange(*map(np.array, sums)) for name, sums in saved["lag"].items()}


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
