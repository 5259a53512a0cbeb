"""Checks of an engine backend for its author: does it keep the promises of `assay.engine.base.Engine`?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import Engine, Event, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.engine.outputs import Decode
from assay.models.base import PolicyModel
from assay.models.fingerprint import fingerprint
from assay.types import Completion, Finish, UserError

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
HOT = SamplingParams(temperature=8.0, max_new_tokens=8)  # nearly uniform, whatever the model
WARM = SamplingParams(temperature=0.7, max_new_tokens=8)
MAX_STEPS = 100_000
UNKNOWN = 1 << 40  # neither the id of a request nor a handle


class Violation(Exception):
    """A promise that the engine did not keep."""


def require(kept: bool, problem: str) -> None:
    if not kept:
        raise Violation(problem)


@dataclass
class Served:
    """What the events of requests said, by request id and sample. No event may follow the last one of a sample."""

    completions: dict[int, dict[int, Completion]] = field(default_factory=lambda: defaultdict(dict))
    chunks: dict[tuple[int, int], list[TokenChunk]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[int, str] = field(default_factory=dict)

    def record(self, event: Event) -> None:
        known = event.request_id
        require(known not in self.errors, f"request {known}: an event follows a Failed event")
        if isinstance(event, Failed):
            self.errors[known] = event.error
            return
        require(event.sample not in self.completions[known], f"request {known}: an event follows a Finished event")
        if isinstance(event, TokenChunk):
            self.chunks[known, event.sample].append(event)
        else:
            require(isinstance(event, Finished), f"step returned {event!r:.60}, which is no event")
            self.completions[known][event.sample] = event.completion


@dataclass
class Probe:
    """An engine under test, and what the checks know of it."""

    engine: Engine
    prompt: list[int]
    policy: PolicyModel | None
    decode: Decode | None

    @property
    def tolerance(self) -> float:
        """Of log-probabilities, which depend on the shapes of batches in their last bits."""
        return 1e-3 if self.engine.info.dtype in (torch.float32, torch.float64) else 0.1

    def request(self, params: SamplingParams = GREEDY, seed: int = 0, **changes: Any) -> Request:
        return replace(Request(self.prompt, params, seed), **changes)

    def serve(self, *requests: Request) -> list[list[Completion]]:
        """Completions of requests that must not fail, in order."""
        served, ids = self.step_to_end(requests)
        require(not served.errors, f"a valid request failed: {next(iter(served.errors.values()), '')}")
        return [[served.completions[one][sample] for sample in sorted(served.completions[one])] for one in ids]

    def tokens(self, *requests: Request) -> list[list[list[int]]]:
        return [[completion.token_ids for completion in group] for group in self.serve(*requests)]

    def step_to_end(self, requests: Sequence[Request], wait: bool = True) -> tuple[Served, list[int]]:
        """Add requests and step until all are finished; everything that they yield is checked."""
        served, ids = Served(), [self.engine.add(request) for request in requests]
        require(len(set(ids)) == len(ids), "add returned the id of an unfinished request")
        self.step(served, {one: request.params.n for one, request in zip(ids, requests, strict=True)}, wait)
        for one, request in zip(ids, requests, strict=True):
            for completion in served.completions[one].values():
                self.check_completion(completion, request)
        require(self.engine.step() == [], "step returned events although all requests were finished")
        return served, ids

    def step(self, served: Served, samples: dict[int, int], wait: bool = True) -> None:
        """Step until each request has yielded all of its samples, or has failed."""
        for _ in range(MAX_STEPS):
            if all(one in served.errors or len(served.completions[one]) == n for one, n in samples.items()):
                break
            events = self.engine.step(wait)
            require(bool(events) or not wait, "step(wait=True) returned nothing although a request was unfinished")
            for event in events:
                require(event.request_id in samples, f"an event of request {event.request_id}, which is not running")
                served.record(event)
        else:
            raise Violation(f"requests are unfinished after {MAX_STEPS:,} steps")
        for one, n in samples.items():
            expected = [] if one in served.errors else [*range(n)]
            require(
                one in served.errors or sorted(served.completions[one]) == expected,
                f"{n} samples were requested and {sorted(served.completions[one])} finished",
            )

    def check_completion(self, completion: Completion, request: Request) -> None:
        count, info = len(completion.token_ids), self.engine.info
        limit = min(request.params.max_new_tokens, info.max_length - len(request.prompt_ids))
        engine, sampling = completion.engine_logprobs, completion.sampling_logprobs
        require(count >= 1, "a completion has no tokens")
        require(count <= limit or request.continues is not None, f"a completion has {count} tokens, more than {limit}")
        require(len(engine) == len(sampling) == count, "a completion has not one log-probability per token")
        require(
            all(math.isfinite(value) and value <= self.tolerance for value in (*engine, *sampling)),
            "a log-probability is above 0 or not finite",
        )
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


def check_engine(
    engine: Engine, prompt_ids: Sequence[int], policy: PolicyModel | None = None, decode: Decode | None = None
) -> list[str]:
    """Use an engine in every way that the interface allows; return what is wrong, one line each, or an empty list.

    `prompt_ids`: a prompt of some tokens. `policy`: the model whose weights the engine serves; without it, weight
    updates and fingerprints are not checked, nor log-probabilities against the trainer's. `decode`: the function that
    the engine was built with; without it, stop strings are not checked. Capabilities that the engine does not claim are
    not checked. Tokens are compared exactly, so the engine should compute in float32 or float64. It is not closed.
    """
    return list(problems(Probe(engine, list(prompt_ids), policy, decode)))


def problems(probe: Probe) -> Iterator[str]:
    for check in CHECKS:
        try:
            check(probe)
        except Violation as violation:
            yield f"{title(check)}: {violation}"
        except Exception as error:
            yield f"{title(check)}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        try:
            abandon(probe.engine)
        except Exception as error:
            yield f"{title(check)}: the engine cannot be used any more ({type(error).__name__}): other checks left out"
            return


def title(check: Callable[[Probe], None]) -> str:
    return check.__name__.replace("_", " ")


def abandon(engine: Engine) -> None:
    """Finish what a check has left running."""
    for _ in range(MAX_STEPS):
        events = engine.step()
        if not events:
            return
        engine.abort([event.request_id for event in events])
    raise Violation("step never returns an empty list")


def requests_and_samples(probe: Probe) -> None:
    requests = [probe.request(), probe.request(replace(HOT, n=3), seed=1), probe.request(replace(WARM, n=2), seed=2)]
    probe.step_to_end(requests)
    probe.step_to_end(requests, wait=False)
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
    served, ids = probe.step_to_end([valid, *invalid.values(), valid])
    for what, one in zip(invalid, ids[1:-1], strict=True):
        require(one in served.errors, f"{what} yields no Failed event")
        require("\n" not in served.errors[one].strip(), f"the error of {what} has several lines")
    for one in (ids[0], ids[-1]):
        require(one not in served.errors, "a valid request failed beside invalid ones")
        tokens = [completion.token_ids for completion in served.completions[one].values()]
        require(tokens == expected, "invalid requests change the result of a valid one")


def lengths(probe: Probe) -> None:
    room = min(3, probe.engine.info.max_length - 1)
    prompt = (probe.prompt * probe.engine.info.max_length)[: probe.engine.info.max_length - room]
    long = probe.request(replace(GREEDY, max_new_tokens=100), prompt_ids=prompt)
    ((completion,),) = probe.serve(long)
    require(
        len(completion.token_ids) == room and completion.finish is Finish.LENGTH,
        f"a prompt of max_length - {room} tokens got {len(completion.token_ids)} more, finish '{completion.finish}'",
    )


def stop_and_forbidden_tokens(probe: Probe) -> None:
    ((ids,),) = probe.tokens(probe.request())
    stop = ids[3]
    ((completion,),) = probe.serve(probe.request(replace(GREEDY, stop_token_ids=(stop,))))
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
        return  # the last token has no text of its own
    ((completion,),) = probe.serve(probe.request(replace(GREEDY, stop=(stop,))))
    text, before = probe.decode(completion.token_ids), probe.decode(completion.token_ids[:-1])
    kept = completion.token_ids == ids[: len(completion.token_ids)] and stop in text and stop not in before
    require(kept, "a completion does not end with the token that completes a stop string")
    require(completion.finish is Finish.STOP, f"after a stop string, finish is '{completion.finish}'")


def sampling(probe: Probe) -> None:
    greedy = probe.tokens(probe.request(), probe.request(replace(GREEDY, n=2), seed=5))
    require(len({tuple(ids) for group in greedy for ids in group}) == 1, "greedy samples differ")
    ((one,),) = probe.tokens(probe.request(replace(HOT, top_k=1)))
    require(one == greedy[0][0], "top_k = 1 does not give the greedy tokens")
    hot = probe.tokens(probe.request(replace(HOT, n=4)), probe.request(replace(HOT, n=4), seed=1))
    require(all(len({tuple(ids) for ids in group}) > 1 for group in hot), "all samples of a request are equal")
    require(hot[0] != hot[1], "requests with different seeds have equal samples")


def exact_seeds(probe: Probe) -> None:
    if not probe.engine.info.capabilities.exact_seeds:
        return
    requests = [probe.request(replace(HOT, n=2), seed=1), probe.request(replace(WARM, n=3), seed=2), probe.request(HOT)]
    together = probe.tokens(*requests)
    require(probe.tokens(*requests) == together, "the same seeds give other tokens the second time")
    alone = [probe.tokens(request)[0] for request in reversed(requests)]
    require(alone[::-1] == together, "a sample depends on the other requests")
    first = probe.request(replace(HOT, n=1), seed=1)
    require(probe.tokens(first)[0] == together[0][:1], "sample 0 depends on the number of samples")


def log_probabilities(probe: Probe) -> None:
    able = probe.engine.info.capabilities
    if not able.temperature_logprobs:
        return
    for params in (GREEDY, HOT, replace(WARM, top_k=3)):
        ((completion,),) = probe.serve(probe.request(params, seed=3))
        found, temperature = torch.tensor(completion.engine_logprobs), params.temperature or 1.0
        above = torch.tensor(completion.sampling_logprobs) - found
        require(bool((above > -probe.tolerance).all()), "truncation makes a sampled token less likely")
        if able.score:
            (scored,) = probe.engine.score([[*probe.prompt, *completion.token_ids]], temperature)
            require(
                len(scored) == len(probe.prompt) + len(completion.token_ids) - 1,
                "score does not return one number for every token but the first",
            )
            own = torch.tensor(scored[len(probe.prompt) - 1 :])
            require(close(found, own, probe), f"engine_logprobs and score differ at temperature {temperature:g}")
        if probe.policy is not None:
            ids = torch.tensor(completion.token_ids)[:, None]
            trainer = probe.distributions(completion, temperature).gather(1, ids)[:, 0]
            require(
                close(found, trainer, probe), f"engine_logprobs are not the policy's at temperature {temperature:g}"
            )


def close(ours: Tensor, theirs: Tensor, probe: Probe) -> bool:
    return bool((ours.double() - theirs.double()).abs().max() <= probe.tolerance)


def entropy_and_kept_mass(probe: Probe) -> None:
    able = probe.engine.info.capabilities
    ((free,), (truncated,)) = probe.serve(probe.request(HOT), probe.request(replace(HOT, top_k=2)))
    for completion in (free, truncated) if able.entropy else ():
        require(completion.entropy > 0, "the entropy of a sampled completion is not positive")
        if probe.policy is not None:
            logprobs = probe.distributions(completion, HOT.temperature)
            expected = -float((logprobs.exp() * logprobs).sum(-1).mean())
            require(abs(completion.entropy - expected) <= probe.tolerance, "entropy is not that of the policy")
    if able.kept_mass:
        require(abs(free.kept_mass - 1.0) <= probe.tolerance, "kept_mass is not 1 without truncation")
        require(truncated.kept_mass < 1.0, "kept_mass is not below 1 with top_k = 2")
        if probe.policy is not None:
            mass = float(probe.distributions(truncated, HOT.temperature).exp().topk(2, dim=-1).values.sum(-1).mean())
            require(abs(truncated.kept_mass - mass) <= probe.tolerance, "kept_mass is not that of the policy")


def streaming(probe: Probe) -> None:
    params = replace(HOT, n=2, max_new_tokens=12)
    served, (quiet, streamed) = probe.step_to_end([probe.request(params), probe.request(params, stream=True)])
    require(all(key[0] == streamed for key in served.chunks), "a request without stream yields chunks")
    require(quiet in served.completions, "a request without stream did not finish")
    for sample, completion in served.completions[streamed].items():
        chunks = served.chunks[streamed, sample]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        require(ids == completion.token_ids, "the chunks of a sample are not its completion")
        require(len(logprobs) == len(ids), "a chunk has not one log-probability per token")
        require(
            close(torch.tensor(logprobs), torch.tensor(completion.engine_logprobs), probe),
            "log-probabilities of chunks are not those of the completion",
        )


def abort(probe: Probe) -> None:
    engine, long = probe.engine, replace(HOT, n=2, max_new_tokens=24)
    before, partly, kept = (engine.add(probe.request(long, seed=seed)) for seed in range(3))
    engine.abort([before, (partly, 0), UNKNOWN, (UNKNOWN, 0), (kept, 7)])
    engine.abort([before])
    served = Served()
    finish(probe, served, {(partly, 1), (kept, 0), (kept, 1)})
    running, other = (engine.add(probe.request(long, seed=seed, stream=True)) for seed in range(2))
    served = Served()
    for event in engine.step():
        served.record(event)
    engine.abort([running])
    after = Served(completions=defaultdict(dict, {other: served.completions[other]}))
    finish(probe, after, {(other, 0), (other, 1)})


def finish(probe: Probe, served: Served, expected: set[tuple[int, int]]) -> None:
    """Step to the end; nothing but these samples may finish, or have chunks."""
    for _ in range(MAX_STEPS):
        events = probe.engine.step()
        for event in events:
            served.record(event)
        if not events:
            break
    found = {(one, sample) for one, group in served.completions.items() for sample in group}
    require(not served.errors, "a request failed beside aborted ones")
    require(found | set(served.chunks) <= expected, "an event follows the abort of its sample")
    require(found == expected, "an abort drops samples that it does not name")


def handles(probe: Probe) -> None:
    if not probe.engine.info.capabilities.handles:
        return
    first, second = probe.serve(probe.request(replace(HOT, n=2), keep=True))[0]
    require(None not in (first.handle, second.handle), "a completion of a request with keep has no handle")
    require(first.handle != second.handle, "two kept completions have the same handle")
    more = probe.prompt[:2]
    again = probe.request(prompt_ids=more, continues=first.handle)
    whole = probe.request(prompt_ids=[*probe.prompt, *first.token_ids, *more])
    require(probe.tokens(again) == probe.tokens(whole), "a continuation differs from the same tokens sent as a prompt")
    probe.engine.release([second.handle or 0, UNKNOWN])
    served, ids = probe.step_to_end([again, probe.request(prompt_ids=more, continues=second.handle)])
    require(ids[0] in served.errors, "a handle can be continued twice")
    require(ids[1] in served.errors, "a handle can be continued after its release")


class Scaled:
    """The weights of a policy, multiplied."""

    def __init__(self, policy: PolicyModel, factor: float) -> None:
        self.policy, self.factor = policy, factor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.detach() * self.factor) for name, weight in self.policy.weights())


def weight_updates(probe: Probe) -> None:
    if probe.policy is None:
        return
    engine, version = probe.engine, probe.engine.info.version
    ((before,),) = probe.serve(probe.request())
    engine.update_weights(Scaled(probe.policy, 1.5), version + 1)
    require(engine.info.version == version + 1, "info.version is not that of the last update")
    ((other,),) = probe.serve(probe.request())
    engine.update_weights(probe.policy, version + 2)
    ((after,),) = probe.serve(probe.request())
    same = len(other.engine_logprobs) == len(before.engine_logprobs) and close(
        torch.tensor(other.engine_logprobs), torch.tensor(before.engine_logprobs), probe
    )
    require(not same, "other weights do not change log-probabilities: update_weights, or a cached prefix, is stale")
    require(after.token_ids == before.token_ids, "the first weights again do not give the first tokens again")


def updates_while_requests_run(probe: Probe) -> None:
    if probe.policy is None:
        return
    engine, version = probe.engine, probe.engine.info.version
    request = probe.request(replace(HOT, n=3, max_new_tokens=24))
    expected = probe.tokens(request)[0]
    served, running = Served(), engine.add(request)
    for event in engine.step(wait=False):
        served.record(event)
    try:
        engine.update_weights(probe.policy, version + 1)
        refused = False
    except UserError:
        refused = True
    able = engine.info.capabilities.inflight_updates
    require(not (able and refused), "weights cannot be updated while a request is running")
    require(able or refused, "update_weights while a request is running is not refused with a UserError")
    probe.step(served, {running: 3})
    tokens = [served.completions[running][sample].token_ids for sample in range(3)]
    if engine.info.capabilities.exact_seeds:
        require(tokens == expected, "an update with the same weights changes running sequences")


def fingerprints(probe: Probe) -> None:
    engine, claimed = probe.engine, probe.engine.info.capabilities.fingerprint
    served = engine.fingerprint()
    require((served is not None) == claimed, f"fingerprint() is {served!r:.40}, and the capability is {claimed}")
    if probe.policy is None or not claimed:
        return
    require(served == fingerprint(probe.policy.weights(), engine.info.dtype), "the fingerprint is not the policy's")
    engine.update_weights(Scaled(probe.policy, 1.5), engine.info.version + 1)
    changed = engine.fingerprint()
    engine.update_weights(probe.policy, engine.info.version + 1)
    require(changed != served, "the fingerprint of other weights is the same")


def sleep_and_cache(probe: Probe) -> None:
    engine, expected = probe.engine, probe.tokens(probe.request())
    engine.sleep()
    require(probe.tokens(probe.request()) == expected, "requests that wake the engine have other tokens")
    engine.sleep()
    engine.wake()
    engine.reset_prefix_cache()
    require(probe.tokens(probe.request()) == expected, "tokens change after sleep, wake and reset_prefix_cache")


def calls_from_another_thread(probe: Probe) -> None:
    engine, served = probe.engine, Served()
    samples = {engine.add(probe.request(replace(HOT, max_new_tokens=24))): 1}

    def call() -> None:
        added = [engine.add(probe.request(HOT, seed=seed)) for seed in range(4)]
        engine.abort([added[0]])
        engine.release([UNKNOWN])
        samples.update(dict.fromkeys(added[1:], 1))

    thread = Thread(target=call)
    thread.start()
    events = [*engine.step(wait=False)]
    thread.join(timeout=60)
    require(not thread.is_alive(), "add, abort or release from another thread does not return")
    for event in events:
        served.record(event)
    finished = {one for one, group in served.completions.items() if group} - set(samples)
    probe.step(served, samples | dict.fromkeys(finished, 1))


CHECKS: tuple[Callable[[Probe], None], ...] = (
    *(requests_and_samples, invalid_requests, lengths, stop_and_forbidden_tokens, stop_strings, sampling, exact_seeds),
    *(log_probabilities, entropy_and_kept_mass, streaming, abort, handles, weight_updates, updates_while_requests_run),
    *(fingerprints, sleep_and_cache, calls_from_another_thread),
)
