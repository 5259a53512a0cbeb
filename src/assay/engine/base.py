"""The engine interface: add requests, step the engine, receive events with tokens and log-probabilities."""

from __future__ import annotations

import gc
from abc import abstractmethod
from asyncio import Future
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from assay.types import Completion, UserError, plural

if TYPE_CHECKING:
    from assay.models.parallel import TPShard

Decode = Callable[[Sequence[int]], str]  # token ids to text
UNKNOWN_LENGTH = 2**40  # `EngineInfo.max_length` of an engine that does not know the length of its context
CPU = torch.device("cpu")
KvOnUpdate = Literal["recompute", "keep"]
MAX_BATCH = {"cpu": 256, "cuda": 1024}  # default number of sequences that are decoded concurrently


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection: generation creates many objects without cycles, and a collection stalls the GPU."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    n: int = 1  # samples per request
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # minimum probability, as a fraction of the probability of the most likely token; 0: off
    max_new_tokens: int = 256
    min_new_tokens: int = 0  # stop tokens are not sampled before this number of tokens
    stop_token_ids: tuple[int, ...] = ()  # the stop token is the last token of the completion
    stop: tuple[str, ...] = ()  # stop strings; the token that completes one is the last token of the completion
    forbidden_token_ids: tuple[int, ...] = ()  # never sampled

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p exclude tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def problem(self) -> str:
        """The first invalid value, in one line; empty if all are valid."""
        checks = [
            (self.n >= 1, f"samples must be at least 1, not {self.n}"),
            (self.temperature >= 0, f"temperature must be 0 (greedy) or more, not {self.temperature}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1 (off), not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 (off) and 1, not {self.min_p}"),
            (self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}"),
            (self.min_new_tokens >= 0, f"min_new_tokens must be 0 or more, not {self.min_new_tokens}"),
            ("" not in self.stop, "a stop string is empty; remove it"),
        ]
        return next((problem for valid, problem in checks if not valid), "")


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: Sequence[int]  # of a continuation: the tokens to append to the kept sequence
    params: SamplingParams
    seed: int  # 64-bit; sampling noise is a function of (seed, sample index, position) alone
    name: str = ""  # used in error messages, e.g. the id of the prompt
    keep: bool = False  # keep the KV cache of finished sequences, which can then be continued by their handles
    continues: int | None = None  # handle of a kept completion; a handle can be continued once
    stream: bool = False  # also yield `TokenChunk` events


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sample of a streaming request."""

    request_id: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]  # as `Completion.engine_logprobs`


@dataclass(frozen=True, slots=True)
class Finished:
    """One sample of a request is complete."""

    request_id: int
    sample: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be served. It is the request's last event; its other samples are aborted."""

    request_id: int
    error: str  # one line


Event = TokenChunk | Finished | Failed


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine backend supports."""

    exact_seeds: bool = False  # a sample depends on its request's seed and tokens only, not on other requests
    temperature_logprobs: bool = False  # `engine_logprobs` are at the sampling temperature, before truncation
    truncated_logprobs: bool = True  # and this also holds for requests with top_k, top_p, min_p or min_new_tokens
    entropy: bool = False  # completions report the entropy of the sampling distribution
    kept_mass: bool = False  # completions report the probability mass left by truncation
    handles: bool = False  # `Request.keep` and `Request.continues`; otherwise the whole sequence is sent again
    inflight_updates: bool = False  # `update_weights` while requests are running
    score: bool = False  # log-probabilities of given tokens, at temperature 1 at least
    fingerprint: bool = False  # of the served weights


ALL_CAPABILITIES = Capabilities(**dict.fromkeys(Capabilities.__dataclass_fields__, True))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    version: int  # of the served weights; -1: none yet
    max_length: int  # maximum number of tokens of prompt and completion together
    max_batch: int  # maximum number of sequences decoded concurrently
    dtype: torch.dtype  # of the served weights
    capabilities: Capabilities
    vocab_size: int = 0  # 0: unknown
    device: torch.device = CPU  # that the weights are on, if they are in this process
    quantize: str = ""  # how weights are stored, see `EngineOptions`


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is working on."""

    running: int  # sequences that are being decoded
    waiting: int  # requests that wait for memory or a free row
    kv_blocks_used: int = 0  # blocks of the KV cache that requests hold
    kv_blocks: int = 0  # blocks of the KV cache; 0: the engine has none
    preemptions: int = 0


@dataclass(kw_only=True)
class EngineOptions:
    """Options of all engines. An engine may ignore those after `group`."""

    device: torch.device | str
    dtype: torch.dtype  # of the served weights
    max_batch: int = 0  # maximum number of sequences decoded concurrently; 0: chosen by the kind of device
    max_length: int | None = None  # maximum number of tokens of prompt and completion; None: the model's limit
    decode: Decode | None = None  # for stop strings
    group: dist.ProcessGroup | None = None  # the ranks that serve one model together
    kv_cache_gib: float = 0.0  # GiB of KV cache; 0: as much as is useful and free
    prefill_tokens: int = 0  # prompt tokens computed between two windows of decoding steps; 0: chosen by the engine
    sleep_while_training: bool = False  # `sleep` releases the memory of the KV cache (CUDA)
    # The KV cache of running sequences after a weight update. "recompute": it is computed again with the new weights;
    # "keep": it is kept, and only new tokens use the new weights.
    kv_on_update: KvOnUpdate = "recompute"
    quantize: str = ""  # "fp8": products of layers in 8 bits (`assay.models.fp8`); "fp8_head": also of the output head
    kv_cache_dtype: str = "auto"  # "fp8": keys and values are stored in 8 bits
    notify: Callable[[str], None] | None = None  # gets lines for the user, e.g. about failed servers, from any thread

    def __post_init__(self) -> None:
        self.max_batch = self.max_batch or MAX_BATCH.get(torch.device(self.device).type, MAX_BATCH["cpu"])
        if self.max_batch < 1:
            raise UserError(f"max_batch must be at least 1, not {self.max_batch}")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The tokens of a sequence from some position on, compared with all tokens of the vocabulary."""

    logprobs: list[float]
    ranks: list[int]  # 1: the most likely token
    top: list[list[tuple[int, float]]]  # the most likely tokens at each position, with their log-probabilities

    def part(self, start: int, stop: int | None = None) -> TokenScores:
        return TokenScores(self.logprobs[start:stop], self.ranks[start:stop], self.top[start:stop])


class WeightSource(Protocol):
    """Source of weights for `update_weights`, such as a policy in the same process."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every weight once, as (Hugging Face name, full tensor)."""


@torch.inference_mode(False)  # a source may do more than read tensors, e.g. gather shards
@torch.no_grad()
def copy_weights(
    targets: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], shard: TPShard | None = None
) -> None:
    """Copy each weight to the target of the same name, cast to its dtype; names and shapes must match exactly.

    With `shard`, the targets are this rank's slices, and `weights` yields full weights.
    """
    missing = set(targets)
    for name, weight in weights:
        target = targets.get(name)
        if target is None:
            raise UserError(f"the engine's model has no weight '{name}': is this another model's checkpoint?")
        shape = target.shape if shard is None else shard.full_shape(name, target)
        if shape != weight.shape:
            raise UserError(f"weight '{name}' has shape {tuple(weight.shape)}, the engine's model has {tuple(shape)}")
        target.copy_(weight if shard is None else shard.take(name, weight))
        missing.discard(name)
    if missing:
        raise UserError(f"weight '{min(missing)}' was not given to the engine ({len(missing)} missing in all)")


class BaseEngine(Protocol):
    """Interface of all engines: in this process (`Engine`), and on servers (`assay.engine.client.ServerEngine`).

    Requests go through a client (`assay.engine.client.connect`). These methods may be called from any thread.
    """

    info: EngineInfo
    recover_s: float = 0.0  # how long training waits for a server after all have failed
    on_tokens: Callable[[int], None] | None = None  # called between two iterations of `step`; see `SampleCounter`

    @abstractmethod
    def update_weights(self, source: WeightSource, version: int) -> None:
        """Copy new weights into the engine; cached prefixes of earlier weights are not used any more.

        Returns when all weights are copied. Engines without `inflight_updates` raise a `UserError` while requests are
        running. If the source raises, the version does not change, but some weights may be new: update again.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """For each sequence, the log-probability of every token but the first, given the tokens before it."""
        raise UserError("this engine does not compute log-probabilities of given tokens (capability score)")

    def score_each(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """`score` of each server, by URL. An engine without servers has one entry, whose name is empty."""
        return {"": self.score(sequences)}

    def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Scores of the tokens of each sequence from position `starts[i]` (at least 1) on, and of the `count` most
        likely tokens there."""
        raise UserError("this engine reports no likely tokens: leave out echo, prompt_logprobs and top_logprobs")

    def fingerprint(self) -> str | None:
        """Digest of the served weights, over canonical names in the engine's dtype; None if not supported."""
        return None

    def digests(self) -> dict[str, str] | None:
        """Digest of each served weight by its canonical name (`assay.models.base.digests`); None if not supported."""
        return None

    def sleep(self) -> None:
        """Release memory that only generation needs. No request may be running."""
        return

    def wake(self) -> None:
        """Allocate that memory again. A `step` with requests does it automatically."""
        return

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes, so that later results do not depend on earlier requests."""
        return

    @property
    def load(self) -> EngineLoad:
        """May be read at any time, also during a step."""
        return EngineLoad(running=0, waiting=0)

    @property
    def lost(self) -> bool:
        """Whether all servers of the engine have failed, and may come back."""
        return False

    def server_metrics(self) -> dict[str, float]:
        """Metrics of the servers, which a training run logs at each step; empty if there are none."""
        return {}


class Engine(BaseEngine, Protocol):
    """Base class of engines in this process. A backend need not implement the methods that have a default.

    One thread calls `step`. Other methods may be called from any thread and take effect between two steps.
    """

    @abstractmethod
    def add(self, request: Request) -> int:
        """Queue a request and return its id, without waiting. An invalid request yields a `Failed` event."""

    @abstractmethod
    def step(self, wait: bool = True) -> list[Event]:
        """Advance all requests and return new events.

        With `wait`, return as soon as there is an event; the list is empty only if there is no unfinished request.
        Without, return after one iteration, with or without events.
        """

    @abstractmethod
    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        """Drop requests, or single samples given as (request id, sample). No event follows for them.

        Ids of finished or unknown requests are ignored.
        """

    def release(self, handles: Iterable[int]) -> None:
        """Free kept sequences that will not be continued. Unknown handles are ignored."""
        return


class RequestError(UserError):
    """Some requests of a call to `generate` failed; all others were served."""

    def __init__(self, errors: dict[int, str]) -> None:
        more = f" ({plural(len(errors) - 1, 'more request')} failed)" if len(errors) > 1 else ""
        super().__init__(errors[min(errors)] + more)
        self.errors = errors  # by the request's index

    def __reduce__(self) -> tuple[Any, ...]:  # for other ranks: `args` has the text
        return type(self), (self.errors,)


CountReport = Callable[[int, int], None]  # number of finished samples, number of sampled tokens


class SampleCounter:
    """Counts finished samples and sampled tokens, and reports both, also while no sample finishes.

    Engines in this process call `on_tokens` between two iterations of `step` with their number of sampled tokens. The
    tokens of other engines are counted when their samples finish.
    """

    def __init__(self, report: CountReport | None) -> None:
        self.report = report
        self.finished = self.tokens = 0
        self._finished_tokens = 0
        self._first: int | None = None  # tokens that the engine had sampled before

    @contextmanager
    def watching(self, engine: BaseEngine) -> Iterator[None]:
        """Receive the token counts of `engine` until the block ends."""
        if self.report is not None:
            engine.on_tokens = self._on_tokens
        try:
            yield
        finally:
            if self.report is not None:
                engine.on_tokens = None

    def add(self, completion: Completion, finished: int = 1) -> None:
        """Count a completion; `finished`: 0 for a turn that does not end its sample."""
        self.finished += finished
        self._finished_tokens += completion.length
        self.tokens = max(self.tokens, self._finished_tokens)

    def add_future(self, future: Future[Completion]) -> None:
        """Count the completion of a future that is done, unless it was cancelled or has failed."""
        if not future.cancelled() and not future.exception():
            self.add(future.result())

    def show(self) -> None:
        if self.report is not None:
            self.report(self.finished, self.tokens)

    def _on_tokens(self, sampled: int) -> None:
        if self._first is None:
            self._first = sampled
        self.tokens = max(self.tokens, sampled - self._first)
        self.show()
