"""Ask the engine, decode, have the answers judged."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from assay.engine.base import Engine, OnToken, Request, SamplingParams
from assay.rewards import JudgePool, check_verdicts
from assay.text import Renderer
from assay.types import Completion, Group, Prompt, Rollout, Turn, UserError


def request_seed(run_seed: int, step: int, prompt_id: str, turn: int = 0) -> int:
    """64 bits that depend on these four and nothing else: a sample can be drawn again alone, later, in any batch."""
    key = f"{run_seed}|{step}|{prompt_id}|{turn}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


@dataclass
class Collector:
    """Everything it takes to turn prompts into judged answers."""

    engine: Engine
    renderer: Renderer
    judge: JudgePool
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went, until somebody clears it

    def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: tuple[int, int],
        on_token: OnToken | None = None,
        seen: Counter[str] | None = None,
    ) -> list[Group]:
        """`params.n` judged answers to each prompt; `seed` is (run seed, step).

        A prompt that comes again within a step gets noise of its own; `seen` carries the count over several calls.
        """
        seen = Counter() if seen is None else seen
        params = replace(
            params,
            stop_token_ids=(*params.stop_token_ids, *self.renderer.stop_token_ids),
            stop=(*params.stop, *self.renderer.stop),
        )
        started = time.perf_counter()
        contexts = [self.renderer.prompt_ids(prompt) for prompt in prompts]
        self.check_lengths(prompts, contexts)
        requests = []
        for prompt, ids in zip(prompts, contexts, strict=True):
            again = f"#{seen[prompt.id]}" if seen[prompt.id] else ""
            requests.append(Request(ids, params, request_seed(*seed, prompt.id + again), name=prompt.id))
            seen[prompt.id] += 1
        answers = self.engine.generate(requests, on_token)
        groups = [
            Group(prompt, [self._rollout(prompt, i, ids, completion) for i, completion in enumerate(completions)])
            for prompt, ids, completions in zip(prompts, contexts, answers, strict=True)
        ]
        generated = time.perf_counter()
        self._judge([rollout for group in groups for rollout in group.rollouts])
        for part, spent in (("generate", generated - started), ("judge", time.perf_counter() - generated)):
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
        return groups

    def _rollout(self, prompt: Prompt, sample: int, context: list[int], completion: Completion) -> Rollout:
        text = self.renderer.decode(completion.token_ids)
        return Rollout(prompt, sample, [Turn(context, completion, text)])

    def _judge(self, rollouts: Sequence[Rollout]) -> None:
        verdicts = self.judge.judge([(r.text, r.prompt.answer, r.prompt.fields) for r in rollouts])
        check_verdicts(verdicts)
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            rollout.verdict, rollout.reward = verdict, verdict.reward

    def check_lengths(self, prompts: Sequence[Prompt], contexts: Sequence[Sequence[int]]) -> None:
        """Each prompt has to leave room for an answer."""
        limit = self.engine.max_length
        for prompt, ids in zip(prompts, contexts, strict=True):
            if len(ids) >= limit:
                raise UserError(
                    f"prompt {prompt.id} has {len(ids)} tokens, which leaves no room in a context of {limit}: "
                    "leave it out, shorten it (fewer few-shot examples?), or raise model.max_length"
                )
