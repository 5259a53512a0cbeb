"""References for completions whose weights changed while they were sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from engine_parts import small_decoder
from native_parts import SPECS, drawable, transformers_model
from torch import Tensor

from assay.engine import NativeEngine, Request
from assay.engine.sampler import noise_keys, signed, uniform
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec
from assay.types import Completion

SPEC = SPECS["llama"]


@cache
def decoder(seed: int, dtype: torch.dtype = torch.float64, spec: ModelSpec = SPEC) -> Decoder:
    """Weights version `seed` of the tests; not to be changed."""
    return small_decoder(spec, seed).to(dtype)


@cache
def transformers_decoder(seed: int, spec: ModelSpec = SPEC) -> Any:
    """The same weights in transformers, in float64 but for its rotary angles."""
    return transformers_model(spec, small_decoder(spec, seed)).double()


def token_versions(completion: Completion) -> list[int]:
    """The weights version of each token."""
    return [version for version, count in completion.versions for _ in range(count)]


def assert_spans(completion: Completion) -> None:
    """Versions ascend, and every span has tokens."""
    versions, counts = zip(*completion.versions, strict=True)
    assert list(versions) == sorted(set(versions)) and all(counts)
    assert sum(counts) == len(completion.token_ids)
    assert completion.version == versions[0] == completion.oldest_version


@torch.no_grad()
def trainer_logits(models: Mapping[int, Decoder], prompt: Sequence[int], completion: Completion) -> Tensor:
    """For each token, the logits of its version's trainer after the full context: KV caches are recomputed."""
    ids = torch.tensor([*prompt, *completion.token_ids])
    versions = token_versions(completion)
    by_version = {v: models[v].unembed(models[v].hidden(ids, [len(ids)])) for v in set(versions)}
    start = len(prompt) - 1
    return torch.stack([by_version[v][start + place] for place, v in enumerate(versions)])


class MixedReference:
    """One sequence in transformers, whose keys and values come from whichever version each token was fed to."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        from transformers import DynamicCache

        self.spec = spec
        self.cache: Any = DynamicCache()

    @torch.no_grad()
    def feed(self, tokens: Sequence[int], version: int) -> Tensor:
        """Logits [V] after the last of these tokens, which follow those fed before."""
        model = transformers_decoder(version, self.spec)
        return model(torch.tensor([list(tokens)]), past_key_values=self.cache, use_cache=True).logits[0, -1]

    def sample(self, prompt: Sequence[int], completion: Completion) -> Tensor:
        """Logits for each token: the prompt is fed to the first token's version, token i to that of token i + 1."""
        versions = token_versions(completion)
        logits = [self.feed(prompt, versions[0])]
        for token, version in zip(completion.token_ids[:-1], versions[1:], strict=True):
            logits.append(self.feed([token], version))
        return torch.stack(logits)


def kept_logits(
    prompt: Sequence[int], completion: Completion, restarts: Sequence[int] = (0,), spec: ModelSpec = SPEC
) -> Tensor:
    """Logits for each token with kept KV. At the tokens `restarts` all tokens before are computed by one version."""
    versions, tokens = token_versions(completion), completion.token_ids
    logits: list[Tensor] = []
    for place, version in enumerate(versions):
        if place in restarts:
            reference = MixedReference(spec)
            logits.append(reference.feed([*prompt, *tokens[:place]], version))
        else:
            logits.append(reference.feed([tokens[place - 1]], version))
    return torch.stack(logits)


@torch.no_grad()
def assert_same_up_to_ties(
    model: Decoder, request: Request, sample: int, ours: Sequence[int], theirs: Sequence[int], tolerance: float
) -> None:
    """Two results for one sample: identical, or a first divergence where an error of `tolerance` decides.

    `model` is in float64; the error is in logits for greedy decoding, in cumulative probabilities for sampling.
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), None)
    if place is None:
        assert len(ours) == len(theirs)
        return
    params, ids = request.params, torch.tensor([*request.prompt_ids, *ours[:place]])
    logits = model.unembed(model.hidden(ids, [len(ids)]))[-1]
    pair = [ours[place], theirs[place]]
    if params.temperature == 0:
        assert logits.max() - logits[pair].min() < tolerance, f"token {place} of sample {sample}"
        return
    probs = (logits / params.temperature).softmax(-1).tolist()
    kept = drawable(probs, place, params)
    mass = sum(probs[token] for token in kept)
    # Both tokens have to lie next to the noise, and so has everything between them.
    low, high = sorted(pair)
    start, end = (sum(probs[token] for token in kept if token <= last) / mass for last in (low, high - 1))
    key = noise_keys(torch.tensor([signed(request.seed)]), torch.tensor([sample]))
    noise = float(uniform(key, torch.tensor([place])))
    assert start - tolerance < noise < end + tolerance and end - start < tolerance, f"token {place} of sample {sample}"


class Entries:
    """Notes when samples start to run, and start again after a preemption: tokens that they had by then."""

    def __init__(self, engine: NativeEngine) -> None:
        self.counts: dict[tuple[int, int], list[int]] = defaultdict(list)
        enter = engine.rows.enter

        def noting(samples: Any) -> None:
            for sample in samples:
                self.counts[sample.job.id, sample.index].append(len(sample.drawn))
            enter(samples)

        engine.rows.enter = noting  # type: ignore[method-assign]


class Weights:
    """A source of weights that can fail on the way."""

    def __init__(self, model: Decoder, *, fail_after: int | None = None, rename: int | None = None) -> None:
        self.model, self.fail_after, self.rename = model, fail_after, rename

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for place, (name, weight) in enumerate(self.model.weights()):
            if place == self.fail_after:
                raise ConnectionError("the sender is gone")
            yield ("no.such.weight" if place == self.rename else name), weight


def groups_of(
    requests: Sequence[Request], completions: Mapping[tuple[int, int], Completion], ids: Sequence[int]
) -> Any:
    """(request, key, completion) of each sample."""
    for request, request_id in zip(requests, ids, strict=True):
        for sample in range(request.params.n):
            yield request, (request_id, sample), completions[request_id, sample]
