"""The sampling kernels against the torch sampler and float64 references."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from assay.engine.native.kernels import sampling
from assay.engine.sampler import noise_keys, sample_rows
from assay.engine.sequence import FORBIDDEN_SLOTS, WIDTH, Column, RowState

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: not a number, minus inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Row:
    """Sampling parameters and state of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    forbidden: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    min_new: int = 0
    limit: int = 1000
    count: int = 0
    state: RowState = RowState.RUNNING


class Step:
    """The tables that a step reads and writes, for these rows and one more that must not change."""

    def __init__(self, rows: list[Row], logits: Tensor, keys: Tensor | None = None) -> None:
        size = len(rows) + 1
        self.logits = logits
        self.ints = torch.full((size, WIDTH), -1)
        self.ints[:, : Column.STOPS] = 0
        self.floats, self.forbidden = torch.zeros(size, 4), torch.full((size, FORBIDDEN_SLOTS), -1)
        self.ints[:, Column.KEY] = noise_keys(torch.arange(size), torch.arange(size)) if keys is None else keys
        self.ints[:, Column.POSITION] = 40
        for i, row in enumerate(rows):
            self.floats[i, :3] = torch.tensor([row.temperature, row.top_p, row.min_p])
            self.ints[i, [Column.TOP_K, Column.COUNT, Column.LIMIT]] = torch.tensor([row.top_k, row.count, row.limit])
            self.ints[i, Column.MIN_NEW], self.ints[i, Column.STATE] = row.min_new, row.state
            self.ints[i, Column.FORBIDDEN] = len(row.forbidden)
            self.forbidden[i, : len(row.forbidden)] = torch.tensor(row.forbidden, dtype=torch.int64)
            for slot, token in enumerate(row.stops):
                self.ints[i, Column.STOPS + slot] = token
        self.before = self.ints.clone()
        self.at = torch.tensor([6])
        self.log_tokens = torch.full((4, size), 77, dtype=torch.int32)
        self.log_scores = torch.full((4, 4, size), 77.0)

    def run(self) -> Step:
        """Run the kernels and copy all results to the CPU."""
        scratch = sampling.Scratch(*self.logits.shape, DEVICE)
        names = ("logits", "ints", "floats", "forbidden", "at", "log_tokens", "log_scores")
        tables = [getattr(self, name).to(DEVICE, copy=True) for name in names]
        sampling.sample(*tables, scratch)
        for name, table in zip(names[1:], tables[1:], strict=True):
            setattr(self, name, table.cpu())
        self.kept = scratch.kept.cpu()
        return self

    def run_in_torch(self) -> Step:
        tables = (self.ints, self.floats, self.forbidden, self.at, self.log_tokens, self.log_scores)
        sample_rows(self.logits.clone(), *tables)
        return self

    @property
    def tokens(self) -> Tensor:
        return self.log_tokens[2, :-1].long()

    @property
    def scores(self) -> Tensor:
        """[4, N]: engine, sampling, kept mass, entropy."""
        return self.log_scores[:, 2, :-1]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a small vocabulary has several."""
    monkeypatch.setattr(sampling, "CHUNK", 16)
    monkeypatch.setattr(sampling, "SPAN", 32)


def random_logits(rows: int, vocabulary: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


MANY = [
    Row(),
    Row(temperature=0.7),
    Row(temperature=0.0),
    Row(temperature=0.0, forbidden=[3, 30], top_k=3),
    Row(temperature=1.5, forbidden=[0, 1, 2, 36]),
    Row(top_k=3, temperature=0.8),
    Row(top_k=20),
    Row(top_k=10_000),
    Row(top_p=0.7),
    Row(top_p=0.99, temperature=1.3),
    Row(min_p=0.2),
    Row(top_k=15, top_p=0.9, min_p=0.02, forbidden=[5, 11], stops=[7, 8], min_new=1),
    Row(stops=[1, 2], min_new=4, count=4),
]


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "ties"),
    [
        (37, torch.bfloat16, True),
        pytest.param(37, torch.float32, False, marks=pytest.mark.slow),
        pytest.param(5000, torch.float32, False, marks=pytest.mark.slow),
    ],
)
def test_kernels_sample_the_same_tokens_as_the_torch_sampler(
    vocabulary: int, dtype: torch.dtype, ties: bool, request: pytest.FixtureRequest
) -> None:
    if vocabulary < 100:
        request.getfixturevalue("small_chunks")
    logits = random_logits(len(MANY), vocabulary).to(dtype)
    if ties:
        logits = logits.round() / 2
        logits[5] = -3.25  # all equal
    logits[4, 1] = 40.0  # a forbidden token with almost all of the probability
    logits[3, 30] = logits[11, 5] = 8.0  # and some with much of it
    logits[1, 5:20] = -math.inf
    theirs, mine = (Step(MANY, logits) for _ in range(2))
    theirs.run_in_torch()
    mine.run()
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert torch.allclose(mine.scores, theirs.scores, atol=1e-5)
    assert torch.equal(mine.ints, theirs.ints)
    assert torch.equal(mine.log_tokens[:, -1], theirs.log_tokens[:, -1])


@pytest.mark.parametrize("run", [Step.run, Step.run_in_torch])
def test_a_step_logs_tokens_and_updates_states(small_chunks: None, run: Callable[[Step], Step]) -> None:
    nan = float("nan")
    rows = [
        Row(),
        Row(stops=[0, 4], limit=1),  # also reaches its limit: the stop token wins
        Row(limit=1),
        Row(),
        Row(top_p=0.5),
        Row(state=RowState.IDLE, forbidden=[1]),
        Row(state=RowState.STOP),
        Row(stops=[8], min_new=1),  # below its minimum length
        Row(forbidden=[0, *range(9, 37)]),
    ]
    logits = torch.full((9, 37), -30.0)
    logits[torch.arange(9), torch.tensor([3, 4, 5, 6, 7, 8, 0, 8, 0])] = 30.0  # almost certain
    logits[3, 20], logits[4, 36], logits[5, 0] = nan, nan, nan
    logits[7, 2] = logits[8, 1] = 0.0
    step = run(Step(rows, logits))
    ran, well = [0, 1, 2, 3, 4, 7, 8], [0, 1, 2, 7, 8]
    states = [
        RowState.RUNNING,
        RowState.STOP,
        RowState.LENGTH,
        RowState.BROKEN,
        RowState.BROKEN,
        RowState.IDLE,
        RowState.STOP,
    ]
    assert step.ints[:9, Column.STATE].tolist() == [*states, RowState.RUNNING, RowState.RUNNING]
    assert step.tokens[well].tolist() == [3, 4, 5, 2, 1]
    assert step.ints[ran, Column.TOKEN].tolist() == step.tokens[ran].tolist()
    assert step.ints[ran, Column.COUNT].tolist() == [1] * 7 and step.ints[ran, Column.POSITION].tolist() == [41] * 7
    assert torch.equal(step.ints[[5, 6, 9]], step.before[[5, 6, 9]])
    others = [c for c in range(WIDTH) if c not in (Column.TOKEN, Column.COUNT, Column.POSITION, Column.STATE)]
    assert torch.equal(step.ints[:, others], step.before[:, others])
    untouched = torch.ones(4, 10, dtype=torch.bool)
    untouched[2, ran] = False
    assert (step.log_tokens[untouched] == 77).all() and (step.log_scores[:, untouched] == 77).all()
    assert step.scores[0].isnan().nonzero()[:, 0].tolist() == [3, 4]
    assert step.scores[:, 0].tolist() == pytest.approx([0, 0, 1, 0], abs=1e-6)
    assert step.scores[:2, 7].tolist() == pytest.approx([-30, 0], abs=1e-6)
    assert step.scores[2, 7].item() == pytest.approx(math.exp(-30), rel=1e-5)


def test_a_row_without_allowed_tokens_is_broken_and_no_other(small_chunks: None) -> None:
    everything = list(range(37))
    rows = [Row(forbidden=everything), Row(), Row(temperature=0.0, forbidden=everything), Row(top_k=2)]
    rows += [Row(top_p=0.5, forbidden=everything), Row(forbidden=[3])]
    logits = torch.zeros(6, 37)
    logits[3] = -math.inf
    logits[5, 3] = float("nan")  # forbidden, but it is part of the log-probabilities of the others
    step = Step(rows, logits).run()
    assert step.scores[0].isnan().tolist() == [True, False, True, True, True, True]
    assert step.ints[:6, Column.STATE].tolist() == [RowState.BROKEN, RowState.RUNNING, *[RowState.BROKEN] * 4]
    assert ((step.tokens >= 0) & (step.tokens < 37)).all()
    assert step.scores[0, 1].item() == pytest.approx(-math.log(37), abs=1e-6)
    assert step.scores[3, 1].item() == pytest.approx(math.log(37), abs=1e-6)


def test_greedy_sampling_breaks_ties_by_the_lowest_id(small_chunks: None) -> None:
    logits = torch.randint(0, 3, (6, 37), generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[0, :20] = 0
    step = Step([Row(temperature=0.0)] * 6, logits).run()
    assert step.tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
