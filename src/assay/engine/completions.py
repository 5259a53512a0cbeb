"""From sampled tokens to events: detects stop strings and finished sequences, and builds their completions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from assay.engine.base import Decode, Event, Failed, Finished, TokenChunk
from assay.engine.sampler import StepOutput
from assay.engine.sequence import Job, RowState, Sample
from assay.types import Completion, Finish

MARGIN = 4  # extra tokens before the tail: decoding may treat the first ones differently (spaces, parts of a character)
BROKEN = "\ufffd"  # what a part of a character decodes to
TABLES = 64  # sets of stop strings with a cached table of one byte per token of the vocabulary
HISTORY_STEPS = 256  # initial capacity of `History`
STATES = tuple(RowState)  # an index is faster than a call of the enumeration
CONVERT_STEPS = 16  # steps between two conversions of sampled tokens and scores to lists

Span = tuple[int, int]  # (version, number of consecutive tokens that it sampled)


class TokenKind(IntEnum):
    UNKNOWN, CANNOT, MAY = range(3)


class StopStrings:
    """Finds stop strings. Few tokens can complete one, and only those are decoded; they are cached as they occur."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.added: dict[int, tuple[str, ...]] = {}  # texts that each token can add
        self.kinds: dict[tuple[str, ...], np.ndarray] = {}  # by stop strings: a `TokenKind` per token
        self.word_end: int | None = None  # a token whose trailing space appears only if another token follows

    def suspects(self, tokens: np.ndarray, stops: tuple[str, ...]) -> np.ndarray:
        """Which of these tokens can complete one of the stop strings, for any tokens before them."""
        kinds = self.kinds.get(stops, np.zeros(0, dtype=np.int8))
        if (size := int(tokens.max(initial=0)) + 1) > len(kinds):
            kinds = self._grown(kinds, 2 * size, stops)
        kind = kinds[tokens]
        if not kind.all():
            unknown = np.unique(tokens[kind == TokenKind.UNKNOWN]).tolist()
            if self.word_end is None and self._find_word_end(unknown):
                return self.suspects(tokens, stops)
            for token in unknown:
                if token not in self.added:
                    self.added[token] = added_by(token, self.decode, self.word_end)
                kinds[token] = TokenKind.MAY if may_complete(self.added[token], stops) else TokenKind.CANNOT
            kind = kinds[tokens]
        return kind == TokenKind.MAY

    def _grown(self, kinds: np.ndarray, size: int, stops: tuple[str, ...]) -> np.ndarray:
        if stops not in self.kinds and len(self.kinds) == TABLES:
            del self.kinds[next(iter(self.kinds))]
        table = self.kinds[stops] = np.zeros(size, dtype=np.int8)
        table[: len(kinds)] = kinds
        return table

    def _find_word_end(self, tokens: Sequence[int]) -> bool:
        """Look for a token that ends words, such as "word</w>"; clear the caches if there is one.

        Its trailing space matters only for later tokens, so it is known in time.
        """
        for token in (token for token in tokens if token not in self.added):
            first, both = self.decode([token]), self.decode([token, token])
            if both != first + first and both.startswith(first) and BROKEN not in both:
                self.word_end = token
                self.added.clear()
                self.kinds.clear()
                return True
        return False

    def completed(self, token_ids: Sequence[int] | np.ndarray, stops: Sequence[str]) -> bool:
        return completes_stop(token_ids, stops, self.decode)


def added_by(token: int, decode: Decode, word_end: int | None = None) -> tuple[str, ...]:
    """Texts that a token can add: as the first token (which may lose a space), after itself, and after `word_end`.

    `BROKEN` if its text depends on its neighbours.
    """
    texts = {decode([token])}
    for before in (token, token if word_end is None else word_end):
        alone, both = decode([before]), decode([before, token])
        if BROKEN in both or not both.startswith(alone):
            return (BROKEN,)
        texts.add(both[len(alone) :])
    return tuple(texts)


def may_complete(added: Sequence[str], stops: Sequence[str]) -> bool:
    """Whether one of the stop strings can end within the text that a token adds."""
    return BROKEN in added or any(ends_in(stop, text) for stop in stops for text in added)


def ends_in(stop: str, text: str) -> bool:
    """Whether the stop string can end within this text, starting in it or before it."""
    return stop in text or any(stop.endswith(text[:end]) for end in range(1, min(len(text), len(stop)) + 1))


def completes_stop(token_ids: Sequence[int] | np.ndarray, stops: Sequence[str], decode: Decode) -> bool:
    """Whether the last token completes one of the stop strings. The tokens before it must not contain one."""
    longest = max(len(stop) for stop in stops)
    window = longest + MARGIN
    while True:
        tail = np.asarray(token_ids[-window:]).tolist()  # a long sequence is not converted as a whole
        text = decode(tail)
        before = decode(tail[:-1]).rstrip(BROKEN)  # the last token may have completed a character
        start = len(before) + 1 - longest if text.startswith(before) else 0  # first possible start of the stop string
        # Tokens that decode to nothing can make the tail too short for the stop string. A tail that starts within a
        # character may not decode at all, since bytes are decoded together.
        if window >= len(token_ids):
            return any(stop in text for stop in stops)
        if start >= MARGIN and not text.startswith(BROKEN):
            return any(stop in text[start:] for stop in stops)
        window *= 2


class VersionLog:
    """The first step of each weights version that running sequences have used."""

    def __init__(self) -> None:
        self.current = -1
        self.starts: list[tuple[int, int]] = [(0, -1)]  # (first step, version), ascending

    def start(self, step: int) -> None:
        """Keep only the current version, from `step` on. No sequence may be running."""
        self.starts = [(step, self.current)]

    def update(self, version: int, step: int, oldest: int) -> None:
        """Record that `version` is served from `step` on; no running sequence entered before the step `oldest`."""
        self.current = version
        self.starts.append((step, version))
        while len(self.starts) > 1 and self.starts[1][0] <= oldest:
            del self.starts[0]

    def spans(self, first: int, count: int) -> list[Span]:
        """Spans of the `count` tokens that were sampled from step `first` on, one per step."""
        if len(self.starts) == 1:
            return [(self.starts[0][1], count)]
        end = first + count
        bounds = [first, *(min(max(start, first), end) for start, _ in self.starts[1:]), end]
        sizes = (stop - start for start, stop in pairwise(bounds))
        return [(version, size) for (_, version), size in zip(self.starts, sizes, strict=True) if size]


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Join adjacent spans of the same version; drop empty ones."""
    groups = groupby((span for span in spans if span[1]), key=itemgetter(0))
    return tuple((version, sum(count for _, count in group)) for version, group in groups)


class History:
    """Sampled tokens and their scores on the host, by row and step, until the sequences that they belong to finish."""

    def __init__(self, rows: int, float_type: type[np.floating] = np.float32) -> None:
        self.first = 0  # step of the first column
        self.tokens = np.zeros((rows, HISTORY_STEPS), dtype=np.int32)
        self.scores = np.zeros((4, rows, HISTORY_STEPS), dtype=float_type)

    def write(self, output: StepOutput, running: Sequence[Sample]) -> None:
        steps, rows = output.tokens.shape
        if output.first + steps - self.first > self.tokens.shape[1]:
            self._reallocate(output.first, steps, running)
        columns = slice(output.first - self.first, output.first - self.first + steps)
        self.tokens[:rows, columns] = output.tokens.numpy().T
        self.scores[:, :rows, columns] = output.scores.numpy().swapaxes(1, 2)

    def read(self, samples: Sequence[Sample], first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [samples, count] and scores [4, samples, count] of steps from `first` on, in which all are running."""
        start = first - self.first
        stop = start + count
        rows = [sample.spans[-1][0] for sample in samples]
        moved = [index for index, sample in enumerate(samples) if sample.spans[-1][1] > first]
        if moved:
            rows_by_step = np.repeat(np.array(rows)[:, None], count, axis=1)
            for index in moved:
                rows_by_step[index] = rows_of(samples[index], first, count)
            steps = np.arange(start, stop)
            return self.tokens[rows_by_step, steps], np.ascontiguousarray(self.scores[:, rows_by_step, steps])
        if rows == list(range(rows[0], rows[0] + len(rows))):  # without a copy
            held = slice(rows[0], rows[0] + len(rows))
            return self.tokens[held, start:stop], self.scores[:, held, start:stop]
        return self.tokens[rows, start:stop], self.scores[:, rows, start:stop]

    def _reallocate(self, first: int, steps: int, running: Sequence[Sample]) -> None:
        """Drop steps before the oldest running sample; double the capacity unless half of it is free then."""
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


def rows_of(sample: Sample, first: int, count: int) -> np.ndarray:
    """The row of a sample in each step from `first` on."""
    rows = np.empty(count, dtype=np.int64)
    for row, start in sample.spans:
        rows[max(start - first, 0) :] = row
    return rows


Keep = Callable[[Sample, list[int]], int]  # keeps a finished sequence, given all its tokens; returns its handle
Ended = dict[Sample, tuple[int, RowState]]  # number of tokens, and the state that ended it


class OutputProcessor:
    """Holds the tokens of unfinished requests and the events that `step` has not returned yet."""

    def __init__(
        self,
        rows: int,
        decode: Decode | None,
        keep: Keep,
        float_type: type[np.floating],
        digests: bool = False,
    ) -> None:
        """`decode`: for stop strings. `float_type`: of scores. `digests`: compute a digest of sampled tokens."""
        self.rows, self.keep, self.float_type = rows, keep, float_type
        self.stopping = StopStrings(decode) if decode else None
        self.jobs: dict[int, Job] = {}  # unfinished requests, by id
        self.events: list[Event] = []  # not yet returned by `step`
        self.versions = VersionLog()
        self.tokens = 0  # number of tokens of all finished samples
        self.sampled = 0  # number of sampled tokens, including unfinished samples and those after the end of a sample
        self.stop_jobs = self.stream_jobs = 0  # unfinished requests with stop strings, and with streaming
        self.digests = digests
        self.start(0)

    def start(self, step: int) -> None:
        """Prepare for requests whose first step is `step`. No sample may be running."""
        self.history = History(self.rows, self.float_type)
        self.history.first = step
        self.unconverted = 0  # steps since the last conversion
        self.versions.start(step)
        self.hash = hashlib.blake2b(digest_size=7) if self.digests else None  # 56 bits fit an int64

    def clear(self, step: int) -> None:
        """Drop all requests."""
        self.jobs.clear()
        self.events.clear()
        self.stop_jobs = self.stream_jobs = 0
        self.start(step)

    def digest(self) -> int:
        """Digest of the tokens of all samples that have finished since `start`, in that order."""
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
        """Remove a request that is finished, failed or aborted."""
        if self.jobs.pop(job.id, None) is not None:
            self.stop_jobs -= bool(job.request.params.stop)
            self.stream_jobs -= job.request.stream

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> tuple[list[Sample], list[int]]:
        """Drop unreturned events of requests, or of single samples given as (request id, sample).

        Returns their unfinished samples, each once, and the handles in dropped events.
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
        requests = sorted({target[0] if isinstance(target, tuple) else target for target in named})
        jobs = [self.jobs[request_id] for request_id in requests if request_id in self.jobs]
        return [s for job in jobs for s in job.samples if not s.done and is_named(job.id, s.index)], handles

    def fail(self, request_id: int, error: str) -> None:
        self.events.append(Failed(request_id, error))

    def process(self, output: StepOutput, running: Sequence[Sample]) -> list[tuple[Sample, RowState]]:
        """Record sampled tokens and append events; return the samples that have ended, with their states."""
        output.wait()
        self.history.write(output, running)
        self.sampled += output.tokens.numel()
        counts, states = output.after.numpy()
        ended: Ended = {}
        rows = np.flatnonzero(states != RowState.RUNNING)
        for row, count, state in zip(rows.tolist(), counts[rows].tolist(), states[rows].tolist(), strict=True):
            if not output.samples[row].done:
                ended[output.samples[row]] = count, STATES[state]
        if self.stop_jobs:
            self._find_stop_strings(output, counts, states, ended)
        if self.stream_jobs:
            self._stream(output, counts, states, ended)
        self._finish(ended)
        self.unconverted += len(output.tokens)
        if self.unconverted >= CONVERT_STEPS:  # while a GPU takes the next steps, not all at once at the end
            pairs = zip(output.samples, counts.tolist(), strict=True)
            self._convert({sample: count for sample, count in pairs if not sample.done})
            self.unconverted = 0
        return [(sample, state) for sample, (_, state) in ended.items()]

    def pause(self, sample: Sample, count: int) -> None:
        """Before a preemption: store the tokens that a sample, which has `count` tokens, got since it entered."""
        new = count - len(sample.drawn)
        _, scores = self.history.read([sample], sample.entered, new)
        sample.scores = [*sample.scores, scores[2:, 0].copy()]
        sample.versions = [*sample.versions, *self.versions.spans(sample.entered, new)]
        self._convert({sample: count})
        sample.drawn = list(sample.token_ids)

    def _sampled(self, sample: Sample, count: int) -> np.ndarray:
        (new,), _ = self.history.read([sample], sample.entered, count - len(sample.drawn))
        return np.concatenate((sample.drawn, new), dtype=np.int32) if sample.drawn else new

    def _find_stop_strings(self, output: StepOutput, counts: np.ndarray, states: np.ndarray, ended: Ended) -> None:
        """Find samples that contain a stop string. The device does not check for these and may have continued."""
        rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, sample in enumerate(output.samples):
            if (stops := sample.job.request.params.stop) and not sample.done:
                rows[stops].append(row)
        for stops, own_rows in rows.items():
            assert self.stopping is not None, "a job with stop strings was accepted without a decode function"
            suspects = self.stopping.suspects(output.tokens.numpy()[:, own_rows], stops)
            for column in np.flatnonzero(suspects.any(0)).tolist():
                row = own_rows[column]
                sample, count = output.samples[row], int(counts[row]) - (states[row] == RowState.BROKEN)
                sampled = self._sampled(sample, count)
                for position in (tokens_before(sample, output) + np.flatnonzero(suspects[:, column])).tolist():
                    if position < count and self.stopping.completed(sampled[: position + 1], stops):
                        ended[sample] = position + 1, RowState.STOP
                        break

    def _stream(self, output: StepOutput, counts: np.ndarray, states: np.ndarray, ended: Ended) -> None:
        # Converted for all rows at once: indexing tensors row by row would take longer than a decoding step.
        tokens, logprobs = output.tokens.numpy().T.tolist(), output.scores[0].numpy().T.tolist()
        for row, sample in enumerate(output.samples):
            if sample.job.request.stream and not sample.done:
                count, state = ended.get(sample, (int(counts[row]), states[row]))
                new = count - tokens_before(sample, output) - (state == RowState.BROKEN)
                if new > 0:
                    self.events.append(TokenChunk(sample.job.id, sample.index, tokens[row][:new], logprobs[row][:new]))

    def _convert(self, counts: Mapping[Sample, int]) -> None:
        """Extend the lists of samples up to these numbers of tokens."""
        batches: dict[tuple[int, int], list[Sample]] = defaultdict(list)  # samples that are read together
        for sample, count in counts.items():
            done = len(sample.token_ids)
            batches[sample.entered + done - len(sample.drawn), count - done].append(sample)
        for (first, new), samples in batches.items():
            tokens, scores = self.history.read(samples, first, new)
            engine_logprobs = scores[0].tolist()
            same = np.array_equal(scores[0], scores[1])  # no truncation
            sampling_logprobs = engine_logprobs if same else scores[1].tolist()
            rows = zip(samples, tokens.tolist(), engine_logprobs, sampling_logprobs, strict=True)
            for sample, ids, engine, sampling in rows:
                sample.token_ids += ids
                sample.engine_logprobs += engine
                sample.sampling_logprobs += sampling

    def _finish(self, ended: Ended) -> None:
        batches: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for sample, (count, state) in ended.items():
            sample.done = True
            if state == RowState.BROKEN:
                if sample.job.id in self.jobs:
                    self.fail(sample.job.id, nan_message(sample, count - 1))
                    self.remove(sample.job)
            else:
                batches[sample.entered, count - len(sample.drawn)].append(sample)
        self._convert({sample: count for sample, (count, state) in ended.items() if state != RowState.BROKEN})
        for (entered, new), samples in batches.items():
            _, scores = self.history.read(samples, entered, new)
            means = scores[2:].mean(-1, dtype=np.float64)  # in float64, to be independent of the batch
            spans = self.versions.spans(entered, new)
            for sample, (mass, entropy) in zip(samples, means.T.tolist(), strict=True):
                finish = Finish.STOP if ended[sample][1] == RowState.STOP else Finish.LENGTH
                lists = sample.token_ids, sample.engine_logprobs, sample.sampling_logprobs
                self._emit(sample, Completion(*lists, finish, spans[0][0], mass, entropy), spans)

    def _emit(self, sample: Sample, completion: Completion, spans: list[tuple[int, int]]) -> None:
        job = sample.job
        if job.id not in self.jobs:
            return  # another sample of the request has failed
        if sample.drawn:
            include_earlier(completion, sample)
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
            job.samples.clear()  # break the reference cycle between job and samples


def handles_of(events: Iterable[Event]) -> list[int]:
    """Handles of the kept sequences in these events."""
    handles = (event.completion.handle for event in events if isinstance(event, Finished))
    return [handle for handle in handles if handle is not None]


def tokens_before(sample: Sample, output: StepOutput) -> int:
    """Number of tokens that the sample had before these steps."""
    return len(sample.drawn) + output.first - sample.entered


def include_earlier(completion: Completion, sample: Sample) -> None:
    """Include the tokens that were sampled before preemptions in the means."""
    scores = np.concatenate(sample.scores, axis=1)
    before, new = len(sample.drawn), len(completion.token_ids) - len(sample.drawn)
    mass, entropy = scores.mean(-1, dtype=np.float64).tolist()
    assert completion.kept_mass is not None and completion.entropy is not None
    completion.kept_mass = (mass * before + completion.kept_mass * new) / (before + new)
    completion.entropy = (entropy * before + completion.entropy * new) / (before + new)


def nan_message(sample: Sample, position: int) -> str:
    return (
        f"{sample.job.name}: the logits of token {position} of sample {sample.index} are not numbers (NaN): "
        "the weights may come from a diverged training run; use an earlier checkpoint"
    )
