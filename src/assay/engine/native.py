"""Our own engine: continuous batching over a paged cache, prompts computed once for all their samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from assay.engine.base import More, OnFinish, OnToken, Request
from assay.engine.blocks import Blocks
from assay.engine.columns import BLOCK_SIZE, State
from assay.engine.compiled import CompiledRunner, library_for
from assay.engine.lockstep import check_drawn, check_requests, least
from assay.engine.memory import cache_blocks
from assay.engine.network import FusedDecoder
from assay.engine.rows import LOG_STEPS, Look, Rows
from assay.engine.runner import Runner, new_cache
from assay.engine.scheduler import Plan, Scheduler
from assay.engine.sequence import Job, Kept, Sample, job_for, nothing_kept
from assay.engine.session import Session
from assay.engine.stats import Stats
from assay.engine.stopping import Decode, StopStrings
from assay.engine.undisturbed import without_collection
from assay.engine.weights import copy_weights
from assay.models.device import uses_triton
from assay.models.fingerprint import fingerprint
from assay.models.spec import ModelSpec
from assay.types import Completion, UserError

COUNT_EVERY = 7  # windows, for what takes time to count; odd, or it would always be at the same place in a block
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}  # computed between two stretches of decoding, unless told otherwise


class NativeEngine:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        max_batch: int = 256,
        max_length: int | None = None,
        memory: float = 0.0,
        prefill_tokens: int = 0,
        decode: Decode | None = None,
        group: dist.ProcessGroup | None = None,
        lend: bool = False,
    ) -> None:
        """`memory`: GiB for keys and values; 0: as much as is useful and free. `decode`: tokens to text.

        `lend`: between `rest` and the next call to `generate` that memory is free for others (on CUDA).
        `group`: the ranks that serve this model together. All of them must make the same calls (see `lockstep`).
        """
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, not {max_batch}")
        self.version = -1  # no weights yet
        self.max_length = min(spec.max_length, max_length or spec.max_length)
        self.max_batch, self.stopping = max_batch, StopStrings(decode) if decode else None
        self.device, self.dtype = torch.device(device), dtype
        self.group = group if group is not None and group.size() > 1 else None
        self.network = FusedDecoder(spec, self.max_length, self.device, dtype, self.group)
        spec = self.network.spec
        total = cache_blocks(spec, max_batch, self.max_length, self.device, dtype, memory)
        if self.group is not None:
            total = least(total, self.group, self.device)
        # One sequence cannot outgrow the whole cache, and is cut off there; its last token is drawn and stored nowhere.
        self.max_length = min(self.max_length, total * BLOCK_SIZE + 1)
        self.blocks = Blocks(total, BLOCK_SIZE)
        chunk = prefill_tokens or PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cpu"])
        self.scheduler = Scheduler(self.blocks, max_batch, chunk)
        self.rows = Rows(max_batch, -(-self.max_length // BLOCK_SIZE), self.device, dtype)
        # The last block takes what is to be stored nowhere.
        kv, self.lent = new_cache(spec, total + 1, self.device, dtype, lend)
        self.runner = make_runner(self.network, self.rows, kv)
        self.looks: deque[Look] = deque()
        self.rows_changed = False
        self.stats = Stats()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.scheduler.forget()
        copy_weights(self.network.canonical(), weights, self.network.shares)
        self.version = version

    def forget(self) -> None:
        self.scheduler.forget()

    def rest(self) -> None:
        if self.lent is not None:
            self.scheduler.forget()
            self.lent.unmap()

    def fingerprint(self) -> str:
        return fingerprint(self.network.weights())

    def reset_stats(self) -> None:
        self.stats = Stats()

    def release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.scheduler.drop(handle)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        more: More | None = None,
    ) -> list[list[Completion]]:
        if self.group is not None:
            check_requests(requests, self.group, self.device)
        if not requests and more is None:
            return []
        if self.version < 0:
            raise UserError("the engine has no weights yet: call load_weights first")
        if self.lent is not None:
            self.lent.map()
        callbacks = self.stopping, self._keep, on_token, on_finish
        session = Session(self.rows.size, self.version, *callbacks, self.rows.float_type)
        session.history.first = self.scheduler.step
        before = dict(self.scheduler.kept)
        # Who is asked for more may make circles, and the call may be long.
        with nullcontext() if more else without_collection():
            try:
                self.scheduler.open = more is not None and self.group is None
                self._serve(deque(session.numbered(requests)), session, more)
            except BaseException:
                self._start_over(before)
                raise
            self.looks.clear()  # of steps taken before it was seen that all had ended
            self.stats.decoded_tokens += session.tokens
            if self.group is not None:
                check_drawn(session.results, self.group, self.device)
            return session.completions()

    def _serve(self, coming: deque[tuple[int, Request]], session: Session, more: More | None) -> None:
        while True:
            idle = not (coming or self.scheduler.unfinished)
            if more is not None and (idle or self.scheduler.open):
                coming += session.numbered(self._asked(more, idle))
            if not (coming or self.scheduler.unfinished):
                return
            # Looking at requests takes time, in which those already here can run.
            while coming and self.scheduler.pending < self.max_batch:
                self._add(*coming.popleft(), session)
            if self.scheduler.unfinished:
                self._round(session)

    @torch.inference_mode(False)
    def _asked(self, more: More, idle: bool) -> Sequence[Request]:
        """Ranks that serve a model together ask only when all is done, and compare what they have been given."""
        requests = more(idle)
        if self.group is not None:
            check_requests(requests, self.group, self.device)
        return requests

    def _add(self, index: int, request: Request, session: Session) -> None:
        try:
            kept = self._continued(request, index)
            job = self._job(request, index, kept)
        except UserError as error:
            session.errors[index] = str(error)
            return
        session.expect(job)
        if request.continues is not None and kept is not None:
            self.scheduler.resume(request.continues)
        self.scheduler.add(job.tokens, [Sample(job, sample) for sample in range(request.params.n)], kept)

    def _continued(self, request: Request, index: int) -> Kept | None:
        if request.continues is None:
            return None
        kept = self.scheduler.kept.get(request.continues)
        if kept is None:
            raise nothing_kept(request, index)
        return kept

    def _job(self, request: Request, index: int, kept: Kept | None) -> Job:
        return job_for(
            request,
            index,
            kept.tokens if kept else [],
            max_length=self.max_length,
            vocabulary=self.network.spec.vocab_size,
            can_decode=self.stopping is not None,
        )

    def _round(self, session: Session) -> None:
        """Let in who can enter, take some steps, and look at those before."""
        window = self.runner.window
        self._make_room(session, window)
        plan = self.scheduler.plan(window)
        self._carry_out(plan)
        steps = self._steps(window)
        if steps:
            self._decode(steps)
        else:
            assert self.looks or plan.chunks or not self.scheduler.unfinished, "nothing can go on"
        while len(self.looks) > (self.runner.ahead if steps else 0):
            self._collect(session)

    def _steps(self, window: int) -> int:
        """Steps that somebody can use, until the host looks."""
        scheduler = self.scheduler
        # Those who run may all be past their last step, not yet seen, when one who would have gone on has stopped.
        useful = max([scheduler.step, *(sample.last for sample in scheduler.running)]) - scheduler.step
        return min(window, useful, LOG_STEPS - scheduler.step % LOG_STEPS)

    def _make_room(self, session: Session, window: int) -> None:
        """Blocks for those who run; if there are too few, after all that is known, the last to come has to go."""
        while self.scheduler.lack(window) > 0:
            if self.looks:
                self._collect(session)
                continue
            sample = self.scheduler.preempt()
            sample.drawn = session.drawn(sample, len(sample.drawn) + self.scheduler.step - sample.entered)
            self._leave([sample])
            self.scheduler.restart(sample)
            self.stats.preemptions += 1

    def _carry_out(self, plan: Plan) -> None:
        if plan.chunks:
            self.runner.compute(plan.chunks)
            self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in plan.chunks)
        if plan.copies:
            self.runner.copy(plan.copies)
        if plan.entering:
            self.rows.enter(plan.entering)
            self.rows_changed = True
        self.rows.note_blocks([*plan.grown, *plan.entering])

    def _decode(self, steps: int) -> None:
        scheduler, running = self.scheduler, self.scheduler.running
        width = max(len(sample.blocks) for sample in running)
        self.rows.write_tables(len(running), width)
        if self.rows_changed:
            self.runner.arrange(running)
            self.rows_changed = False
        self.runner.decode(len(running), steps, width * BLOCK_SIZE)
        self.looks.append(self.rows.look(list(running), scheduler.step, steps))
        scheduler.advance(steps)
        self.stats.decode_steps += steps
        self.stats.windows += 1
        if self.stats.windows % COUNT_EVERY == 0:
            self._count_waste(steps)

    def _count_waste(self, steps: int) -> None:
        """Of the last steps, the first and the last: blocks are taken for all of them at once, and fill up slowly."""
        stats, last, held = self.stats, self.scheduler.step, 2 * self.blocks.in_use * BLOCK_SIZE
        empty = sum(
            len(sample.blocks) * BLOCK_SIZE - sample.stored(step - sample.entered)
            for sample in self.scheduler.running
            for step in (last - steps + 1, last)
        )
        stats.places += held
        stats.empty_places += empty
        if held >= stats.peak_places:
            stats.peak_places, stats.kv_waste_peak = held, empty / held

    def _collect(self, session: Session) -> None:
        ended = session.take(self.looks.popleft(), self.scheduler.running)
        for sample, state in ended:
            if state == State.BROKEN:
                self.blocks.release(sample.blocks, forget=True)
                sample.blocks = []
        if ended:
            self._leave([sample for sample, _ in ended])

    def _leave(self, samples: list[Sample]) -> None:
        before = len(self.scheduler.running)
        moves = self.scheduler.release(samples)
        self.rows.move(moves, len(self.scheduler.running), before)
        self.rows_changed = True

    def _keep(self, sample: Sample, tokens: list[int]) -> int:
        handle = self.scheduler.keep(tokens, sample.blocks)
        sample.blocks = []
        return handle

    def _start_over(self, kept: dict[int, Kept]) -> None:
        """Something broke off in the middle: what is half done goes, what was kept before will be computed again."""
        self.looks.clear()
        self.blocks = Blocks(self.blocks.total, BLOCK_SIZE)
        step, handle = self.scheduler.step, self.scheduler.next_handle
        self.scheduler = Scheduler(self.blocks, self.max_batch, self.scheduler.prefill_tokens)
        self.scheduler.step, self.scheduler.next_handle = step, handle
        for one in kept.values():
            one.blocks = []
        self.scheduler.kept.update(kept)
        self.rows.move([], 0, self.rows.size)
        self.rows.step.fill_(step)


def make_runner(network: FusedDecoder, rows: Rows, kv: Tensor) -> Runner:
    if uses_triton(kv.device):
        from assay.engine.capture import GraphRunner

        return GraphRunner(network, rows, kv)
    if found := library_for(kv.device, kv.dtype):
        return CompiledRunner(network, rows, kv, found)
    return Runner(network, rows, kv)
