"""The running sequences as tensors: row i is the sample in slot i, and each token's work is done on whole columns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from assay.engine.sampler import Draw, noise_keys, sample, signed
from assay.engine.sequence import Sample


class State(IntEnum):
    """Larger wins where several hold at once."""

    RUNNING = 0
    LENGTH = 1
    STOP = 2
    BROKEN = 3  # the logits were not numbers


COLUMNS = ("token", "length", "count", "limit", "key", "top_k", "state")


class Batch:
    token: Tensor  # the last one drawn
    length: Tensor  # tokens in the cache, which is the position of `token`
    count: Tensor  # tokens drawn
    limit: Tensor  # tokens that may be drawn
    key: Tensor
    top_k: Tensor
    state: Tensor

    def __init__(self, rows: int, stop_width: int, max_new: int, device: torch.device) -> None:
        """`stop_width`: most stop tokens of any request; `max_new`: most new tokens of any sample."""
        self.device, self.max_new = device, max_new
        # One table for all integers, so that a row moves in one operation; -1 marks unused stop tokens.
        self.integers = torch.zeros(rows, len(COLUMNS) + stop_width, dtype=torch.int64, device=device)
        for index, name in enumerate(COLUMNS):
            setattr(self, name, self.integers[:, index])
        self.stops = self.integers[:, len(COLUMNS) :]
        self.floats = torch.ones(rows, 2, device=device)
        self.temperature, self.top_p = self.floats[:, 0], self.floats[:, 1]
        self.tokens = torch.zeros(rows, min(max_new, 64) + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(3, rows, self.tokens.shape[1], device=device)  # engine, sampling, kept mass
        self.greedy = self.random = self.truncate = False

    def add(self, start: int, samples: Sequence[Sample]) -> None:
        """Fill the rows from `start` on with newcomers."""
        params = [sample.job.request.params for sample in samples]
        width = self.stops.shape[1]
        seeds = torch.tensor([signed(sample.job.request.seed) for sample in samples])
        keys = noise_keys(seeds, torch.tensor([sample.index for sample in samples])).tolist()
        integers = [
            [0, s.job.length, 0, s.job.limit, key, p.top_k, State.RUNNING, *padded(p.stop_token_ids, width)]
            for s, p, key in zip(samples, params, keys, strict=True)
        ]
        rows = slice(start, start + len(samples))
        self.integers[rows] = torch.tensor(integers, device=self.device)
        self.floats[rows] = torch.tensor([[p.temperature, p.top_p] for p in params], device=self.device)

    def modes(self, running: Sequence[Sample]) -> None:
        """Note what the sampler has to provide for, whenever rows have come or gone."""
        params = {id(sample.job): sample.job.request.params for sample in running}.values()
        self.greedy = any(p.temperature == 0 for p in params)
        self.random = any(p.temperature > 0 for p in params)
        self.truncate = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        sources, destinations = (torch.tensor(side, device=self.device) for side in zip(*moves, strict=True))
        for table in (self.integers, self.floats, self.tokens):
            table.index_copy_(0, destinations, table.index_select(0, sources))
        self.scores.index_copy_(1, destinations, self.scores.index_select(1, sources))

    def stored(self, size: int) -> None:
        """The last token of each row has gone into the cache."""
        self.length[:size] += self.state[:size] == State.RUNNING

    def draw(self, rows: slice, logits: Tensor) -> None:
        """Sample a token for each row and write it down; rows that have finished stay as they are."""
        draw = sample(
            logits,
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.key[rows],
            self.count[rows],
            greedy=self.greedy,
            random=self.random,
            truncate=self.truncate,
        )
        self._record(rows, draw)

    def _record(self, rows: slice, draw: Draw) -> None:
        count, state = self.count[rows], self.state[rows]
        running = state == State.RUNNING
        at = count[:, None]  # a finished row writes behind its end, where nobody reads
        self.tokens[rows].scatter_(1, at, draw.tokens[:, None])
        scores = torch.stack((draw.engine_logprobs, draw.sampling_logprobs, draw.kept_mass))
        self.scores[:, rows].scatter_(2, at.expand(3, -1, 1), scores[:, :, None])
        ended = (count + 1 >= self.limit[rows]) * State.LENGTH
        if self.stops.shape[1]:
            stopped = (self.stops[rows] == draw.tokens[:, None]).any(1)
            ended = torch.maximum(ended, stopped * State.STOP)
        ended = torch.maximum(ended, draw.engine_logprobs.isnan() * State.BROKEN)
        self.token[rows] = draw.tokens
        self.count[rows] += running
        self.state[rows] = torch.where(running, ended, state)

    def reserve(self, drawn: int) -> None:
        """Room to write down one more token where up to `drawn` were."""
        width = self.tokens.shape[1]
        if drawn + 1 < width or width > self.max_new:
            return
        wider = min(2 * width, self.max_new + 1)
        tokens = self.tokens.new_zeros(self.tokens.shape[0], wider)
        scores = self.scores.new_zeros(3, self.tokens.shape[0], wider)
        tokens[:, :width], scores[:, :, :width] = self.tokens, self.scores
        self.tokens, self.scores = tokens, scores

    def ended(self, size: int) -> list[tuple[int, int]]:
        """(row, state) of the rows that have finished."""
        states = self.state[:size]
        rows = states.nonzero()[:, 0]
        return list(zip(rows.tolist(), states[rows].tolist(), strict=True)) if rows.numel() else []

    def written(self, rows: Sequence[int]) -> list[tuple[list[int], list[list[float]]]]:
        """For each row its tokens, and its engine log-probabilities, sampling log-probabilities and kept masses."""
        chosen = torch.tensor(rows, device=self.device)
        counts = self.count[chosen].tolist()
        tokens = self.tokens[chosen, : max(counts)].tolist()
        engine, sampling, mass = self.scores[:, chosen, : max(counts)].tolist()
        return [(tokens[i][:c], [engine[i][:c], sampling[i][:c], mass[i][:c]]) for i, c in enumerate(counts)]


def padded(stops: Sequence[int], width: int) -> list[int]:
    return [*stops, *[-1] * (width - len(stops))]
