"""Native engines in all the ways they can run, and what they have to write, shared by their tests."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from engine_parts import UNUSUAL_SPECS, assert_same_tokens, logits_after, small_decoder, small_spec
from torch import Tensor

from assay.engine import Engine, Event, Finished, NativeEngine, Request, SamplingParams, TokenChunk, make_engine
from assay.engine.base import Decode
from assay.engine.native.kv_cache import GIB
from assay.engine.sampler import noise_keys, signed, uniform
from assay.engine.sequence import BLOCK_SIZE
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec, spec_to_hf
from assay.types import Completion

LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 32}
SPECS = {
    "llama": small_spec("llama", layers=2, out_bias=True, qkv_bias=True, mlp_bias=True, kv_heads=4),
    "llama3-rope": small_spec("llama", layers=2, rope_scaling=tuple(sorted(LLAMA3.items()))),
    "qwen2": small_spec("qwen2", layers=2, kv_heads=1),
    "qwen3": small_spec("qwen3", layers=2, head_dim=12),
    **UNUSUAL_SPECS,
}


@functools.cache
def model_of(name: str) -> Decoder:
    return small_decoder(SPECS[name], seed=21)


@dataclass(frozen=True)
class Mode:
    """A way of running that must not change what is written."""

    max_batch: int = 256
    prefill_tokens: int = 0
    window: int = 1
    ahead: int = 0  # 1: results are looked at one window late, as on a GPU
    cache: int = 0  # tokens that the cache has room for; 0: enough

    @property
    def blocks(self) -> int:
        return -(-self.cache // BLOCK_SIZE)


MODES = {
    "plain": Mode(),
    "few rows": Mode(max_batch=3),
    "chunks": Mode(prefill_tokens=5),
    "windows": Mode(max_batch=7, window=4, ahead=1),
    "small cache": Mode(max_batch=8, cache=112),
    "all at once": Mode(max_batch=6, prefill_tokens=7, window=3, ahead=1, cache=112),
}


def memory_of(spec: ModelSpec, blocks: int, dtype: torch.dtype = torch.float32) -> float:
    """GiB that hold so many blocks of the cache, and no more."""
    return blocks * spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * BLOCK_SIZE / GIB


def engine_for(
    model: Decoder,
    mode: Mode = MODES["plain"],
    *,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    decode: Decode | None = None,
    group: dist.ProcessGroup | None = None,
) -> NativeEngine:
    kv_cache_gib = memory_of(model.spec, mode.blocks, dtype) / (group.size() if group else 1)
    limits = {"max_batch": mode.max_batch, "max_length": max_length, "prefill_tokens": mode.prefill_tokens}
    options = {"kv_cache_gib": kv_cache_gib, "decode": decode, "group": group, **limits}
    engine = make_engine("native", model, device="cpu", dtype=dtype, **options)
    assert isinstance(engine, NativeEngine)
    assert mode.blocks in (0, engine.blocks.total)
    engine.runner.window = mode.window
    engine.runner.ahead = mode.ahead
    return engine


def transformers_model(spec: ModelSpec, model: Decoder) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = spec_to_hf(spec) | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).eval()
    hf.load_state_dict(dict(model.state_dict()))
    return hf


def mixed_prompts(vocabulary: int = 61, seed: int = 0) -> list[list[int]]:
    """Long and short, some that begin alike, two that are the same, and some that just fill their blocks."""
    assert 16 % BLOCK_SIZE == 0
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return draw.choices(range(vocabulary), k=count)

    system = ids(21)
    alike = [system + ids(5), system + ids(12), system[:16] + ids(9), system, list(system)]
    return [ids(draw.randint(1, 12)) for _ in range(6)] + alike + [ids(16), ids(32)]


def requests_for(prompts: Sequence[Sequence[int]], params: SamplingParams, keep: bool = False) -> list[Request]:
    return [Request(prompt, params, seed=1000 + i, name=f"p{i}", keep=keep) for i, prompt in enumerate(prompts)]


def mixed_requests(params: SamplingParams, seed: int = 0) -> list[Request]:
    """Every second one stops only at its limit, so that small caches overflow whatever the weights."""
    requests = requests_for(mixed_prompts(seed=seed), params)
    long = replace(params, stop_token_ids=())
    return [replace(request, params=(long, params)[i % 2]) for i, request in enumerate(requests)]


def served(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[Completion]], dict[int, str]]:
    """Completions and errors by index."""
    consumer = Consumer(engine)
    consumer.run(requests)
    failed = consumer.errors
    return [[] if index in failed else group for index, group in enumerate(consumer.groups())], failed


class Weights:
    """A source of weights from pairs of names and tensors."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self.pairs = pairs

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.pairs


@dataclass
class Consumer:
    """Adds requests and reads events, one step at a time. Requests are numbered in the order they are added."""

    engine: Engine
    on_token: Callable[[int, int, int], None] | None = None  # (request, sample, token): makes all requests stream
    on_finish: Callable[[int, int, Completion], None] | None = None
    more: Callable[[bool], Sequence[Request]] | None = None  # (engine idle?) -> requests, asked before every step
    ids: dict[int, int] = field(default_factory=dict)  # number by request id
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # that were streamed
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    finished: dict[tuple[int, int], Completion] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # unfinished samples, by number

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            number = len(self.ids)
            self.left[number] = max(request.params.n, 1)
            self.ids[self.engine.add(replace(request, stream=request.stream or self.on_token is not None))] = number

    def run(self, requests: Sequence[Request] = ()) -> None:
        """To the end; an exception aborts all requests."""
        try:
            self.add(requests)
            while True:
                if self.more is not None:
                    self.add(self.more(not self.left))
                if not self.left:
                    return
                events = self.engine.step(wait=self.more is None)
                assert events or self.more is not None
                for event in events:
                    self.take(event)
        except BaseException:
            self.engine.abort(self.ids)
            raise

    def take(self, event: Event) -> None:
        number = self.ids[event.request_id]
        assert number in self.left, "an event after the last one"
        if isinstance(event, TokenChunk):
            assert event.token_ids and (number, event.sample) not in self.finished
            self.tokens.setdefault((number, event.sample), []).extend(event.token_ids)
            self.logprobs.setdefault((number, event.sample), []).extend(event.logprobs)
            for token in event.token_ids:
                assert self.on_token is not None
                self.on_token(number, event.sample, token)
            return
        if isinstance(event, Finished):
            assert (number, event.sample) not in self.finished
            self.finished[number, event.sample] = event.completion
            if self.on_finish is not None:
                self.on_finish(number, event.sample, event.completion)
            self.left[number] -= 1
        else:
            self.errors[number], self.left[number] = event.error, 0
        if not self.left[number]:
            del self.left[number]

    def groups(self) -> list[list[Completion]]:
        """Completions of each request, by sample."""
        groups: list[list[Completion]] = [[] for _ in self.ids]
        for (number, _), completion in sorted(self.finished.items(), key=lambda item: item[0]):
            groups[number].append(completion)
        return groups


def tokens_of(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def words(ids: Sequence[int]) -> str:
    """Text with one letter for a token."""
    return "".join(chr(97 + i) for i in ids)


def idle(engine: NativeEngine) -> bool:
    """Whether nothing is left of what ran: no row, no block, nothing under way."""
    return not (engine.scheduler.unfinished or engine.blocks.in_use or engine.in_flight or engine.scheduler.pending)


def drawable(probs: Sequence[float], place: int, params: SamplingParams) -> list[int]:
    """Of the allowed the top k, of these the fewest that hold p of their mass, and of these the ones at least min_p
    times as likely as the likeliest."""
    early = params.stop_token_ids if place < params.min_new_tokens else ()
    allowed = set(range(len(probs))) - set(params.forbidden_token_ids) - set(early)
    ranked = sorted(allowed, key=lambda token: (-probs[token], token))[: params.top_k or None]
    total, held, kept = sum(probs[token] for token in ranked), 0.0, []
    for token in ranked:
        if held >= params.top_p * total and params.top_p < 1:
            break
        kept.append(token)
        held += probs[token]
    return [token for token in kept if probs[token] >= params.min_p * probs[ranked[0]]]


def assert_same_draws(
    model: PolicyModel, request: Request, ours: Sequence[Completion], theirs: Sequence[Completion]
) -> None:
    """Samples of one request by two engines: identical, or a first divergence where no more than rounding decides."""
    prompt, params = request.prompt_ids, request.params
    for sample, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is None or params.temperature == 0:
            assert_same_tokens(model, prompt, a.token_ids, b.token_ids)
            assert place is not None or a.finish is b.finish
            continue
        logits = logits_after(model, [*prompt, *a.token_ids[:place]])[-1].double()
        probs = (logits / params.temperature).softmax(-1).tolist()
        kept = drawable(probs, place, params)
        lower = min(a.token_ids[place], b.token_ids[place])
        border = sum(probs[token] for token in kept if token <= lower) / sum(probs[token] for token in kept)
        key = noise_keys(torch.tensor([signed(request.seed)]), torch.tensor([sample]))
        assert abs(float(uniform(key, torch.tensor([place]))) - border) < 1e-5, f"token {place} of sample {sample}"


def assert_same_groups(
    model: PolicyModel,
    requests: Sequence[Request],
    ours: Sequence[Sequence[Completion]],
    theirs: Sequence[Sequence[Completion]],
) -> None:
    for request, group, others in zip(requests, ours, theirs, strict=True):
        assert_same_draws(model, request, group, others)


def assert_scores(model: PolicyModel, prompt: Sequence[int], completion: Completion, params: SamplingParams) -> None:
    """By brute force, from the trainer's logits."""
    logits = logits_after(model, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    assert_scores_of(logits, completion, params, 1e-4)


def assert_scores_of(logits: Tensor, completion: Completion, params: SamplingParams, tolerance: float) -> None:
    """Log-probabilities, kept mass and entropy are those of the logits [tokens, V]; greedy tokens are the best."""
    logprobs = (logits.double() / (params.temperature or 1.0)).log_softmax(-1)
    engine, sampling, masses = [], [], []
    for place, (row, token) in enumerate(zip(logprobs, completion.token_ids, strict=True)):
        kept = drawable(row.exp().tolist(), place, params)
        assert token in kept
        if params.temperature == 0:
            assert row[token] > row[kept].max() - 10 * tolerance
            kept = [token]
        mass = sum(math.exp(row[one]) for one in kept)
        engine.append(float(row[token]))
        sampling.append(float(row[token]) - math.log(mass))
        masses.append(1.0 if params.temperature == 0 else mass)
    wide = torch.float64
    for ours, theirs in ((completion.engine_logprobs, engine), (completion.sampling_logprobs, sampling)):
        gap = (torch.tensor(ours, dtype=wide) - torch.tensor(theirs, dtype=wide)).abs()
        assert gap.max() < tolerance, f"token {int(gap.argmax())} of {len(gap)}: {gap.tolist()}"
    entropy = float(-(logprobs.exp() * logprobs).sum(-1).mean())
    assert abs(completion.kept_mass - sum(masses) / len(masses)) < tolerance
    assert abs(completion.entropy - entropy) < tolerance
