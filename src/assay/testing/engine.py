"""Checks for authors of engine backends: does an engine satisfy the interface `assay.engine.base.Engine`?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import Decode, Engine, Event, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.models.base import PolicyModel, digests, fingerprint
from assay.types import Completion, Finish, UserError, describe_error

__all__ = ["check_engine"]

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
HOTTEST = 8.0  # temperature: nearly uniform for any model
WARM = SamplingParams(temperature=0.7, max_new_tokens=8)
MAX_STEPS = 100_000
UNKNOWN = 1 << 40  # neither the id of a request nor a handle


class Violation(Exception):
    """The engine does not satisfy the interface."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise Violation(problem)


@dataclass
class Record:
    """Events of requests, by request id and sample. No event may follow the last one of a request or sample."""

    completions: dict[int, dict[int, Completion]] = field(default_factory=lambda: defaultdict(dict))
    chunks: dict[tuple[int, int], list[TokenChunk]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[int, str] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            request_id = event.request_id
            require(request_id not in self.errors, f"request {request_id}: an event follows a Failed event")
            if isinstance(event, Failed):
                self.errors[request_id] = event.error
                continue
            finished = self.completions[request_id]
            require(event.sample not in finished, f"request {request_id}: an event follows a Finished event")
            if isinstance(event, TokenChunk):
                self.chunks[request_id, event.sample].append(event)
            else:
                require(isinstance(event, Finished), f"step returned {event!r:.60}, which is not an event")
                finished[event.sample] = event.completion

    def group(self, request_id: int) -> list[Completion]:
        """Finished samples of a request, in order."""
        return [completion for _, completion in sorted(self.completions[request_id].items())]

    def tokens(self, request_id: int) -> list[list[int]]:
        return [completion.token_ids for completion in self.group(request_id)]


@dataclass
class Probe:
    """An engine under test, with a prompt and, optionally, the policy and the decode function that belong to it."""

    engine: Engine
    prompt: list[int]
    policy: PolicyModel | None
    decode: Decode | None
    hottest: float = HOTTEST

    @property
    def hot(self) -> SamplingParams:
        return SamplingParams(temperature=self.hottest, max_new_tokens=8)

    @property
    def tolerance(self) -> float:
        """For log-probabilities, whose last bits depend on the shapes of batches."""
        return 1e-3 if self.engine.info.dtype in (torch.float32, torch.float64) else 0.1

    def close(self, ours: Tensor | Sequence[float], theirs: Tensor | Sequence[float]) -> bool:
        x, y = (torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs))
        return x.shape == y.shape and bool((x - y).abs().max() <= self.tolerance)

    def request(self, params: SamplingParams = GREEDY, seed: int = 0, **changes: Any) -> Request:
        return replace(Request(self.prompt, params, seed), **changes)

    def serve(self, *requests: Request) -> list[list[Completion]]:
        """Completions of requests that must not fail, in order."""
        record, ids = self.run(requests)
        require(not record.errors, f"a valid request failed: {next(iter(record.errors.values()), '')}")
        return [record.group(request_id) for request_id in ids]

    def serve_one(self, request: Request) -> Completion:
        ((completion,),) = self.serve(request)
        return completion

    def tokens(self, *requests: Request) -> list[list[list[int]]]:
        return [[completion.token_ids for completion in group] for group in self.serve(*requests)]

    def run(self, requests: Sequence[Request], wait: bool = True) -> tuple[Record, list[int]]:
        """Add requests and step until all are finished; check all their events."""
        record, ids = Record(), [self.engine.add(request) for request in requests]
        require(len(set(ids)) == len(ids), "add returned the id of an unfinished request")
        self.step(record, dict(zip(ids, (request.params.n for request in requests), strict=True)), wait)
        for request_id, request in zip(ids, requests, strict=True):
            for completion in record.completions[request_id].values():
                self.check_completion(completion, request)
        require(self.engine.step() == [], "step returned events although all requests were finished")
        return record, ids

    def step(self, record: Record, samples: dict[int, int], wait: bool = True) -> None:
        """Step until each request has yielded all its samples or has failed."""
        for _ in range(MAX_STEPS):
            if all(key in record.errors or len(record.completions[key]) == n for key, n in samples.items()):
                break
            events = self.engine.step(wait)
            require(bool(events) or not wait, "step(wait=True) returned nothing although a request was unfinished")
            for event in events:
                require(event.request_id in samples, f"an event of request {event.request_id}, which is not running")
            record.add(events)
        else:
            raise Violation(f"requests are unfinished after {MAX_STEPS:,} steps")
        for request_id, n in samples.items():
            finished = sorted(record.completions[request_id])
            complete = request_id in record.errors or finished == [*range(n)]
            require(complete, f"{n} samples were requested and {finished} finished")

    def step_to_end(self, abort: bool = False) -> Record:
        """Step until there are no more events. With `abort`, abort all requests that yield one."""
        record = Record()
        for _ in range(MAX_STEPS):
            events = self.engine.step()
            if not events:
                return record
            if abort:
                self.engine.abort([event.request_id for event in events])
            else:
                record.add(events)
        raise Violation("step never returns an empty list")

    def check_completion(self, completion: Completion, request: Request) -> None:
        count, info = len(completion.token_ids), self.engine.info
        limit = min(request.params.max_new_tokens, info.max_length - len(request.prompt_ids))
        engine, sampling = completion.engine_logprobs, completion.sampling_logprobs
        require(count >= 1, "a completion has no tokens")
        require(count <= limit or request.continues is not None, f"a completion has {count} tokens, more than {limit}")
        require(len(engine) == len(sampling) == count, "a completion has not one log-probability per token")
        valid = all(math.isfinite(value) and value <= self.tolerance for value in (*engine, *sampling))
        require(valid, "a log-probability is above 0 or not finite")
        require(sum(tokens for _, tokens in completion.versions) == count, "version spans do not cover all tokens")
        require(completion.versions[-1][0] == info.version, f"the version of new tokens is not {info.version}")
        if completion.finish is Finish.LENGTH and request.continues is None:
            require(count == limit, f"finish is 'length' after {count} of {limit} tokens")

    def distributions(self, completion: Completion, temperature: float) -> Tensor:
        """Log-probabilities [tokens, vocabulary] of the policy at each token of a completion of the prompt."""
        assert self.policy is not None
        ids = [*self.prompt, *completion.token_ids]
        with torch.no_grad():
            hidden = self.policy.hidden(torch.tensor(ids, device=self.policy.device), [len(ids)])
            logits = self.policy.unembed(hidden[len(self.prompt) - 1 : -1]).double()
        return (logits / (temperature or 1.0)).log_softmax(-1).cpu()


Check = Callable[[Probe], None]


def check_engine(
    engine: Engine,
    prompt_ids: Sequence[int],
    policy: PolicyModel | None = None,
    decode: Decode | None = None,
    hottest: float = HOTTEST,
) -> list[str]:
    """Use an engine in every way that the interface allows; return the problems, one line each.

    `prompt_ids`: a prompt of some tokens. `policy`: the model whose weights the engine serves; without it, weight
    updates, fingerprints and the equality of log-probabilities with the trainer's are not checked. `decode`: the
    function that the engine was built with; without it, stop strings are not checked. Capabilities that the engine does
    not declare are not checked. `hottest`: the highest temperature, at which samples must differ. Tokens are compared
    exactly, so the engine should compute in float32 or float64. The engine is not closed.
    """
    return list(problems(Probe(engine, list(prompt_ids), policy, decode, hottest), CHECKS))


def problems(probe: Probe, checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        title = check.__name__.replace("_", " ")
        try:
            check(probe)
        except Violation as violation:
            yield f"{title}: {violation}"
        except Exception as error:
            yield f"{title}: {describe_error(error)}"
        try:
            probe.step_to_end(abort=True)  # the check may have left requests running
        except Exception as error:
            yield f"{title}: the engine is unusable now ({type(error).__name__}); the remaining checks are skipped"
            return


def requests_and_samples(probe: Probe) -> None:
    requests = [
        probe.request(),
        probe.request(replace(probe.hot, n=3), seed=1),
        probe.request(replace(WARM, n=2), seed=2),
    ]
    probe.run(requests)
    probe.run(requests, wait=False)
    require(probe.engine.step(wait=False) == [], "step(wait=False) returned events although there was no request")


def invalid_requests(probe: Probe) -> None:
    valid = probe.request()
    invalid = {
        "an empty prompt": replace(valid, prompt_ids=[]),
        "a prompt as long as max_length": replace(valid, prompt_ids=probe.prompt[:1] * probe.engine.info.max_length),
        "n = 0": replace(valid, params=replace(GREEDY, n=0)),
        "a negative temperature": replace(valid, params=replace(GREEDY, temperature=-1.0)),
        "an unknown handle": replace(valid, continues=UNKNOWN),
    }
    expected = probe.tokens(valid)[0]
    record, ids = probe.run([valid, *invalid.values(), valid])
    for what, request_id in zip(invalid, ids[1:-1], strict=True):
        require(request_id in record.errors, f"{what} yields no Failed event")
        require("\n" not in record.errors[request_id].strip(), f"the error of {what} has several lines")
    for request_id in (ids[0], ids[-1]):
        require(request_id not in record.errors, "a valid request fails together with invalid ones")
        require(record.tokens(request_id) == expected, "invalid requests change the result of a valid one")


def lengths(probe: Probe) -> None:
    max_length = probe.engine.info.max_length
    left = min(3, max_length - 1)
    prompt = (probe.prompt * max_length)[: max_length - left]
    completion = probe.serve_one(probe.request(replace(GREEDY, max_new_tokens=100), prompt_ids=prompt))
    count, finish = len(completion.token_ids), completion.finish
    problem = f"the completion of a prompt of max_length - {left} tokens has {count} tokens and finish '{finish}'"
    require(count == left and finish is Finish.LENGTH, problem)


def stop_and_forbidden_tokens(probe: Probe) -> None:
    ((ids,),) = probe.tokens(probe.request())
    stop = ids[3]
    completion = probe.serve_one(probe.request(replace(GREEDY, stop_token_ids=(stop,))))
    expected = ids[: ids.index(stop) + 1]
    require(completion.token_ids == expected, "a completion does not end with the first stop token")
    require(completion.finish is Finish.STOP, f"after a stop token, finish is '{completion.finish}'")
    ((late,),) = probe.tokens(probe.request(replace(GREEDY, stop_token_ids=(ids[0],), min_new_tokens=3)))
    require(ids[0] not in late[:3], "a stop token is sampled before min_new_tokens")
    ((other,),) = probe.tokens(probe.request(replace(GREEDY, forbidden_token_ids=(ids[0],))))
    require(ids[0] not in other, "a forbidden token is sampled")


def stop_strings(probe: Probe) -> None:
    if probe.decode is None:
        return
    ((ids,),) = probe.tokens(probe.request())
    stop = probe.decode(ids[:4])[-1:]
    if not stop.strip():
        return  # the token has no visible text
    completion = probe.serve_one(probe.request(replace(GREEDY, stop=(stop,))))
    text, before = probe.decode(completion.token_ids), probe.decode(completion.token_ids[:-1])
    ends = completion.token_ids == ids[: len(completion.token_ids)] and stop in text and stop not in before
    require(ends, "a completion does not end with the token that completes a stop string")
    require(completion.finish is Finish.STOP, f"after a stop string, finish is '{completion.finish}'")


def sampling(probe: Probe) -> None:
    greedy = probe.tokens(probe.request(), probe.request(replace(GREEDY, n=2), seed=5))
    require(len({tuple(ids) for group in greedy for ids in group}) == 1, "greedy samples differ")
    ((ids,),) = probe.tokens(probe.request(replace(probe.hot, top_k=1)))
    require(ids == greedy[0][0], "top_k = 1 does not give the greedy tokens")
    hot = probe.tokens(probe.request(replace(probe.hot, n=4)), probe.request(replace(probe.hot, n=4), seed=1))
    require(all(len({tuple(ids) for ids in group}) > 1 for group in hot), "all samples of a request are equal")
    require(hot[0] != hot[1], "requests with different seeds have equal samples")


def exact_seeds(probe: Probe) -> None:
    if not probe.engine.info.capabilities.exact_seeds:
        return
    requests = [
        probe.request(replace(probe.hot, n=2), seed=1),
        probe.request(replace(WARM, n=3), seed=2),
        probe.request(probe.hot),
    ]
    together = probe.tokens(*requests)
    require(probe.tokens(*requests) == together, "the same seeds give different tokens the second time")
    alone = [probe.tokens(request)[0] for request in reversed(requests)]
    require(alone[::-1] == together, "a sample depends on the other requests")
    first = probe.request(replace(probe.hot, n=1), seed=1)
    require(probe.tokens(first)[0] == together[0][:1], "sample 0 depends on the number of samples")


def scores_of(probe: Probe, completion: Completion, temperature: float) -> list[float] | None:
    """Scores of a completion of the prompt; None if the engine refuses a temperature other than 1."""
    try:
        (scores,) = probe.engine.score([[*probe.prompt, *completion.token_ids]], temperature)
    except UserError:
        require(temperature != 1.0, "score fails at temperature 1")
        return None
    return scores


def log_probabilities(probe: Probe) -> None:
    capabilities, start = probe.engine.info.capabilities, len(probe.prompt) - 1
    if not capabilities.temperature_logprobs:
        return
    for params in (GREEDY, probe.hot, WARM, replace(WARM, top_k=3)):
        if params.truncates and not capabilities.truncated_logprobs:
            continue
        completion = probe.serve_one(probe.request(params, seed=3))
        logprobs, temperature = torch.tensor(completion.engine_logprobs), params.temperature or 1.0
        gain = torch.tensor(completion.sampling_logprobs) - logprobs
        require(bool((gain > -probe.tolerance).all()), "truncation makes a sampled token less likely")
        if capabilities.score and (scores := scores_of(probe, completion, temperature)) is not None:
            complete = len(scores) == start + len(completion.token_ids)
            require(complete, "score does not return one number for every token but the first")
            equal = probe.close(logprobs, scores[start:])
            require(equal, f"engine_logprobs and score differ at temperature {temperature:g}")
        if probe.policy is not None:
            ids = torch.tensor(completion.token_ids)[:, None]
            equal = probe.close(logprobs, probe.distributions(completion, temperature).gather(1, ids)[:, 0])
            require(equal, f"engine_logprobs are not the policy's at temperature {temperature:g}")


def reported(completion: Completion, name: str) -> float:
    value: float | None = getattr(completion, name)
    require(value is not None, f"capabilities include {name}, but a completion does not report it")
    assert value is not None
    return value


def entropy_and_kept_mass(probe: Probe) -> None:
    capabilities = probe.engine.info.capabilities
    ((free,), (truncated,)) = probe.serve(probe.request(probe.hot), probe.request(replace(probe.hot, top_k=2)))
    for completion in (free, truncated) if capabilities.entropy else ():
        entropy = reported(completion, "entropy")
        require(entropy > 0, "the entropy of a sampled completion is not positive")
        if probe.policy is not None:
            logprobs = probe.distributions(completion, probe.hot.temperature)
            expected = -float((logprobs.exp() * logprobs).sum(-1).mean())
            require(abs(entropy - expected) <= probe.tolerance, "entropy is not the entropy of the policy")
    if capabilities.kept_mass:
        kept_mass = reported(truncated, "kept_mass")
        require(abs(reported(free, "kept_mass") - 1.0) <= probe.tolerance, "kept_mass is not 1 without truncation")
        require(kept_mass < 1.0, "kept_mass is not below 1 with top_k = 2")
        if probe.policy is not None:
            mass = float(
                probe.distributions(truncated, probe.hot.temperature).exp().topk(2, dim=-1).values.sum(-1).mean()
            )
            require(abs(kept_mass - mass) <= probe.tolerance, "kept_mass is not the policy's kept mass")


def streaming(probe: Probe) -> None:
    params = replace(probe.hot, n=2, max_new_tokens=12)
    record, (silent, streamed) = probe.run([probe.request(params), probe.request(params, stream=True)])
    require(all(key[0] == streamed for key in record.chunks), "a request without stream yields chunks")
    require(silent in record.completions, "a request without stream did not finish")
    for sample, completion in record.completions[streamed].items():
        chunks = record.chunks[streamed, sample]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        require(ids == completion.token_ids, "the chunks of a sample are not its completion")
        require(len(logprobs) == len(ids), "a chunk has not one log-probability per token")
        equal = probe.close(logprobs, completion.engine_logprobs)
        require(equal, "log-probabilities of chunks differ from the completion")


def abort(probe: Probe) -> None:
    engine, long = probe.engine, replace(probe.hot, n=2, max_new_tokens=24)
    whole, partly, other = (engine.add(probe.request(long, seed=seed)) for seed in range(3))
    engine.abort([whole, (partly, 0), UNKNOWN, (UNKNOWN, 0), (other, 7)])
    engine.abort([whole])
    check_aborted(probe.step_to_end(), {(partly, 1), (other, 0), (other, 1)})
    running, other = (engine.add(probe.request(long, seed=seed, stream=True)) for seed in range(2))
    before = Record()
    before.add(engine.step())
    engine.abort([running])
    after = probe.step_to_end()
    after.completions[other].update(before.completions[other])
    check_aborted(after, {(other, 0), (other, 1)})


def check_aborted(record: Record, expected: set[tuple[int, int]]) -> None:
    """Only the expected samples may have finished or have chunks."""
    finished = {(request_id, sample) for request_id, group in record.completions.items() for sample in group}
    require(not record.errors, "a request failed while others were aborted")
    require(finished | set(record.chunks) <= expected, "an event follows the abort of its sample")
    require(finished == expected, "an abort drops samples that it does not name")


def handles(probe: Probe) -> None:
    if not probe.engine.info.capabilities.handles:
        return
    first, second = probe.serve(probe.request(replace(probe.hot, n=2), keep=True))[0]
    require(None not in (first.handle, second.handle), "a completion of a request with keep has no handle")
    require(first.handle != second.handle, "two kept completions have the same handle")
    more = probe.prompt[:2]
    again = probe.request(prompt_ids=more, continues=first.handle)
    whole = probe.request(prompt_ids=[*probe.prompt, *first.token_ids, *more])
    require(probe.tokens(again) == probe.tokens(whole), "a continuation differs from the same tokens sent as a prompt")
    probe.engine.release([second.handle or 0, UNKNOWN])
    record, ids = probe.run([again, probe.request(prompt_ids=more, continues=second.handle)])
    require(ids[0] in record.errors, "a handle can be continued twice")
    require(ids[1] in record.errors, "a handle can be continued after its release")


@dataclass(frozen=True)
class ScaledWeights:
    """The weights of a policy, multiplied by 1.5."""

    policy: PolicyModel

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.detach() * 1.5) for name, weight in self.policy.weights())


def weight_updates(probe: Probe) -> None:
    if probe.policy is None:
        return
    engine, version = probe.engine, probe.engine.info.version
    before = probe.serve_one(probe.request())
    engine.update_weights(ScaledWeights(probe.policy), version + 1)
    require(engine.info.version == version + 1, "info.version is not that of the last update")
    other = probe.serve_one(probe.request())
    engine.update_weights(probe.policy, version + 2)
    after = probe.serve_one(probe.request())
    same = probe.close(other.engine_logprobs, before.engine_logprobs)
    require(not same, "other weights do not change log-probabilities: weights or cached prefixes are stale")
    require(after.token_ids == before.token_ids, "the original weights do not restore the original tokens")


def updates_while_requests_run(probe: Probe) -> None:
    if probe.policy is None:
        return
    engine, version = probe.engine, probe.engine.info.version
    request = probe.request(replace(probe.hot, n=3, max_new_tokens=24))
    expected = probe.tokens(request)[0]
    record, running = Record(), engine.add(request)
    record.add(engine.step(wait=False))
    try:
        engine.update_weights(probe.policy, version + 1)
        refused = False
    except UserError:
        refused = True
    supported = engine.info.capabilities.inflight_updates
    require(not (supported and refused), "weights cannot be updated while a request is running")
    require(supported or refused, "update_weights while a request is running is not refused with a UserError")
    probe.step(record, {running: 3})
    if engine.info.capabilities.exact_seeds:
        require(record.tokens(running) == expected, "an update with the same weights changes running sequences")


def fingerprints(probe: Probe) -> None:
    engine, declared = probe.engine, probe.engine.info.capabilities.fingerprint
    served = engine.fingerprint()
    require((served is not None) == declared, f"fingerprint() is {served!r:.40}, and the capability is {declared}")
    if probe.policy is None or not declared:
        return
    require(served == fingerprint(probe.policy.weights(), engine.info.dtype), "the fingerprint is not the policy's")
    equal = engine.digests() in (None, digests(probe.policy.weights(), engine.info.dtype))
    require(equal, "digests() returns other weights than the policy's")
    engine.update_weights(ScaledWeights(probe.policy), engine.info.version + 1)
    changed = engine.fingerprint()
    engine.update_weights(probe.policy, engine.info.version + 1)
    require(changed != served, "the fingerprint of other weights is the same")


def sleep_and_cache(probe: Probe) -> None:
    engine, expected = probe.engine, probe.tokens(probe.request())
    engine.sleep()
    require(probe.tokens(probe.request()) == expected, "requests that wake the engine have different tokens")
    engine.sleep()
    engine.wake()
    engine.reset_prefix_cache()
    require(probe.tokens(probe.request()) == expected, "tokens change after sleep, wake and reset_prefix_cache")


def load_of_an_idle_engine(probe: Probe) -> None:
    probe.serve(probe.request())
    load = probe.engine.load
    require(load.running == load.waiting == 0, f"load counts requests although all are finished: {load}")


def scores_of_each_server(probe: Probe) -> None:
    if probe.engine.info.capabilities.score:
        sequences = [[*probe.prompt, *probe.prompt[:1]]]
        (expected,) = probe.engine.score(sequences)
        for name, (scores,) in probe.engine.score_each(sequences).items():
            require(probe.close(scores, expected), f"score_each of the server '{name}' differs from score")


def calls_from_another_thread(probe: Probe) -> None:
    engine, record = probe.engine, Record()
    samples = {engine.add(probe.request(replace(probe.hot, max_new_tokens=24))): 1}

    def call() -> None:
        added = [engine.add(probe.request(probe.hot, seed=seed)) for seed in range(4)]
        engine.abort([added[0]])
        engine.release([UNKNOWN])
        samples.update(dict.fromkeys(added[1:], 1))

    thread = Thread(target=call)
    thread.start()
    record.add(engine.step(wait=False))
    thread.join(timeout=60)
    require(not thread.is_alive(), "add, abort or release from another thread does not return")
    finished_first = {request_id for request_id, group in record.completions.items() if group} - set(samples)
    probe.step(record, samples | dict.fromkeys(finished_first, 1))


CHECKS: tuple[Check, ...] = (
    *(requests_and_samples, invalid_requests, lengths, stop_and_forbidden_tokens, stop_strings, sampling, exact_seeds),
    *(log_probabilities, entropy_and_kept_mass, streaming, abort, handles, weight_updates, updates_while_requests_run),
    *(fingerprints, sleep_and_cache, load_of_an_idle_engine, scores_of_each_server, calls_from_another_thread),
)
