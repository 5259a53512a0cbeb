from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from assay.algos import make_algorithm
from assay.config import TrainConfig
from assay.models import build_preset
from assay.rewards import FunctionJudge, JudgePool
from assay.rollout import Collector
from assay.tasks import make_task
from assay.tasks.base import UNLIMITED, LazyPrompts
from assay.text import Renderer, word_tokenizer
from assay.train import components
from assay.train.sources import OnPolicySource, PromptStream
from assay.train.state import RunState, Schedule
from assay.train.stopping import Stopped
from assay.types import Prompt


def numbered(count: int) -> list[Prompt]:
    return [Prompt(str(index), ()) for index in range(count)]


def ids(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


def test_every_epoch_has_its_own_order_of_all_prompts() -> None:
    stream = PromptStream(numbered(30), seed=1)
    passes = [ids(stream.next(30)) for _ in range(4)]
    assert all(sorted(order) == list(range(30)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4


def test_the_order_of_prompts_depends_on_the_seed_only() -> None:
    first, second, other = (ids(PromptStream(numbered(50), seed).next(120)) for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 3, 30], [13, 13, 14], [40]])
def test_the_order_does_not_depend_on_the_batch_size(sizes: list[int]) -> None:
    stream = PromptStream(numbered(12), seed=2)
    found = [index for size in sizes for index in ids(stream.next(size))]
    assert found == ids(PromptStream(numbered(12), seed=2).next(40))
    assert stream.cursor == 40


@pytest.mark.parametrize("cursor", [0, 5, 11, 12, 13, 35, 1000])
def test_a_prompt_stream_is_resumed_by_its_cursor(cursor: int) -> None:
    uninterrupted = PromptStream(numbered(12), seed=3)
    uninterrupted.next(cursor)
    resumed = PromptStream(numbered(12), seed=3)
    resumed.next(2)
    resumed.cursor = cursor
    assert ids(uninterrupted.next(30)) == ids(resumed.next(30))


def test_an_endless_split_is_not_materialized() -> None:
    made: list[int] = []

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(str(index), ())

    stream = PromptStream(LazyPrompts(make, UNLIMITED), seed=0)
    first = ids(stream.next(5))
    assert len(set(first)) == 5 and len(made) == 5
    assert not set(ids(stream.next(5))) & set(first)


def test_an_unshuffled_stream_keeps_the_order_of_the_split() -> None:
    assert ids(PromptStream(numbered(5), seed=1, shuffle=False).next(7)) == [0, 1, 2, 3, 4, 0, 1]


def make_source(judge: JudgePool, **algo: Any) -> OnPolicySource:
    """A nano model that answers abacus problems; the judge's rewards depend on the letters of an answer."""
    cfg = TrainConfig(seed=3)
    cfg.train.prompts, cfg.train.samples, cfg.sampling.max_new_tokens = 3, 2, 4
    task = make_task("abacus", train_size=24)
    tokenizer = word_tokenizer(task.words())  # type: ignore[attr-defined]
    policy = build_preset("nano", tokenizer.vocab_size, 64, seed=0)
    renderer = Renderer(tokenizer)
    engine = components.build_engine(cfg.engine, policy, renderer, 64)
    made = make_algorithm("grpo", **algo)
    stream = PromptStream(task.prompts("train"), cfg.seed)
    return OnPolicySource(cfg, made, Collector(engine, renderer, judge), stream, Schedule(9))


def by_letters(completion: str, answer: str) -> float:
    return sum(map(ord, completion)) % 7 / 6


def constant(completion: str, answer: str) -> float:
    return 0.5


@pytest.fixture
def letters() -> Iterator[JudgePool]:
    with JudgePool(FunctionJudge(f"{__file__}:by_letters"), 0) as judge:
        yield judge


def test_next_counts_answers_and_tokens_and_state_dict_resumes_at_the_same_prompts(letters: JudgePool) -> None:
    source, state = make_source(letters), RunState()
    first = source.next(state)
    rollouts = [rollout for group in first.groups for rollout in group.rollouts]
    assert len(first.groups) == 3 and not first.dropped and set(first.seconds) == {"generate", "judge"}
    assert state.answers == len(rollouts) == 6 and state.tokens == sum(r.length for r in rollouts) and state.step == 0
    saved, state.step = source.state_dict(), 1
    expected = source.next(state).groups
    resumed = make_source(letters)
    resumed.load_state_dict(saved)
    found = resumed.next(RunState(step=1)).groups
    assert [r.token_ids for g in found for r in g.rollouts] == [r.token_ids for g in expected for r in g.rollouts]
    assert not {group.prompt.id for group in found} & {group.prompt.id for group in first.groups}


def test_dropped_groups_are_replaced_for_as_many_rounds_as_the_algorithm_allows() -> None:
    with JudgePool(FunctionJudge(f"{__file__}:constant"), 0) as judge:
        source, state = make_source(judge, drop_zero_variance=True, resample=2), RunState()
        sampled = source.next(state)
    assert not sampled.groups and len({group.prompt.id for group in sampled.dropped}) == 9
    assert state.answers == 18 and source.state_dict()["cursor"] == 9


def test_an_interrupted_step_leaves_state_and_cursor_as_they_were(
    letters: JudgePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop request can interrupt sampling; the resumed run samples the step again."""
    source, state = make_source(letters, greedy_baseline=True), RunState()
    source.next(state)
    saved, counts = source.state_dict(), (state.answers, state.tokens)
    assert state.answers == 9  # three greedy ones
    monkeypatch.setattr(source.algo.__class__, "set_baselines", lambda *args: (_ for _ in ()).throw(Stopped(15)))
    with pytest.raises(Stopped):
        source.next(state)
    assert source.state_dict() == saved and (state.answers, state.tokens) == counts


def test_pass_rates_determine_which_prompts_are_sampled(letters: JudgePool) -> None:
    source = make_source(letters, pass_rate_low=0.2, pass_rate_high=0.8)
    order = PromptStream(source.prompts.prompts, 3).next(24)
    source.algo.load_state_dict({"pass_rate": {"rates": {prompt.id: [0.0, 1.0] for prompt in order[:10]}}})
    assert [group.prompt.id for group in source.next(RunState(step=1)).groups] == [p.id for p in order[10:13]]
    assert source.algo.end_step(2, [], {}) == {"prompts/known": 10.0, "prompts/within_reach": 0.0}
