"""From what the rows have sampled to events: finds out which sequences have ended and makes their completions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from assay.engine.base import Event, Failed, Finished, TokenChunk
from assay.engine.columns import RowState
from assay.engine.history import History
from assay.engine.rows import StepOutput
from assay.engine.sequence import Job, Sample
from assay.engine.stopping import StopStrings
from assay.engine.versions import VersionLog, merged
from assay.types import Completion, Finish

Keep = Callable[[Sample, list[int]], int]  # keeps a finished sequence, given all of its tokens; returns its handle
Ended = dict[Sample, tuple[int, RowState]]  # number of tokens, and why it ended


class OutputProcessor:
    """Holds what unfinished requests have written so far, and nothing of finished ones."""

    def __init__(
        self,
        rows: int,
        stopping: StopStrings | None,
        keep: Keep,
        float_type: type[np.floating] = np.float32,
        digests: bool = False,
    ) -> None:
        """`float_type`: of log-probabilities and entropies. `digests`: keep a digest of sampled tokens."""
        self.rows, self.stopping, self.keep, self.float_type = rows, stopping, keep, float_type
        self.jobs: dict[int, Job] = {}  # unfinished requests, by id
        self.events: list[Event] = []  # not yet returned by `step`
        self.versions = VersionLog()
        self.tokens = 0  # of all finished samples
        self.stop_jobs = self.stream_jobs = 0  # unfinished requests with stop strings, and with streaming
        self.digests = digests
        self.start(0)

    def start(self, step: int) -> None:
        """Prepare for requests whose first step is `step`. No sample may be running."""
        self.history = History(self.rows, self.float_type)
        self.history.first = step
        self.versions.start(step)
        self.hash = hashlib.blake2b(digest_size=7) if self.digests else None  # fits an int64, whatever its sign

    def clear(self, step: int) -> None:
        """Drop all requests."""
        self.jobs.clear()
        self.events.clear()
        self.stop_jobs = self.stream_jobs = 0
        self.start(step)

    def digest(self) -> int:
        """Of the tokens of all samples that have finished since `start`, in that order."""
        assert self.hash is not None
        return int.from_bytes(self.hash.digest(), "little")

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.stop_jobs += bool(job.request.params.stop)
        self.stream_jobs += job.request.stream

    def remove(self, job: Job) -> None:
        """The request is finished, failed or aborted."""
        if self.jobs.pop(job.id, None) is not None:
            self.stop_jobs -= bool(job.request.params.stop)
            self.stream_jobs -= job.request.stream

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> tuple[list[Sample], list[int]]:
        """Drop the events of requests, or of single samples given as (request id, sample), that were not yet returned.

        Returns their unfinished samples, each once, and the handles of finished ones, which nobody will learn of.
        """
        named = set(ids)

        def is_named(request_id: int, sample: int) -> bool:
            return request_id in named or (request_id, sample) in named

        handles: list[int] = []
        events, self.events = self.events, []
        for event in events:
            if isinstance(event, Failed):
                dropped = event.request_id in named
            elif dropped := is_named(event.request_id, event.sample):
                handles += handles_of([event])
            if not dropped:
                self.events.append(event)
        requests = sorted({one[0] if isinstance(one, tuple) else one for one in named})
        jobs = [self.jobs[request_id] for request_id in requests if request_id in self.jobs]
        return [s for job in jobs for s in job.samples if not s.done and is_named(job.id, s.index)], handles

    def fail(self, request_id: int, error: str) -> None:
        self.events.append(Failed(request_id, error))

    def process(self, output: StepOutput, running: Sequence[Sample]) -> list[tuple[Sample, RowState]]:
        """Record what was sampled and append events; returns the samples that have ended, and why."""
        output.wait()
        self.history.write(output, running)
        counts, states = output.after.numpy()
        ended: Ended = {}
        for row in np.flatnonzero(states != RowState.RUNNING):
            if not output.samples[row].done:
                ended[output.samples[row]] = int(counts[row]), RowState(int(states[row]))
        if self.stop_jobs:
            self._find_stop_strings(output, counts, states, ended)
        if self.stream_jobs:
            self._stream(output, counts, states, ended)
        self._finish(ended)
        return [(sample, state) for sample, (_, state) in ended.items()]

    def pause(self, sample: Sample, count: int) -> None:
        """Before a preemption: store what the sample has written since it entered; it has `count` tokens in all."""
        new = count - len(sample.drawn)
        _, scores = self.history.read([sample], new)
        sample.scores.append(scores[:, 0].copy())
        sample.versions += self.versions.spans(sample.entered, new)
        sample.drawn = self._written(sample, count).tolist()

    def _written(self, sample: Sample, count: int) -> np.ndarray:
        new = self.history.tokens_of(sample, count - len(sample.drawn))
        return np.concatenate((sample.drawn, new), dtype=np.int32) if sample.drawn else new

    def _find_stop_strings(self, output: StepOutput, counts: np.ndarray, states: np.ndarray, ended: Ended) -> None:
        """The device knows nothing of stop strings and may have continued behind one."""
        rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, sample in enumerate(output.samples):
            if (stops := sample.job.request.params.stop) and not sample.done:
                rows[stops].append(row)
        for stops, own_rows in rows.items():
            assert self.stopping is not None, "a job with stop strings was accepted without a way to decode"
            suspects = self.stopping.suspects(output.tokens.numpy()[:, own_rows], stops)
            for column in np.flatnonzero(suspects.any(0)).tolist():
                row = own_rows[column]
                sample, count = output.samples[row], int(counts[row]) - (states[row] == RowState.BROKEN)
                written = self._written(sample, count)
                for position in (tokens_before(sample, output) + np.flatnonzero(suspects[:, column])).tolist():
                    if position < count and self.stopping.completed(written[: position + 1], stops):
                        ended[sample] = position + 1, RowState.STOP
                        break

    def _stream(self, output: StepOutput, counts: np.ndarray, states: np.ndarray, ended: Ended) -> None:
        for row, sample in enumerate(output.samples):
            if sample.job.request.stream and not sample.done:
                count, state = ended.get(sample, (int(counts[row]), states[row]))
                new = count - tokens_before(sample, output) - (state == RowState.BROKEN)
                if new > 0:
                    ids, logprobs = output.tokens[:new, row].tolist(), output.scores[0, :new, row].tolist()
                    self.events.append(TokenChunk(sample.job.id, sample.index, ids, logprobs))

    def _finish(self, ended: Ended) -> None:
        alike: dict[tuple[int, int], list[Sample]] = defaultdict(list)  # read together: most end together or alone
        for sample, (count, state) in ended.items():
            sample.done = True
            if state == RowState.BROKEN:
                if sample.job.id in self.jobs:
                    self.fail(sample.job.id, not_a_number(sample, count - 1))
                    self.remove(sample.job)
            else:
                alike[sample.entered, count - len(sample.drawn)].append(sample)
        for (entered, new), samples in alike.items():
            tokens, scores = self.history.read(samples, new)
            means = scores[2:].mean(-1, dtype=np.float64)  # float64, or it depends on which samples end in this step
            engine_logprobs = scores[0].tolist()
            same = np.array_equal(scores[0], scores[1])  # without truncation; copying a list is cheaper than a new one
            sampling_logprobs = [list(row) for row in engine_logprobs] if same else scores[1].tolist()
            spans = self.versions.spans(entered, new)
            rows = zip(samples, tokens.tolist(), engine_logprobs, sampling_logprobs, means.T.tolist(), strict=True)
            for sample, ids, engine, sampling, (mass, entropy) in rows:
                finish = Finish.STOP if ended[sample][1] == RowState.STOP else Finish.LENGTH
                completion = Completion(ids, engine, sampling, finish, spans[0][0], mass, entropy)
                self._hand_over(sample, completion, spans)

    def _hand_over(self, sample: Sample, completion: Completion, spans: list[tuple[int, int]]) -> None:
        job = sample.job
        if job.id not in self.jobs:
            return  # another sample of it has failed
        if sample.drawn:
            prepend_earlier(completion, sample)
        if sample.versions or len(spans) > 1:
            joined = merged([*sample.versions, *spans])
            completion.version, completion.version_spans = joined[0][0], joined if len(joined) > 1 else ()
        if job.request.keep:
            completion.handle = self.keep(sample, [*job.tokens, *completion.token_ids])
        self.tokens += len(completion.token_ids)
        if self.hash is not None:
            self.hash.update(np.array([sample.index, *completion.token_ids], dtype=np.int64).tobytes())
        self.events.append(Finished(job.id, sample.index, completion))
        job.unfinished -= 1
        if not job.unfinished:
            self.remove(job)
            job.samples.clear()  # they refer to the job: without this only the garbage collector could free them


def handles_of(events: Iterable[Event]) -> list[int]:
    """Of kept sequences that these events tell of."""
    finished = (event.completion.handle for event in events if isinstance(event, Finished))
    return [handle for handle in finished if handle is not None]


def tokens_before(sample: Sample, output: StepOutput) -> int:
    """Number of tokens that the sample had before these steps."""
    return len(sample.drawn) + output.first - sample.entered


def prepend_earlier(completion: Completion, sample: Sample) -> None:
    """Put the tokens sampled before preemptions in front."""
    scores = np.concatenate(sample.scores, axis=1)
    before, new = scores.shape[1], len(completion.token_ids)
    completion.token_ids = [*sample.drawn, *completion.token_ids]
    completion.engine_logprobs = [*scores[0].tolist(), *completion.engine_logprobs]
    completion.sampling_logprobs = [*scores[1].tolist(), *completion.sampling_logprobs]
    mass, entropy = scores[2:].mean(-1, dtype=np.float64).tolist()
    completion.kept_mass = (mass * before + completion.kept_mass * new) / (before + new)
    completion.entropy = (entropy * before + completion.entropy * new) / (before + new)


def not_a_number(sample: Sample, position: int) -> str:
    return (
        f"{sample.job.name}: the model's output for token {position} of sample {sample.index} is not a number (NaN): "
        "its weights are broken, perhaps by a diverged training run; go back to an earlier checkpoint"
    )
