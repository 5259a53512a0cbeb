"""Prompts to judged groups: seeds, verdicts, progress; divided among ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import pytest
import torch
from processes import start

from assay.config import EvalConfig, SamplingConfig
from assay.engine import make_engine
from assay.engine.base import Capabilities, EngineInfo, Event, Finished, Request, SamplingParams
from assay.mesh import Mesh, init_mesh
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector, request_seed, sampling_params
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.types import Completion, Finish, Group, Prompt, Status, UserError, Verdict

TASK: Any = make_task("abacus", eval_size=40)
PARAMS = SamplingParams(n=3, temperature=1.0, max_new_tokens=6)


@dataclass(frozen=True)
class Echo:
    """Returns its arguments in the verdict."""

    def __call__(self, completion: str, answer: str, fields: Any) -> Verdict:
        return Verdict(float(len(completion)), Status.WRONG, parsed=f"{completion}|{answer}|{fields['start']}")


def collector(judge: Any = None, max_length: int = 64, workers: int = 0) -> Collector:
    tokenizer = word_tokenizer(TASK.words())
    policy = build_preset("nano", tokenizer.vocab_size, 64, seed=3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(3.0 if weight.dim() == 2 else 1.0)  # sharper distributions than those of initial weights
    renderer = Renderer(tokenizer)
    engine = make_engine(
        "native", policy, device="cpu", dtype=torch.float32, max_length=max_length, decode=renderer.decode
    )
    return Collector(engine, renderer, JudgePool(judge or Echo(), workers, 5.0))


def written(group: Group) -> list[list[int]]:
    return [rollout.turns[0].completion.token_ids for rollout in group.rollouts]


@pytest.mark.parametrize("workers", [0, 1])
def test_progress_counts_answers_while_sampling_and_judging(workers: int) -> None:
    part = collector(TASK.judge(), workers=workers)
    shown: list[tuple[Any, ...]] = []
    part.progress = lambda *count: shown.append(count)
    with part:
        groups = part.collect(TASK.prompts("test")[:4], PARAMS, (0, 0), what="evaluating")
    sampled = [entry for entry in shown if entry[0] == "evaluating"]
    assert all(total == 12 and unit == "answers" for _, _, total, unit, *_ in sampled)
    assert sampled[0][5] <= 12 * PARAMS.max_new_tokens and sampled[-1][5] == sampled[-1][4]  # all tokens are sampled
    assert all(most >= tokens for *_, tokens, most in sampled)
    assert sampled[-1][1] == 12 and sampled[-1][4] >= sum(r.length for group in groups for r in group.rollouts) - 12
    judged = [entry for entry in shown if entry[0] == "judging"]
    assert (judged[-1][1:3] == (12, 12)) if workers else not judged
    assert shown.index(sampled[-1]) == len(sampled) - 1  # judging comes after sampling


def test_request_seed_depends_on_all_four_arguments() -> None:
    base = (1, 2, "abacus/train/3", 0)
    assert request_seed(*base) == request_seed(1, 2, "abacus/train/3") == request_seed(*base)
    others = [(2, 2, base[2], 0), (1, 3, base[2], 0), (1, 2, "abacus/train/4", 0), (1, 2, base[2], 1)]
    # Arguments are separated: (1, 12) differs from (11, 2), and a step from a part of an id.
    others += [(11, 2, "x", 0), (1, 12, "x", 0), (1, 1, "2|x", 0), (1, -1, "x", 0), (-1, 1, "x", 0)]
    seeds = {request_seed(*each) for each in [base, *others]}
    assert len(seeds) == 1 + len(others)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert isinstance(request_seed(0, 0, "\ud800"), int)  # an id can be any JSON string


def test_completions_do_not_depend_on_other_prompts() -> None:
    part = collector()
    prompts = list(TASK.prompts("test")[:8])
    together = part.collect(prompts, PARAMS, (5, 2))
    assert len({str(written(group)) for group in together}) == 8
    for place in (0, 3, 7):
        alone = part.collect([prompts[place]], PARAMS, (5, 2))[0]
        assert written(alone) == written(together[place])
    backwards = part.collect(prompts[::-1], PARAMS, (5, 2))
    assert [written(group) for group in backwards[::-1]] == [written(group) for group in together]
    for seed in ((6, 2), (5, 3)):  # of the run and of the step
        assert written(part.collect(prompts[:1], PARAMS, seed)[0]) != written(together[0])
    more = part.collect(prompts[:2], SamplingParams(n=5, temperature=1.0, max_new_tokens=6), (5, 2))
    assert [written(group)[:3] for group in more] == [written(group) for group in together[:2]]


def test_repeated_prompt_within_a_step_gets_different_noise() -> None:
    part = collector()
    one, other = TASK.prompts("test")[:2]
    first, _, again, third = part.collect([one, other, one, one], PARAMS, (5, 2))
    assert first.prompt == again.prompt == third.prompt == one
    assert len({str(written(group)) for group in (first, again, third)}) == 3
    assert written(first) == written(
        part.collect([one], PARAMS, (5, 2))[0]
    )  # the first one does not depend on repetitions
    seen: Counter[str] = Counter()
    calls = [part.collect([one], PARAMS, (5, 2), seen=seen)[0] for _ in range(3)]
    assert [written(group) for group in calls] == [written(group) for group in (first, again, third)]
    assert seen == {one.id: 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_verdicts_belong_to_their_rollouts(workers: int) -> None:
    part = collector(TASK.judge() if workers else Echo(), workers=workers)
    prompts = list(TASK.prompts("test")[:6])
    with part.judge:
        groups = part.collect(prompts, PARAMS, (0, 0))
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]
    alone = TASK.judge()
    for group in groups:
        assert [rollout.sample for rollout in group.rollouts] == [0, 1, 2]
        for rollout in group.rollouts:
            assert rollout.prompt is group.prompt and rollout.verdict is not None
            assert rollout.text == part.renderer.decode(rollout.turns[0].completion.token_ids)
            if workers:
                expected = alone(rollout.text, group.prompt.answer, group.prompt.fields)
                assert (rollout.verdict.status, rollout.verdict.parsed) == (expected.status, expected.parsed)
            else:
                shown = f"{rollout.text}|{group.prompt.answer}|{group.prompt.fields['start']}"
                assert rollout.verdict.parsed == shown
                assert rollout.reward == rollout.verdict.reward == len(rollout.text)


def test_sampling_params_of_an_evaluation_default_to_those_of_training() -> None:
    training = SamplingConfig(temperature=0.7, top_k=5, max_new_tokens=33, min_new_tokens=2, stop=["Q:"])
    assert sampling_params(training, 4) == SamplingParams(
        n=4, temperature=0.7, top_k=5, max_new_tokens=33, min_new_tokens=2, stop=("Q:",)
    )
    expected = SamplingParams(n=2, temperature=0.0, max_new_tokens=33, stop=("Q:",))
    assert sampling_params(EvalConfig(), 2, training) == expected
    own = EvalConfig(stop=["\n\n"], max_new_tokens=7, min_p=0.1)
    assert sampling_params(own, 1, training) == SamplingParams(
        temperature=0.0, min_p=0.1, max_new_tokens=7, stop=("\n\n",)
    )
    assert sampling_params(EvalConfig(), 1) == SamplingParams(temperature=0.0, max_new_tokens=512)


def test_prompt_longer_than_the_context_raises() -> None:
    part = collector(max_length=8)
    long = Prompt("long/1", ({"role": "user", "content": "1 " * 20},), "1", fields={"start": 1})
    with pytest.raises(UserError, match=r"long/1 has \d+ tokens, which leaves no space in a context of 8"):
        part.collect([long], PARAMS, (0, 0))


def test_judge_that_fails_on_all_answers_raises(tmp_path: Any) -> None:
    from assay.rewards import FunctionJudge

    (tmp_path / "broken.py").write_text(
        "def reward(completion, answer):\n    raise KeyError('x')\n"
        "def sometimes(completion, answer, start):\n    return 1.0 if start % 2 else float('nan')\n"
    )
    prompts = list(TASK.prompts("test")[:6])
    with pytest.raises(UserError, match=r"failed on all 18 answers.*KeyError"):
        collector(FunctionJudge(f"{tmp_path}/broken.py:reward")).collect(prompts, PARAMS, (0, 0))
    groups = collector(FunctionJudge(f"{tmp_path}/broken.py:sometimes")).collect(prompts, PARAMS, (0, 0))
    for group in groups:
        status = Status.OK if group.prompt.fields["start"] % 2 else Status.ERROR
        assert all(r.verdict is not None and r.verdict.status is status for r in group.rollouts)


T = TypeVar("T")
TWO_SHORT = SamplingParams(n=2, max_new_tokens=4)
PROMPTS = TASK.prompts("test")[:5]


class SeedEngine:
    """Samples a token that depends on the seed, and records the names of the requests of the last call."""

    info = EngineInfo(0, 64, 8, torch.float32, Capabilities())

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.asked, self.fails = mesh, [], False  # type: ignore[var-annotated]
        self.events: list[Event] = []

    def add(self, request: Request) -> int:
        if not self.events:
            self.asked = []
        self.asked.append(request.name)
        request_id = len(self.asked)
        for sample in range(request.params.n):
            completion = Completion([request.seed % 7 + sample], [0.0], [0.0], Finish.STOP)
            self.events.append(Finished(request_id, sample, completion))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        if self.fails:
            raise UserError(f"rank {self.mesh.rank} cannot")
        events, self.events = self.events, []
        return events

    def abort(self, ids: Any) -> None:
        self.events = []


class Leaves:
    """Interrupts the work on one rank, and all ranks in `check`."""

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves

    def interruptible(self, work: Callable[[], T]) -> T | None:
        return None if self.leaves else work()

    def check(self) -> None:
        raise KeyboardInterrupt


def judge(completion: str, answer: str, fields: Any) -> Verdict:
    return Verdict(float(len(completion)), Status.WRONG)


def fails_on_all(completion: str, answer: str, fields: Any) -> Verdict:
    raise ZeroDivisionError


def rank_collector(mesh: Mesh, judged_by: Any = judge) -> Collector:
    engine: Any = SeedEngine(mesh)
    return Collector(engine, Renderer(word_tokenizer(TASK.words())), JudgePool(judged_by, 0, 5.0), mesh)


def share(flat: Mesh) -> None:
    for mesh in (flat, init_mesh(2), init_mesh(4)):
        for count in (5, 2, 1):
            expected = rank_collector(Mesh()).collect(PROMPTS[:count], TWO_SHORT, (3, 1))
            shared = rank_collector(mesh)
            assert shared.collect(PROMPTS[:count], TWO_SHORT, (3, 1)) == expected
            asked: Any = shared.engine
            shares = mesh.all_gather_objects(asked.asked)
            assert sorted(chain(*shares[:: mesh.tp_size])) == sorted(prompt.id for prompt in PROMPTS[:count])
            sizes = [len(names) for names in shares]
            assert max(sizes) - min(sizes) <= 1  # balanced

    failing = rank_collector(flat)
    failing.engine.fails = flat.rank == 2  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="rank 2 cannot"):
        failing.collect(PROMPTS, TWO_SHORT, (3, 1))
    with pytest.raises(UserError, match="the judge failed on all 10 answers"):
        rank_collector(flat, fails_on_all).collect(PROMPTS, TWO_SHORT, (3, 1))
    # A judge that fails on all answers of one rank only is no error of the run.
    some = rank_collector(flat, fails_on_all if flat.rank == 1 else judge).collect(PROMPTS, TWO_SHORT, (3, 1))
    assert {r.verdict.status for r in some[1].rollouts if r.verdict} == {Status.ERROR}

    leaving = rank_collector(flat)
    leaving.stopper = Leaves(flat.rank == 3)
    with pytest.raises(KeyboardInterrupt):
        leaving.collect(PROMPTS, TWO_SHORT, (3, 1))
    assert torch.distributed.is_initialized()


@pytest.mark.slow
def test_prompts_are_divided_among_ranks_and_errors_are_raised_on_all() -> None:
    start(4, share)
