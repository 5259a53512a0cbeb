"""The native engine: continuous batching over a paged KV cache, with prompts computed once for all their samples."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import (
    ALL_CAPABILITIES,
    EngineInfo,
    EngineLoad,
    EngineOptions,
    Request,
    TokenScores,
    WeightSource,
    copy_weights,
)
from assay.engine.completions import OutputProcessor
from assay.engine.in_process import LocalEngine
from assay.engine.native.compiled import CompiledOperations, CompiledRunner, library_for
from assay.engine.native.kv_cache import Blocks, cache_blocks, new_cache
from assay.engine.native.network import FusedDecoder, Operations, TorchOperations, TritonOperations
from assay.engine.native.runner import GraphRunner, Runner
from assay.engine.native.scheduler import Lockstep, Plan, Scheduler, min_over_ranks
from assay.engine.sampler import LOG_STEPS, Rows, StepOutput
from assay.engine.sequence import BLOCK_SIZE, Kept, RowState, Sample, Stats
from assay.models.decoder import rope_tables
from assay.models.device import uses_triton
from assay.models.fp8 import check_device
from assay.models.parallel import TPShard
from assay.models.spec import ModelSpec
from assay.types import UserError

MEASURE_EVERY = 7  # windows between two measurements of KV waste; odd, so that it varies where blocks are filled to
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}  # computed between two windows of decoding steps, by default


class NativeEngine(LocalEngine):
    def __init__(self, spec: ModelSpec, **options: Any) -> None:
        """`options`: fields of `EngineOptions`. All ranks of `group` must make the same calls (see `Lockstep`)."""
        super().__init__()
        opts = EngineOptions(**options)
        dtype, max_batch = opts.dtype, opts.max_batch
        max_length = min(spec.max_length, opts.max_length or spec.max_length)
        self.device, self.kv_on_update = torch.device(opts.device), opts.kv_on_update
        self.group = opts.group if opts.group is not None and opts.group.size() > 1 else None
        shard = None if self.group is None else TPShard(spec, self.group)
        vocabulary, spec = spec.vocab_size, spec if shard is None else shard.spec
        ops = make_operations(spec, max_length, self.device, dtype)
        kv_dtype = torch.float8_e4m3fn if opts.kv_cache_dtype == "fp8" else dtype
        for setting in ["quantize"] * bool(opts.quantize) + ["kv_cache_dtype"] * (kv_dtype != dtype):
            check_device(f"engine.{setting} = '{getattr(opts, setting)}'", self.device, dtype, shard is not None)
        self.network = FusedDecoder(spec, ops, self.device, dtype, shard, opts.quantize)
        total = cache_blocks(spec, max_batch, max_length, self.device, kv_dtype, opts.kv_cache_gib)
        if self.group is not None:
            (total,) = min_over_ranks([total], self.group)
        # A sequence cannot outgrow the whole cache; its last token is sampled but never stored.
        max_length = min(max_length, total * BLOCK_SIZE + 1)
        self.info = EngineInfo(
            -1, max_length, max_batch, dtype, ALL_CAPABILITIES, vocabulary, self.device, opts.quantize
        )
        self.blocks = Blocks(total, BLOCK_SIZE)
        chunk = opts.prefill_tokens or PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cpu"])
        self.scheduler = Scheduler(self.blocks, max_batch, chunk)
        self.rows = Rows(max_batch, -(-max_length // BLOCK_SIZE), self.device, dtype)
        # One more block for writes of rows that do not store their token.
        kv, self.mapped_memory = new_cache(spec, total + 1, self.device, kv_dtype, opts.sleep_while_training)
        self.runner = make_runner(self.network, self.rows, kv)
        self.outputs = OutputProcessor(
            max_batch, opts.decode, self._keep, self.rows.float_type, digests=self.group is not None
        )
        self.in_flight: deque[StepOutput] = deque()  # windows of steps whose results the host has not read yet
        self.lockstep = Lockstep(self.group) if self.group is not None else None
        self.rows_changed = False
        self.busy = False  # whether there were requests since it was last idle
        self.stats = Stats()

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished

    @property
    def load(self) -> EngineLoad:
        waiting = len(self.scheduler.waiting) + len(self.incoming)
        running = len(self.scheduler.running)
        return EngineLoad(running, waiting, self.blocks.in_use, self.blocks.total, self.stats.preemptions)

    def add(self, request: Request) -> int:
        if self.lockstep is not None:
            self.lockstep.add(request)
        # Requests that arrive one by one are collected for some steps before they are admitted.
        self.scheduler.expects_arrivals = self.scheduler.expects_arrivals or self.scheduler.unfinished
        return super().add(request)

    def reset_stats(self) -> None:
        self.stats = Stats()

    # -- at the boundary between two steps

    def _abort(self, ids: Sequence[int | tuple[int, int]]) -> None:
        requests = {target for target in ids if not isinstance(target, tuple)}
        in_part = {target[0] for target in ids if isinstance(target, tuple)}
        for _ in range(len(self.incoming)):  # in place: another thread may be adding requests
            request_id, request = self.incoming.popleft()
            if request_id in in_part or (request_id in requests and request.continues is not None):
                self._accept(request_id, request)  # so that the sequence it continues is freed
            elif request_id not in requests:
                self.incoming.append((request_id, request))
        super()._abort(ids)

    def _remove(self, samples: Sequence[Sample]) -> None:
        running = [sample for sample in samples if sample.row >= 0]
        waiting = [sample for sample in samples if sample.row < 0]
        if running:
            self._free_rows(running)
        if waiting:
            self.scheduler.remove_waiting(waiting)

    def _release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.scheduler.release_kept(handle)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.network.weights()

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self.runner.score(sequences, temperature, self.scheduler.prefill_tokens)

    def _top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float
    ) -> list[TokenScores]:
        return self.runner.top_logprobs(sequences, starts, count, temperature, self.scheduler.prefill_tokens)

    def _update_weights(self, source: WeightSource, version: int) -> None:
        keep = self.kv_on_update == "keep"
        if not keep:
            self._preempt_all()
        self.scheduler.weights_changed(keep)
        copy_weights(self.network.canonical(), source.weights(), self.network.shard)
        self.network.weights_changed()
        step = self.scheduler.step
        self.outputs.versions.update(version, step, min([step, *(s.entered for s in self.scheduler.running)]))
        self.info = replace(self.info, version=version)

    def _preempt_all(self) -> None:
        """Store the tokens of all running samples and put them back into the queue, in order."""
        while self.in_flight:
            self._collect()
        for sample in sorted(self.scheduler.running, key=lambda sample: (sample.job.id, sample.index), reverse=True):
            self._preempt(sample)

    def _sleep(self) -> None:
        super()._sleep()
        if self.mapped_memory is not None:
            self._reset_prefix_cache()
            self.mapped_memory.unmap()

    def _wake(self) -> None:
        if self.mapped_memory is not None:
            self.mapped_memory.map()

    def _reset_prefix_cache(self) -> None:
        self.scheduler.evict_kept()
        self.blocks.clear_prefix_index()
        if self.busy and not self.scheduler.unfinished:  # all requests were aborted
            self._become_idle()
        if not self.busy:
            # Windows of steps end where the log is full. The next requests get the same windows as in a new engine.
            self.scheduler.step += -self.scheduler.step % LOG_STEPS
            self.rows.step.fill_(self.scheduler.step)
            self.outputs.start(self.scheduler.step)

    def _close(self) -> None:
        self.drop_requests()
        self.scheduler.kept.clear()
        self.runner.close()
        if self.mapped_memory is not None:
            self.mapped_memory.unmap()

    # -- one iteration

    def _begin_step(self) -> None:
        if self.lockstep is not None:
            self.lockstep.check_requests(self.scheduler.step)

    def _end_step(self) -> None:
        if self.busy and not self.scheduler.unfinished:
            self._become_idle()

    def _admit(self) -> bool:
        # Accept no more than one batch at a time: validation takes time in which accepted requests can run.
        while self.incoming and self.scheduler.pending < self.info.max_batch:
            self._accept(*self.incoming.popleft())
        if self.scheduler.unfinished and self.mapped_memory is not None:
            self.mapped_memory.map()
        return self.scheduler.unfinished

    def _accept(self, request_id: int, request: Request) -> None:
        if self.info.version < 0:
            raise UserError("the engine has no weights yet: call update_weights first")
        job = self._new_job(request_id, request)
        if job is None:
            return
        kept = None if request.continues is None else self.scheduler.kept.pop(request.continues, None)
        self.busy = True
        self.scheduler.add(job.tokens, job.samples, kept)

    def _kept_tokens(self, handle: int) -> Sequence[int] | None:
        kept = self.scheduler.kept.get(handle)
        return kept.tokens if kept else None

    def _iterate(self) -> None:
        """Admit samples, take some decoding steps, and process the results of earlier ones."""
        window = self.runner.window
        self._ensure_blocks(window)
        plan = self.scheduler.plan(window)
        self._execute(plan)
        steps = self._steps(window)
        if steps:
            self._decode(steps)
        else:
            assert self.in_flight or plan.chunks or not self.scheduler.unfinished, "no sequence can continue"
        while len(self.in_flight) > (self.runner.ahead if steps else 0):
            self._collect()

    def _steps(self, window: int) -> int:
        """Number of steps to take before the host reads results; none that no sample could use."""
        scheduler = self.scheduler
        # All running samples may already be past their last step if their results have not been read yet.
        useful = max([scheduler.step, *(sample.last_step for sample in scheduler.running)]) - scheduler.step
        return min(window, useful, LOG_STEPS - scheduler.step % LOG_STEPS)

    def _ensure_blocks(self, window: int) -> None:
        """Ensure that running samples have blocks for the next steps; preempt the newest ones if necessary."""
        while self.scheduler.blocks_short(window) > 0:
            if self.in_flight:
                self._collect()
                continue
            self._preempt(self.scheduler.newest_running())
            self.stats.preemptions += 1

    def _preempt(self, sample: Sample) -> None:
        self.outputs.pause(sample, len(sample.drawn) + self.scheduler.step - sample.entered)
        self._free_rows([sample])
        self.scheduler.requeue(sample)

    def _execute(self, plan: Plan) -> None:
        if plan.chunks:
            self.runner.compute(plan.chunks)
            self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in plan.chunks)
        if plan.copies:
            self.runner.copy(plan.copies)
        if plan.entering:
            self.rows.enter(plan.entering)
            self.rows_changed = True
        self.rows.add_blocks([*plan.grown, *plan.entering])

    def _decode(self, steps: int) -> None:
        scheduler, running = self.scheduler, self.scheduler.running
        width = max(len(sample.blocks) for sample in running)
        self.rows.write_tables(len(running), width)
        if self.rows_changed:
            self.runner.arrange(running)
            self.rows_changed = False
        self.runner.decode(len(running), steps, width * BLOCK_SIZE)
        if self.runner.ahead and not self.in_flight and not gc.isenabled():
            # While a GPU is busy: otherwise the lists of results are examined when they are full, after the last step.
            gc.collect(0)
        self.in_flight.append(self.rows.read(list(running), scheduler.step, steps))
        scheduler.step += steps
        self.stats.decode_steps += steps
        self.stats.windows += 1
        if self.stats.windows % MEASURE_EVERY == 0:
            self._measure_waste(steps)

    def _measure_waste(self, steps: int) -> None:
        """Measure unused slots after the first and the last step: blocks are allocated for all steps at once."""
        stats, last, held = self.stats, self.scheduler.step, 2 * self.blocks.in_use * BLOCK_SIZE
        empty = 0
        for sample in self.scheduler.running:
            done = last - sample.entered
            stored = sample.stored(done) + (sample.stored(done - steps + 1) if steps > 1 else sample.stored(done))
            empty += 2 * BLOCK_SIZE * len(sample.blocks) - stored
        stats.kv_slots += held
        stats.empty_kv_slots += empty
        if held >= stats.peak_kv_slots:
            stats.peak_kv_slots, stats.kv_waste_peak = held, empty / held

    def _collect(self) -> None:
        """Process the oldest results and remove the samples that have ended."""
        tokens = self.outputs.tokens
        ended = self.outputs.process(self.in_flight.popleft(), self.scheduler.running)
        self.stats.decoded_tokens += self.outputs.tokens - tokens
        for sample, state in ended:
            if state == RowState.BROKEN:
                self.blocks.release(sample.blocks, unregister=True)
                sample.blocks = []
        if ended:
            self._free_rows([sample for sample, _ in ended])
            self._drop_failed(ended)

    def _free_rows(self, samples: list[Sample]) -> None:
        before = len(self.scheduler.running)
        moves = self.scheduler.release(samples)
        self.rows.move(moves, len(self.scheduler.running), before)
        self.rows_changed = True

    def _keep(self, sample: Sample, tokens: list[int]) -> int:
        handle = self.scheduler.keep(tokens, sample.blocks, sample.mixed)
        sample.blocks = []
        return handle

    def _become_idle(self) -> None:
        """Drop the results of steps that were taken after the last sample had ended."""
        self.in_flight.clear()
        self.scheduler.expects_arrivals = self.busy = False
        if self.lockstep is not None:
            self.lockstep.check_tokens(self.outputs.digest())
        self.outputs.start(self.scheduler.step)

    def drop_requests(self) -> None:
        """Also drops the KV cache: kept sequences are computed again."""
        self._release_unreported()
        kept = {handle: Kept(sequence.tokens, []) for handle, sequence in self.scheduler.kept.items()}
        kept |= {handle: Kept(tokens, []) for handle, tokens in self._continued()}
        self.in_flight.clear()
        self.incoming.clear()
        if self.lockstep is not None:
            self.lockstep.clear()
        old = self.scheduler
        self.blocks = Blocks(self.blocks.total, BLOCK_SIZE)
        self.scheduler = Scheduler(self.blocks, self.info.max_batch, old.prefill_tokens)
        self.scheduler.step, self.scheduler.next_handle = old.step, old.next_handle
        self.scheduler.kept.update(kept)
        self.outputs.clear(old.step)
        self.busy = False
        self.rows.move([], 0, self.rows.size)
        self.rows.step.fill_(old.step)


def make_operations(spec: ModelSpec, max_length: int, device: torch.device, dtype: torch.dtype) -> Operations:
    angles = torch.arange(max_length, device=device)[:, None].float() * rope_tables(spec).to(device)[:, None]
    if uses_triton(device):
        return TritonOperations(spec, torch.cat((angles.cos(), angles.sin()), dim=-1))
    if library := library_for(device, dtype):
        return CompiledOperations(spec, angles, library)
    return TorchOperations(spec, angles, dtype)


def make_runner(network: FusedDecoder, rows: Rows, kv: Tensor) -> Runner:
    if uses_triton(kv.device):
        return GraphRunner(network, rows, kv)
    if library := library_for(kv.device, kv.dtype):
        return CompiledRunner(network, rows, kv, library)
    return Runner(network, rows, kv)
