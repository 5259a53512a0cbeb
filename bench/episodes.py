"""Steps of the engine for episodes with actions of mixed lengths, in rounds and at their own pace:

python bench/episodes.py > bench/results/episodes-cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from assay.bench.machine import describe_machine, describe_versions
from assay.engine import Request, make_engine
from assay.engine.base import SamplingParams
from assay.envs import Env
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits
from assay.text import Renderer, char_tokenizer
from assay.types import Completion, Rollout


class Chatter(Env):
    """Says "go on" up to seven times. Nine letters end an action: those of a random policy have many lengths."""

    name = "chatter"
    max_steps = 8
    stop = tuple("adgjmpsvy")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.last = 0, 1 + (seed or 0) % 8
        return f"begin {seed}", {}

    def step(self, action: str) -> Any:
        self.steps += 1
        return "go on", 0.1, self.steps == self.last, False, {}


class Rounds:
    """The same engine, where nobody goes on before all have ended their turns."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.release = engine, engine.release
        self.max_length, self.max_batch = engine.max_length, engine.max_batch

    def generate(self, requests: Sequence[Request], *, on_finish: Any, more: Any) -> list[list[Completion]]:
        groups: list[list[Completion]] = []
        while asked := more(True):
            found = self.engine.generate(asked)
            for index, group in enumerate(found, len(groups)):
                for sample, completion in enumerate(group):
                    on_finish(index, sample, completion)
            groups += found
        return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8, help="episodes that begin alike")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=64, help="the longest action")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    renderer = Renderer(char_tokenizer())
    policy = build_preset("nano", renderer.tokenizer.vocab_size, 1024, seed=3)
    engine = make_engine(
        *("native", policy), device=args.device, dtype=torch.float32, max_batch=args.max_batch, decode=renderer.decode
    )
    rows = [row for episodes in (256, 2048) for row in compare(engine, renderer, args, episodes)]
    found = {"machine": describe_machine(), "versions": describe_versions()}
    command = "python bench/episodes.py " + " ".join(sys.argv[1:])
    print(json.dumps(found | {"command": command.strip(), "rows": rows}, indent=1))


def compare(engine: Any, renderer: Renderer, args: argparse.Namespace, episodes: int) -> list[dict[str, Any]]:
    env = Chatter()
    prompts = env.prompts("train")[: episodes // args.samples]
    params = SamplingParams(n=args.samples, max_new_tokens=env.max_steps * args.step_tokens)
    rows, tokens = [], []
    for name, served in (("rounds", Rounds(engine)), ("own pace", engine)) * 2:  # the first two warm up
        part = Collector(served, renderer, JudgePool(env.judge(), 0), env=env, limits=Limits(0, args.step_tokens))
        engine.forget()
        engine.reset_stats()
        started = time.perf_counter()
        found = [rollout for group in part.collect(prompts, params, (0, 0)) for rollout in group.rollouts]
        rows.append({"id": name, "episodes": episodes, **figures(engine, found, time.perf_counter() - started)})
        tokens.append([rollout.token_ids for rollout in found])
    assert all(one == tokens[0] for one in tokens), "own pace and rounds have to give the same tokens"
    return rows[2:]


def figures(engine: Any, found: Sequence[Rollout], seconds: float) -> dict[str, Any]:
    stats, lengths = engine.stats, sorted(len(turn.completion.token_ids) for r in found for turn in r.turns)
    return {
        "actions": len(lengths),
        "action_tokens_median": lengths[len(lengths) // 2],
        "action_tokens_max": lengths[-1],
        "tokens": stats.decoded_tokens,
        "decode_steps": stats.decode_steps,
        "rows_a_step": round(stats.decoded_tokens / stats.decode_steps, 1),
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
