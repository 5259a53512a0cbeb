"""What was drawn, kept on the host by row and step until a sequence is finished and takes its part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.engine.rows import StepOutput
from assay.engine.sequence import Sample

STEPS = 256  # room to begin with


class History:
    def __init__(self, rows: int, float_type: type[np.floating] = np.float32) -> None:
        self.first = 0  # the earliest step held
        self.tokens = np.zeros((rows, STEPS), dtype=np.int32)
        self.scores = np.zeros((4, rows, STEPS), dtype=float_type)

    def write(self, output: StepOutput, running: Sequence[Sample]) -> None:
        steps, rows = output.tokens.shape
        if output.first + steps - self.first > self.tokens.shape[1]:
            self._make_room(output.first, steps, running)
        place = slice(output.first - self.first, output.first - self.first + steps)
        self.tokens[:rows, place] = output.tokens.numpy().T
        self.scores[:, :rows, place] = output.scores.numpy().swapaxes(1, 2)

    def read(self, samples: Sequence[Sample], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [samples, count] and scores [4, samples, count] since they last entered, all in the same step."""
        start = samples[0].entered - self.first
        stop = start + count
        if all(len(sample.spans) == 1 for sample in samples):
            rows = [sample.spans[0][0] for sample in samples]
            if len(rows) == 1:
                return self.tokens[rows[0], None, start:stop], self.scores[:, rows[0], None, start:stop]
            return self.tokens[rows, start:stop], self.scores[:, rows, start:stop]
        steps = np.arange(start, stop)
        places = [(rows_of(sample, count), steps) for sample in samples]
        tokens = np.stack([self.tokens[place] for place in places])
        return tokens, np.stack([self.scores[:, rows, steps] for rows, steps in places], axis=1)

    def tokens_of(self, sample: Sample, count: int) -> np.ndarray:
        """Tokens since it last entered; not to be changed."""
        start = sample.entered - self.first
        if len(sample.spans) == 1:
            return self.tokens[sample.spans[0][0], start : start + count]
        return self.tokens[rows_of(sample, count), np.arange(start, start + count)]

    def _make_room(self, first: int, steps: int, running: Sequence[Sample]) -> None:
        """Drop what nobody running can need; if that is not half of it, grow."""
        oldest = min([first, *(sample.entered for sample in running)])  # all may have entered after these steps
        held = slice(oldest - self.first, first - self.first)
        tokens, scores = self.tokens[:, held], self.scores[:, :, held]
        rows, size = self.tokens.shape
        while size < 2 * (first + steps - oldest):
            size *= 2
        self.tokens = np.zeros((rows, size), dtype=np.int32)
        self.scores = np.zeros((4, rows, size), dtype=scores.dtype)
        self.tokens[:, : tokens.shape[1]], self.scores[:, :, : tokens.shape[1]] = tokens, scores
        self.first = oldest


def rows_of(sample: Sample, count: int) -> np.ndarray:
    """The row in which each of its tokens was drawn."""
    rows = np.empty(count, dtype=np.int64)
    for row, first in sample.spans:
        rows[max(first - sample.entered, 0) :] = row
    return rows
