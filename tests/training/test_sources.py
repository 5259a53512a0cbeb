"""Order of prompts, groups of a step, and the replay buffer: by itself, in the update, and as a part of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns
from train_parts import make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.build.models import build_engine
from assay.config import TrainConfig
from assay.models import build_preset
from assay.rewards import FunctionJudge, JudgePool
from assay.rollout import Collector
from assay.runs.rollouts import read_rollouts
from assay.tasks import make_task
from assay.tasks.base import UNLIMITED, LazyPrompts
from assay.text import Renderer, word_tokenizer
from assay.training.progress import RunState, Schedule, Stopped
from assay.training.sources import OnPolicySource, PromptStream, ReplayBuffer, mixed, version_of
from assay.types import Group, Prompt, UserError


def numbered(count: int) -> list[Prompt]:
    return [Prompt(str(index), ()) for index in range(count)]


def ids(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


def test_every_epoch_has_its_own_order_of_all_prompts() -> None:
    stream = PromptStream(numbered(30), seed=1)
    passes = [ids(stream.next(30)) for _ in range(4)]
    assert all(sorted(order) == list(range(30)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4
    first, second, other = (ids(PromptStream(numbered(50), seed).next(120)) for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 3, 30]])
def test_the_order_does_not_depend_on_the_batch_size(sizes: list[int]) -> None:
    stream = PromptStream(numbered(12), seed=2)
    found = [index for size in sizes for index in ids(stream.next(size))]
    assert found == ids(PromptStream(numbered(12), seed=2).next(40))
    assert stream.cursor == 40
    resumed = PromptStream(numbered(12), seed=2)
    resumed.cursor = 35
    assert ids(resumed.next(5)) == found[35:]


def test_an_endless_split_is_not_materialized() -> None:
    made: list[int] = []

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(str(index), ({"role": "user", "content": "?"},))

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
    engine = build_engine(cfg, policy, renderer, 64)
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


def group_of(version: int, number: int = 0, reward: float = 0.0) -> Group:
    (group,) = make_groups(tiny_decoder(), groups=1, samples=2, seed=1000 * version + number)
    for rollout in group.rollouts:
        rollout.reward, rollout.advantage = reward, reward - 0.5
        for turn in rollout.turns:
            turn.completion.version = version
    return group


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return [group_of(version, number) for version in range(4) for number in range(3)]


def test_the_buffer_keeps_the_latest_groups(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=5)
    for version in range(4):
        buffer.add(groups[3 * version : 3 * version + 3])
        buffer.add([Group(groups[0].prompt, [])])
        assert list(buffer) == groups[: 3 * version + 3][-5:] and len(buffer) == min(3 * version + 3, 5)
    assert buffer.mean_age(4) == pytest.approx((2 + 2 + 1 + 1 + 1) / 5)
    with pytest.raises(UserError, match="must be 1 or more"):
        ReplayBuffer(capacity=0)


def test_samples_depend_on_seed_and_version_only(groups: list[Group]) -> None:
    def draw(version: int, seed: int, count: int = 5) -> list[int]:
        buffer = ReplayBuffer(capacity=12)
        buffer.add(groups)
        return [groups.index(group) for group in buffer.sample(count, version, seed)]

    assert draw(4, 0) == draw(4, 0)
    assert len({tuple(draw(version, seed)) for version in range(4, 8) for seed in range(4)}) == 16
    assert sorted(draw(4, 0, count=99)) == list(range(12))  # no more than there are, each once
    seen = Counter(index for version in range(4, 1004) for index in draw(version, 1, count=3))
    assert all(abs(seen[index] - 250) < 5 * 250**0.5 for index in range(12))  # 3 of 12, 1,000 times


def test_with_replacement_a_group_can_be_sampled_twice(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=12, with_replacement=True)
    buffer.add(groups)
    drawn = buffer.sample(200, 4)
    assert len(drawn) == 200 and {id(group) for group in drawn} == {id(group) for group in groups}
    assert ReplayBuffer(capacity=3, with_replacement=True).sample(3, 1) == []


def test_groups_beyond_max_staleness_are_removed(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=12, max_staleness=2)
    buffer.add(groups)
    assert {version_of(group) for group in buffer.sample(12, 4)} == {2, 3}
    assert len(buffer) == 6
    buffer.add(groups[:6])
    assert len(buffer) == 12  # there is room again
    mixed_versions = groups[0]
    mixed_versions.rollouts[0].turns[0].completion.version = 9
    assert version_of(mixed_versions) == 0
    mixed_versions.rollouts[0].turns[0].completion.version = 0


def test_a_saved_buffer_is_loaded_unchanged(tmp_path: Path, groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=7, max_staleness=9, with_replacement=True)
    groups[-1].rollouts[0].token_advantages = [0.1] * groups[-1].rollouts[0].length
    buffer.add(groups)
    buffer.save(tmp_path / "deep" / "buffer")
    found = ReplayBuffer.load(tmp_path / "deep" / "buffer")
    assert found == buffer and found.groups.maxlen == 7
    assert found.sample(5, 9, seed=3) == buffer.sample(5, 9, seed=3)
    files = {file.suffix for file in (tmp_path / "deep").rglob("*") if file.is_file()}
    assert files == {".json", ".jsonl", ".npz"}
    empty = ReplayBuffer(capacity=2)
    empty.save(f"{tmp_path}/empty")
    assert ReplayBuffer.load(f"{tmp_path}/empty") == empty
    with pytest.raises(UserError, match="not a replay buffer"):
        ReplayBuffer.load(tmp_path)
    (tmp_path / "empty" / "buffer.json").write_text('{"capacity": "many"}')
    with pytest.raises(UserError, match=r"buffer.json is damaged"):
        ReplayBuffer.load(tmp_path / "empty")


def test_the_summary_lists_versions_and_means() -> None:
    buffer = ReplayBuffer(capacity=9)
    assert buffer.summary(3) == "0 of 9 groups, 0 rollouts"
    buffer.add([group_of(1, 0, 1.0), group_of(1, 1, 0.0), group_of(3, 0, 0.25)])
    first, one, three = buffer.summary(4).splitlines()
    assert first == "3 of 9 groups, 6 rollouts, mean age 2.3"
    assert one.startswith("version 1: 2 groups, mean reward 0.500, mean length ")
    assert three.startswith("version 3: 1 group, mean reward 0.250, mean length ")


def test_fresh_and_replayed_groups_are_interleaved_evenly(groups: list[Group]) -> None:
    fresh, replayed = groups[:8], groups[8:]
    batch = mixed(fresh, replayed)
    assert sorted(map(id, batch)) == sorted(map(id, groups))
    for start in range(0, 12, 3):
        assert sum(group in replayed for group in batch[start : start + 3]) == 1
    assert mixed(fresh, []) == fresh


def test_a_run_logs_its_replay(small: SmallRuns, no_curves: None) -> None:
    words = ("--train.steps", 5, "--save.every", 5, "--replay.groups", 2, "--replay.capacity", 7)
    assert small.train(*words, "--replay.max_staleness", 2, "--algo.updates", 2) == 0
    rows = [row for row in small.metrics() if "replay/size" in row]
    # 3 groups a step, and none of more than two steps ago: 0, 3, 6, then the last two steps
    assert [row["replay/size"] for row in rows] == [0, 3, 6, 6, 6]
    assert [row["replay/age"] for row in rows] == [0, 1, 1.5, 1.5, 1.5]
    assert [row["replay/share"] for row in rows] == pytest.approx([0, 0.4, 0.4, 0.4, 0.4])
    buffer = ReplayBuffer.load(small.checkpoint(5) / "replay")
    written = [group for step in (3, 4, 5) for group in read_rollouts(small.runs / "small", step)]
    assert list(buffer) == written[-7:]  # what was in the rollout files is what may come again


def test_inherited_answers_have_the_same_age_whatever_versions_sampled_them(tmp_path: Path) -> None:
    """Also answers of an asynchronous run, which several versions of its weights have sampled."""
    groups = [group_of(version, number) for version, number in ((40, 0), (41, 1))]
    for completion in [turn.completion for rollout in groups[1].rollouts for turn in rollout.turns]:
        completion.version_spans = ((41, 1), (43, len(completion.token_ids) - 1))
    renderer = {tuple(t.completion.token_ids): t.text for g in groups for r in g.rollouts for t in r.turns}
    continued = groups[1].rollouts[0].turns[0]  # an action of a custom loop, within a reply
    continued.text = f" {continued.text}"
    other = ReplayBuffer(capacity=2)
    other.add(groups)
    other.save(tmp_path)
    buffer = ReplayBuffer(capacity=4, max_staleness=3)
    buffer.inherit(tmp_path, vocab_size=1000, decode=lambda ids: renderer[tuple(ids)])
    assert [buffer.mean_age(version) for version in range(3)] == [1, 2, 3]
    logprobs = [[r.engine_logprobs for r in group.rollouts] for group in groups]
    assert [[r.engine_logprobs for r in group.rollouts] for group in buffer] == logprobs  # for importance ratios
    assert len(buffer.sample(9, version=2)) == 2 and buffer.sample(9, version=3) == []


@pytest.mark.slow
def test_a_run_starts_with_the_buffer_of_another_run(
    small: SmallRuns, tmp_path: Path, no_curves: None, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]
) -> None:
    words = ("--replay.groups", 2, "--replay.max_staleness", 2, "--save.every", 1)
    assert small.train(*words, "--name", "first") == 0
    saved = small.checkpoint(2, "first") / "replay"
    assert small.train(*words, "--train.steps", 3, "--replay.load", saved, "--name", "second") == 0
    rows = [row for row in small.metrics("second") if "replay/size" in row]
    assert [row["replay/size"] for row in rows] == [6, 9, 6]  # what came from elsewhere is two steps old, then too old
    assert [row["replay/age"] for row in rows] == pytest.approx([1, (6 * 2 + 3) / 9, 1.5])
    first, second = (list(ReplayBuffer.load(folder)) for folder in (saved, small.checkpoint(0, "second") / "replay"))
    assert {version_of(group) for group in second} == {-1}
    assert [[r.token_ids for r in g.rollouts] for g in first] == [[r.token_ids for r in g.rollouts] for g in second]
    capsys.readouterr()
    assert small.train(*words, "--replay.load", saved, "--model.tokenizer", "characters") == 2
    said = stderr_of(small.train(*words, "--replay.load", tmp_path)).splitlines()
    assert "another tokenizer" in said[0] and "not a replay buffer" in said[1] and len(said) == 2
