"""Who runs, in which slot, and who is next: first come, first served. No tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from assay.engine.sequence import PromptJob, Sample


@dataclass(slots=True)
class Admission:
    """Samples of one job that enter now, in the slots after those already running."""

    job: PromptJob
    samples: list[Sample]
    first: bool  # the job's prompt has yet to be computed

    @property
    def last(self) -> bool:
        """No sample of the job is still waiting as this one enters, so nothing of its prompt need be kept aside."""
        return self.job.left == 0


class Scheduler:
    """`running[i]` is the sample in slot i: slots in use are always 0 .. len(running) - 1."""

    def __init__(
        self,
        jobs: Iterable[PromptJob],
        max_batch: int,
        prefill_tokens: int,
        *,
        waves: bool = False,
        even: bool = False,
    ) -> None:
        """`waves`: newcomers wait until everyone has left. `even`: prompts that enter together have one length."""
        self.waiting = deque(jobs)
        self.running: list[Sample] = []
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self.waves, self.even = waves, even
        self.pending = sum(job.left for job in self.waiting)
        self.step = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> list[Admission]:
        """Let waiting samples in while there is room; prompts yet to be computed stay within the token budget."""
        admissions: list[Admission] = []
        if not self._worth_it():
            return admissions
        budget = self.prefill_tokens
        while self.waiting and len(self.running) < self.max_batch:
            job = self.waiting[0]
            first = job.started == 0 or self.waves
            if admissions and first and (job.length > budget or (self.even and job.length != admissions[0].job.length)):
                break
            budget -= job.length if first else 0
            admissions.append(Admission(job, self._enter(job), first))
        return admissions

    def release(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """Take finished samples out; returns the moves (from, to) that close the gaps, each from behind every gap."""
        gone = set(slots)
        kept = len(self.running) - len(gone)
        gaps = sorted(slot for slot in gone if slot < kept)
        movers = [slot for slot in range(kept, len(self.running)) if slot not in gone]
        moves = list(zip(movers, gaps, strict=True))
        for source, destination in moves:
            self.running[destination] = self.running[source]
        del self.running[kept:]
        return moves

    def longest(self) -> int:
        """Tokens in the cache of the longest running sample, before this step."""
        return max(sample.length(self.step) for sample in self.running)

    def _worth_it(self) -> bool:
        if self.waves:
            return not self.running
        # A newcomer costs a pass of its own, so that a few free slots are collected first.
        room = self.max_batch - len(self.running)
        return room >= min(self.pending, max(1, self.max_batch // 16))

    def _enter(self, job: PromptJob) -> list[Sample]:
        count = min(job.left, self.max_batch - len(self.running))
        samples = [Sample(job, index, self.step) for index in range(job.started, job.started + count)]
        self.running.extend(samples)
        self.pending -= count
        job.started += count
        if job.left == 0:
            self.waiting.popleft()
        return samples
