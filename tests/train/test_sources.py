from __future__ import annotations

from collections.abc import Sequence

import pytest

from assay.tasks.base import UNLIMITED, LazyPrompts
from assay.train.sources import PromptStream
from assay.types import Prompt


def numbered(count: int) -> list[Prompt]:
    return [Prompt(str(index), ()) for index in range(count)]


def ids(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


def test_every_pass_is_an_order_of_its_own_of_all_prompts() -> None:
    stream = PromptStream(numbered(30), seed=1)
    passes = [ids(stream.next(30)) for _ in range(4)]
    assert all(sorted(order) == list(range(30)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4


def test_the_order_depends_on_the_seed_alone() -> None:
    first, second, other = (ids(PromptStream(numbered(50), seed).next(120)) for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 3, 30], [13, 13, 14], [40]])
def test_how_many_are_taken_at_a_time_does_not_matter(sizes: list[int]) -> None:
    stream = PromptStream(numbered(12), seed=2)
    found = [index for size in sizes for index in ids(stream.next(size))]
    assert found == ids(PromptStream(numbered(12), seed=2).next(40))
    assert stream.cursor == 40


@pytest.mark.parametrize("cursor", [0, 5, 11, 12, 13, 35, 1000])
def test_a_cursor_is_all_it_takes_to_go_on(cursor: int) -> None:
    whole = PromptStream(numbered(12), seed=3)
    whole.next(cursor)
    resumed = PromptStream(numbered(12), seed=3, cursor=cursor)
    assert ids(whole.next(30)) == ids(resumed.next(30))
    moved = PromptStream(numbered(12), seed=3)
    moved.next(2)
    moved.cursor = cursor  # as a resumed run sets it
    assert ids(moved.next(30)) == ids(PromptStream(numbered(12), seed=3, cursor=cursor).next(30))


def test_an_endless_split_is_walked_without_being_made() -> None:
    made: list[int] = []

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(str(index), ())

    stream = PromptStream(LazyPrompts(make, UNLIMITED), seed=0)
    first = ids(stream.next(5))
    assert len(set(first)) == 5 and len(made) == 5
    assert not set(ids(stream.next(5))) & set(first)
