"""The order in which prompts come."""

from __future__ import annotations

import random
from collections.abc import Sequence

from assay.types import Prompt

SHUFFLED_UP_TO = 1 << 24  # longer splits are generated ones: independent draws already, walked in order


class PromptStream:
    """Endless passes over a split, each in a seeded order of its own; `cursor` is all there is to save."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, cursor: int = 0) -> None:
        self.prompts, self.seed, self.cursor = prompts, seed, cursor
        self._epoch = -1
        self._order: Sequence[int] = ()

    def next(self, count: int) -> list[Prompt]:
        found = [self._at(index) for index in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return found

    def _at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self.prompts[self._order[place]]

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if len(self.prompts) > SHUFFLED_UP_TO:
            return range(len(self.prompts))
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order
