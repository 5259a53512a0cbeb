from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from train_parts import make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.training.learner.pack import Row, pack, partition_rows, rows_of, split_rows


def row(length: int, mark: float = 0.0) -> Row:
    return Row([1] * length, [0, *[1] * (length - 1)], [0.0] * length, mark, 1.0)


@pytest.mark.parametrize("token_budget", [1, 10, 1000])
def test_micro_batches_keep_the_token_budget_and_contain_every_row_once(token_budget: int) -> None:
    draw = random.Random(token_budget)
    rows = [row(draw.randint(2, 14), mark) for mark in range(40)]
    parts = list(split_rows(rows, token_budget))
    assert list(split_rows([], token_budget)) == []
    assert sorted(r.advantage for part in parts for r in part) == list(range(40))
    assert all(len(part) == 1 or sum(len(r.ids) for r in part) <= token_budget for part in parts)
    for part, following in pairwise(parts):  # no part could have taken the next row as well
        assert sum(len(r.ids) for r in part) + len(following[0].ids) > token_budget


@pytest.mark.parametrize("token_budget", [1, 20, 1000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_every_row_once_and_equally_many_balanced_micro_batches(ranks: int, token_budget: int) -> None:
    draw = random.Random(token_budget)
    rows = [row(draw.randint(2, 14), mark) for mark in range(1, 41)]
    shares = [partition_rows(rows, ranks, rank, token_budget) for rank in range(ranks)]
    assert len({len(parts) for parts in shares}) == 1
    learnt = [[r for part in parts for r in part if any(r.trained)] for parts in shares]
    assert sorted(r.advantage for own in learnt for r in own) == list(range(1, 41))
    sizes = [sum(len(r.ids) for r in own) for own in learnt]
    piece = sum(len(r.ids) for r in rows) // (4 * ranks)  # rows go to ranks in pieces of about so many tokens
    assert max(sizes) - min(sizes) <= max(piece, 14)
    for part in [part for parts in shares for part in parts]:
        assert len(part) == 1 or sum(len(r.ids) for r in part) <= token_budget
    blanks = [r for parts in shares for part in parts for r in part if not any(r.trained)]
    assert all(len(r.ids) == 1 and r.weight == 0 for r in blanks)
    if ranks == 1:
        assert shares[0] == list(split_rows(rows, token_budget)) and not blanks


def test_with_more_ranks_than_rows_some_get_blank_rows() -> None:
    shares = [partition_rows([row(5), row(9)], 4, rank, 100) for rank in range(4)]
    assert [[any(r.trained) for r in part] for parts in shares for part in parts] == [[True], [True], [False], [False]]
    batch = pack(shares[3][0], "cpu")
    assert len(batch.ids) == 1 and len(batch.weights) == 0


def answer(prompt: int, length: int) -> Row:
    return Row([prompt] * 6 + [9] * length, [0] * 6 + [1] * length, [0.0] * (6 + length), 1.0, 1.0)


def test_a_shared_prompt_counts_once_in_the_token_budget() -> None:
    rows = [answer(1, 4), answer(2, 3), answer(1, 2), answer(2, 5), answer(1, 3)]
    (part,) = split_rows(rows, 6 + 2 + 3 + 4 + 6 + 3 + 5, share_prefixes=True)
    assert [(r.ids[0], len(r.ids) - 6) for r in part] == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 5)]
    assert pack(part, "cpu").shared == [0, 6, 6, 0, 6]
    assert [len(p) for p in split_rows(rows, 28, share_prefixes=True)] == [4, 1]
    assert [len(p) for p in split_rows(rows, 28)] == [3, 2]
    assert pack([answer(1, 4), answer(2, 3)], "cpu").shared == [0, 0]
    assert pack([answer(1, 40), answer(1, 40)], "cpu").shared == [0, 0]  # 6 of 92 tokens are not worth it


def test_ranks_keep_answers_to_a_prompt_together() -> None:
    rows = [answer(prompt, 4) for prompt in range(8) for _ in range(8)]
    for rank in range(2):
        (part,) = partition_rows(rows, 2, rank, 10_000, share_prefixes=True)
        assert sum(1 for shared in pack(part, "cpu").shared if not shared) <= 5


def test_packed_inputs_are_aligned_with_the_trained_tokens() -> None:
    algo = make_algorithm("grpo")
    groups = make_groups(tiny_decoder())
    algo.credit(groups)
    rows = rows_of(groups, algo)
    batch = pack(rows, "cpu", torch.float64)
    ids, trained, start = batch.ids.tolist(), batch.trained.tolist(), 0
    for part, length in zip(rows, batch.lengths, strict=True):
        assert ids[start : start + length] == part.ids
        start += length
    assert start == len(ids) == len(trained)
    flat = [
        (bit, logprob, r.advantage, r.weight)
        for r in rows
        for bit, logprob in zip(r.trained, r.behaviour_logprobs, strict=True)
    ]
    assert [bool(bit) for bit, *_ in flat] == trained
    expected = [values for bit, *values in flat if bit]
    found = torch.stack([batch.behaviour_logprobs, batch.advantages, batch.weights], 1)
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64))


def test_steps_give_their_advantage_to_their_tokens() -> None:
    algo = make_algorithm("simple", step_credit=True)
    groups = make_groups(tiny_decoder())
    for group in groups:
        for rollout in group.rollouts:
            rollout.turns[0].reward = 0.5
    algo.credit(groups)
    rollout = groups[0].rollouts[1]
    first, second = rollout.turns
    found = rollout.token_advantages
    assert found is not None and found[0] != found[-1]
    counts = len(first.completion.token_ids), len(second.completion.token_ids)
    assert found == [found[0]] * counts[0] + [found[-1]] * counts[1]
    assert pack([Row.of(rollout)], "cpu", torch.float64).advantages.tolist() == found
    rollout.advantage, rollout.token_advantages = 0.0, [0.0] * counts[0] + found[counts[0] :]
    kept = [row for row in rows_of(groups, algo) if row.ids == rollout.token_ids]
    assert kept and kept[0].advantages == rollout.token_advantages  # the second step alone is reason enough to keep it


def test_weights_are_those_of_the_whole_batch_and_sum_to_one() -> None:
    groups = make_groups(tiny_decoder())
    for recipe in ("grpo", "simple"):
        algo = make_algorithm(recipe)
        for group in groups:
            for rollout in group.rollouts:
                rollout.advantage = 1.0
        rows = rows_of(groups, algo)
        assert sum(r.weight * sum(r.trained) for r in rows) == pytest.approx(1.0, abs=1e-12)
