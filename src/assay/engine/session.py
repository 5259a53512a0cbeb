"""One call of `generate`: completions taken from what the rows have drawn, streamed as they come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from assay.engine.base import OnFinish, OnToken, Request, RequestError
from assay.engine.columns import State
from assay.engine.history import History
from assay.engine.rows import Look
from assay.engine.sequence import Job, Sample
from assay.engine.stopping import StopStrings
from assay.types import Completion, Finish

Keep = Callable[[Sample, list[int]], int]  # keeps a finished sequence, all of its tokens given; returns its handle
Ended = dict[Sample, tuple[int, State]]  # with how many tokens, and how


class Session:
    def __init__(
        self,
        rows: int,
        version: int,
        stopping: StopStrings | None,
        keep: Keep,
        on_token: OnToken | None,
        on_finish: OnFinish | None,
        float_type: type[np.floating] = np.float32,
    ) -> None:
        """`float_type` is that of scores."""
        self.version, self.stopping, self.keep = version, stopping, keep
        self.on_token, self.on_finish = on_token, on_finish
        self.history = History(rows, float_type)
        self.results: list[dict[int, Completion]] = []
        self.errors: dict[int, str] = {}
        self.stops = False  # whether any request has stop strings
        self.tokens = 0  # of finished samples

    def numbered(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        """Requests that have come later, counted on."""
        first = len(self.results)
        self.results += [{} for _ in requests]
        return list(enumerate(requests, first))

    def completions(self) -> list[list[Completion]]:
        every: list[list[Completion]] = [
            [] if index in self.errors else [done[sample] for sample in sorted(done)]
            for index, done in enumerate(self.results)
        ]
        if self.errors:
            raise RequestError(self.errors, every)
        return every

    def expect(self, job: Job) -> None:
        """Samples of this job will come."""
        self.stops = self.stops or bool(job.request.params.stop)

    def take(self, look: Look, running: Sequence[Sample]) -> list[tuple[Sample, State]]:
        """Write down what was drawn; returns the samples that have ended, and how."""
        look.wait()
        self.history.write(look, running)
        counts, states = look.after.numpy()
        ended: Ended = {}
        for row in np.flatnonzero(states != State.RUNNING):
            if not look.samples[row].done:
                ended[look.samples[row]] = int(counts[row]), State(int(states[row]))
        self._stop(look, counts, states, ended)
        if self.on_token is not None:
            self._stream(look, counts, states, ended, self.on_token)
        self._finish(ended)
        return [(sample, state) for sample, (_, state) in ended.items()]

    def drawn(self, sample: Sample, count: int) -> list[int]:
        """All tokens of a sample that has drawn `count`; scores of what is new are put aside with it."""
        _, scores = self.history.read([sample], count - len(sample.drawn))
        sample.scores.append(scores[:, 0].copy())
        return self._written(sample, count).tolist()

    def _written(self, sample: Sample, count: int) -> np.ndarray:
        new = self.history.tokens_of(sample, count - len(sample.drawn))
        return np.concatenate((sample.drawn, new), dtype=np.int32) if sample.drawn else new

    def _stop(self, look: Look, counts: np.ndarray, states: np.ndarray, ended: Ended) -> None:
        """Look for stop strings, which the device does not know of: it may have gone on."""
        rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, sample in enumerate(look.samples if self.stops else ()):
            if (stops := sample.job.request.params.stop) and not sample.done:
                rows[stops].append(row)
        for stops, theirs in rows.items():
            assert self.stopping is not None, "a job with stop strings was taken without a way to decode"
            suspects = self.stopping.suspects(look.tokens.numpy()[:, theirs], stops)
            for column in np.flatnonzero(suspects.any(0)).tolist():
                row = theirs[column]
                sample, count = look.samples[row], int(counts[row]) - (states[row] == State.BROKEN)
                written = self._written(sample, count)
                for place in (earlier(sample, look) + np.flatnonzero(suspects[:, column])).tolist():
                    if place < count and self.stopping.completed(written[: place + 1], stops):
                        ended[sample] = place + 1, State.STOP
                        break

    def _stream(self, look: Look, counts: np.ndarray, states: np.ndarray, ended: Ended, on_token: OnToken) -> None:
        for row, sample in enumerate(look.samples):
            if not sample.done:
                count, state = ended.get(sample, (int(counts[row]), states[row]))
                new = count - earlier(sample, look) - (state == State.BROKEN)
                for token in look.tokens[:new, row].tolist():
                    on_token(sample.job.index, sample.index, token)

    def _finish(self, ended: Ended) -> None:
        alike: dict[tuple[int, int], list[Sample]] = defaultdict(list)  # read together: most end together or alone
        for sample, (count, state) in ended.items():
            sample.done = True
            if state == State.BROKEN:
                self.errors.setdefault(sample.job.index, broken(sample, count - 1))
            else:
                alike[sample.entered, count - len(sample.drawn)].append(sample)
        for (_, new), samples in alike.items():
            tokens, scores = self.history.read(samples, new)
            means = scores[2:].mean(-1, dtype=np.float64)  # or it depends on who else has ended in this step
            engine_scores = scores[0].tolist()
            same = np.array_equal(scores[0], scores[1])  # without truncation; a copied list costs less than a new one
            sampling_scores = [list(row) for row in engine_scores] if same else scores[1].tolist()
            rows = zip(samples, tokens.tolist(), engine_scores, sampling_scores, means.T.tolist(), strict=True)
            for sample, ids, engine, sampling, (mass, entropy) in rows:
                finish = Finish.STOP if ended[sample][1] == State.STOP else Finish.LENGTH
                completion = Completion(ids, engine, sampling, finish, self.version, mass, entropy)
                self._hand_over(sample, completion)

    def _hand_over(self, sample: Sample, completion: Completion) -> None:
        if sample.drawn:
            with_earlier(completion, sample)
        if sample.job.request.keep:
            completion.handle = self.keep(sample, [*sample.job.tokens, *completion.token_ids])
        self.results[sample.job.index][sample.index] = completion
        self.tokens += len(completion.token_ids)
        if self.on_finish is not None:
            self.on_finish(sample.job.index, sample.index, completion)


def earlier(sample: Sample, look: Look) -> int:
    """Tokens that it had drawn before these steps."""
    return len(sample.drawn) + look.first - sample.entered


def with_earlier(completion: Completion, sample: Sample) -> None:
    """Put what was drawn before preemptions in front."""
    scores = np.concatenate(sample.scores, axis=1)
    before, new = scores.shape[1], len(completion.token_ids)
    completion.token_ids = [*sample.drawn, *completion.token_ids]
    completion.engine_logprobs = [*scores[0].tolist(), *completion.engine_logprobs]
    completion.sampling_logprobs = [*scores[1].tolist(), *completion.sampling_logprobs]
    mass, entropy = scores[2:].mean(-1, dtype=np.float64).tolist()
    completion.kept_mass = (mass * before + completion.kept_mass * new) / (before + new)
    completion.entropy = (entropy * before + completion.entropy * new) / (before + new)


def broken(sample: Sample, position: int) -> str:
    return (
        f"{sample.job.name}: the model's output for token {position} of sample {sample.index} is not a number (NaN): "
        "its weights are broken, perhaps by a diverged training run; go back to an earlier checkpoint"
    )
