"""From sampled tokens to completions: history, stop strings, streams; state after errors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import (
    MODES,
    Consumer,
    Mode,
    assert_same_groups,
    assert_scores,
    engine_for,
    mixed_prompts,
    mixed_requests,
    model_of,
    requests_for,
    words,
)
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel

from assay.engine import Request, SamplingParams, generate
from assay.engine.base import Decode
from assay.engine.completions import (
    BROKEN,
    HISTORY_STEPS,
    TABLES,
    History,
    StopStrings,
    added_by,
    completes_stop,
    may_complete,
)
from assay.engine.sampler import StepOutput
from assay.engine.sequence import Job, Sample, assign_slot, close_gaps
from assay.types import Finish

WIDE = Mode(max_batch=7, window=8, ahead=1)
WAYS = {"plain": MODES["plain"], "wide windows": WIDE, "all at once": MODES["all at once"]}


@pytest.mark.parametrize("mode", WAYS)
def test_streamed_tokens_are_complete_and_in_order(mode: str) -> None:
    params = SamplingParams(n=2, max_new_tokens=40, stop_token_ids=(1, 2, 3))
    requests = mixed_requests(params, seed=3)[:6]
    requests[0] = replace(requests[0], params=replace(requests[0].params, stop=("x", "yz")))
    engine = engine_for(model_of("qwen3"), WAYS[mode], decode=words)
    quiet = generate(engine, requests)
    consumer = Consumer(engine, on_token=lambda request, sample, token: None)
    consumer.run(requests)
    groups = consumer.groups()
    assert_same_groups(model_of("qwen3"), requests, groups, quiet)
    every = {(r, s): completion for r, group in enumerate(groups) for s, completion in enumerate(group)}
    assert consumer.tokens == {key: completion.token_ids for key, completion in every.items()}
    assert consumer.logprobs == {key: completion.engine_logprobs for key, completion in every.items()}
    assert list(consumer.finished) != sorted(consumer.finished)  # in the order in which they finish
    assert (engine.stats.preemptions > 0) == (mode == "all at once")


def test_chunks_arrive_while_other_samples_are_running() -> None:
    order: list[str] = []
    engine = engine_for(model_of("qwen3"), Mode(max_batch=2))
    limits = [Request([i], SamplingParams(max_new_tokens=5), seed=i) for i in range(4)]
    Consumer(
        engine,
        on_token=lambda request, sample, token: order.append(f"token of {request}"),
        on_finish=lambda request, sample, completion: order.append(f"end of {request}"),
    ).run(limits)
    first = order.index("end of 0")
    assert order[:4] == ["token of 0", "token of 1"] * 2
    assert "token of 2" not in order[:first] and "token of 2" in order[first:]


@pytest.mark.parametrize("mode", WAYS)
def test_completion_ends_with_the_token_that_completes_a_stop_string(mode: str) -> None:
    """Also inside a window, when the device has already continued."""
    plain = SamplingParams(n=2, max_new_tokens=30)
    engine = engine_for(model_of("qwen3"), WAYS[mode], decode=words)
    requests = requests_for(mixed_prompts(seed=2)[2:10], plain)
    free = generate(engine, requests)
    ends = [5 + 2 * i for i in range(len(requests))]  # where the first sample should stop
    wanted = [words(group[0].token_ids[end - 3 : end]) for group, end in zip(free, ends, strict=True)]
    stopping = [
        replace(request, params=replace(plain, stop=("no such thing", text)), keep=True)
        for request, text in zip(requests, wanted, strict=True)
    ]
    for i in (1, 3):
        stopping[i] = replace(requests[i], keep=True)  # some requests have no stop strings
    groups = generate(engine, stopping)
    for request, group, without in zip(stopping, groups, free, strict=True):
        for completion, whole in zip(group, without, strict=True):
            text, stops = words(whole.token_ids), request.params.stop
            end = text.index(stops[1]) + 3 if stops and stops[1] in text else 30
            assert completion.token_ids == whole.token_ids[:end]
            assert completion.finish is (Finish.STOP if end < 30 or text.endswith(stops or ("?",)) else Finish.LENGTH)
            assert_scores(model_of("qwen3"), request.prompt_ids, completion, request.params)
    assert sum(completion.finish is Finish.STOP for group in groups for completion in group) >= 6
    if mode == "wide windows":
        assert engine.stats.windows < engine.stats.decode_steps
    # Tokens that the device sampled after the end are not part of the sequence.
    more = [Request([9, 9, 9], plain, seed=5, continues=group[0].handle) for group in groups]
    fresh = engine_for(model_of("qwen3"), decode=words)
    whole_lists = [[*r.prompt_ids, *g[0].token_ids, 9, 9, 9] for r, g in zip(stopping, groups, strict=True)]
    lists = [Request(ids, plain, seed=5) for ids in whole_lists]
    assert_same_groups(model_of("qwen3"), lists, generate(engine, more), generate(fresh, lists))


# -- the parts, without an engine


def new_sample(index: int, limit: int = 10_000) -> Sample:
    return Sample(Job(index, Request([1], SamplingParams(), seed=0), [1], limit), 0)


def look_at(running: list[Sample], first: int, steps: int) -> StepOutput:
    """A log with distinct values: tokens encode step and row, scores also their kind."""
    step = torch.arange(first, first + steps)[:, None]
    tokens = step * 100 + torch.arange(len(running))
    scores = torch.stack([tokens + 0.125 * kind for kind in range(4)])
    return StepOutput(list(running), first, tokens.int(), scores.float(), torch.zeros(2, len(running)))


def assert_reads(history: History, samples: list[Sample], told: dict[Sample, list[int]]) -> None:
    """Read their tokens together, from the step on in which the last of them entered."""
    first = max(sample.entered for sample in samples)
    expected = [told[sample][first - sample.entered :] for sample in samples]
    count = len(expected[0])
    tokens, scores = history.read(samples, first, count)
    assert tokens.tolist() == expected
    for sample in samples:
        assert history.read([sample], sample.entered, len(told[sample]))[0].tolist() == [told[sample]]
    assert scores.shape == (4, len(samples), count)
    for kind in range(4):
        assert np.array_equal(scores[kind], tokens + 0.125 * kind)


@pytest.mark.parametrize(("window", "late"), [(1, 0), (4, 0), (4, 1), (7, 2)])
def test_history_follows_sequences_that_change_rows(window: int, late: int) -> None:
    """Random samples enter, leave and move between rows for longer than the initial capacity; results arrive late."""
    draw = random.Random(window)
    history = History(6)
    first = history.first = 37
    step, named = first, 0
    running: list[Sample] = []
    told: dict[Sample, list[int]] = {}  # expected tokens of each sample
    looks: list[StepOutput] = []
    for _ in range(5 * HISTORY_STEPS // window):
        while len(running) < 6 and draw.random() < 0.3:
            assign_slot(new_sample(named), running, step)
            told[running[-1]] = []
            named += 1
        if running:
            for offset in range(window):
                for row, sample in enumerate(running):
                    told[sample].append((step + offset) * 100 + row)
            looks.append(look_at(running, step, window))
            step += window
        while len(looks) > late:
            history.write(looks.pop(0), running)
        leaving = [sample for sample in running if draw.random() < 0.02 * window]
        if leaving:
            while looks:
                history.write(looks.pop(0), running)
            for samples in (leaving, running):
                assert_reads(history, samples, told)
            close_gaps(running, leaving, step)
    assert step > first + 3 * HISTORY_STEPS and named > 20


def test_history_drops_steps_before_the_oldest_running_sample() -> None:
    history = History(2)
    running: list[Sample] = []
    for start in range(0, 8 * HISTORY_STEPS, 50):  # short sequences
        assign_slot(new_sample(start), running, start)
        history.write(look_at(running, start, 50), running)
        assert_reads(history, running, {running[0]: [step * 100 for step in range(start, start + 50)]})
        close_gaps(running, list(running), start + 50)
    assert history.tokens.shape == (2, HISTORY_STEPS) and history.scores.shape == (4, 2, HISTORY_STEPS)
    assign_slot(new_sample(0), running, 8 * HISTORY_STEPS)
    told: list[int] = []
    for start in range(8 * HISTORY_STEPS, 11 * HISTORY_STEPS, 64):  # one long sequence
        history.write(look_at(running, start, 64), running)
        told += [step * 100 for step in range(start, start + 64)]
    assert_reads(history, running, {running[0]: told})
    assert history.tokens.shape[1] <= 8 * HISTORY_STEPS


PIECES = ["", "a", "b", "ab", "ba\n", "</", "x>", "é", "", "bbbb"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    st.lists(st.text("ab\n</x>é", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_stop_string_is_found_at_the_token_that_completes_it(ids: list[int], stops: list[str]) -> None:
    for end in range(1, len(ids) + 1):
        found = completes_stop(ids[:end], stops, decode)
        assert found == any(stop in decode(ids[:end]) for stop in stops)
        if found:
            break


# -- which tokens can do so


@cache
def tokenizers() -> dict[str, tuple[int, Decode]]:
    """Kinds of tokenizers: the number of tokens, and the decode function."""
    signs = sorted(ByteLevel.alphabet())
    every = [*signs, *(a + b for a in signs[::9] for b in signs[::7]), "Ġa", "aĠ", "Ċ", "ab", "</", "x>Ċ", "Ã©"]
    levels = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(dict.fromkeys(every))}, merges=[]))
    levels.decoder = decoders.ByteLevel()
    pieces = ["<unk>", "▁", "▁a", "a", "b", "▁ab", "</", "x>", "\n", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    fallback = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fallback.decoder = decoders.Sequence(steps)
    words = ["[UNK]", "a", "##a", "b", "##b", "ab", "##ab", "<", "/", "x", ">", "é", ".", "'", "s", "##x"]
    wordpiece = Tokenizer(WordPiece(vocab={piece: i for i, piece in enumerate(words)}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    endings = ["a", "b", "a</w>", "b</w>", "ab</w>", "x></w>", "</", "x"]
    suffixed = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(endings)}, merges=[]))
    suffixed.decoder = decoders.BPEDecoder(suffix="</w>")
    found: dict[str, tuple[int, Decode]] = {"plain": (len(PIECES), decode)}
    for name, one in (("bytes", levels), ("fallback", fallback), ("words", wordpiece), ("suffixed", suffixed)):
        found[name] = one.get_vocab_size(), lambda ids, one=one: one.decode([int(i) for i in ids])
    return found


@pytest.mark.parametrize("kind", ["plain", "bytes", "fallback", "words", "suffixed"])
@settings(max_examples=80, deadline=None)
@given(
    draws=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40),
    stops=st.lists(st.text("ab\n</x>é .s", min_size=1, max_size=5), min_size=1, max_size=3),
    copied=st.integers(0, 39),
)
def test_suspects_include_every_token_that_completes_a_stop_string(
    kind: str, draws: list[int], stops: list[str], copied: int
) -> None:
    size, decoded = tokenizers()[kind]
    ids = [draw % size for draw in draws]
    if (text := decoded(ids[copied : copied + 3])) and BROKEN not in text:  # usually a stop string that occurs
        stops = [*stops, text]
    stopping, names = StopStrings(decoded), tuple(stops)
    stopping.suspects(np.array(ids[: len(ids) // 2], dtype=np.int64), names)  # the cache must stay valid for these
    suspects = stopping.suspects(np.array(ids), names)
    for end in range(1, len(ids) + 1):
        if any(stop in decoded(ids[:end]) for stop in stops):
            assert suspects[end - 1]
            assert stopping.completed(ids[:end], stops)
            return


@pytest.mark.parametrize("stop", ["😀", "😁😀", "b😁😁😀"])
def test_incomplete_bytes_before_a_stop_string(stop: str) -> None:
    """A tail that starts within a character would decode to replacement characters."""
    size, decoded = tokenizers()["fallback"]
    first = size - 256  # the token of byte 0
    ids = [4, *(first + byte for byte in "😁😁😀".encode())]
    assert decoded(ids) == "b😁😁😀"
    assert [completes_stop(ids[:end], [stop], decoded) for end in range(1, len(ids) + 1)] == [False] * 12 + [True]


def test_start_of_the_tail_is_not_decoded_as_start_of_the_text() -> None:
    """Some tokens decode differently at the start of a text."""
    _, decoded = tokenizers()["words"]
    ids = [1, 2, 1, 2, 2, 2, 2, 2, 2]
    assert decoded(ids) == "aa aaaaaaa" and decoded(ids[-6:]) == "##aaaaaa"
    assert not any(completes_stop(ids[:end], ["##"], decoded) for end in range(1, len(ids) + 1))


def test_few_tokens_are_suspects() -> None:
    size, decoded = tokenizers()["bytes"]
    added = {i: added_by(i, decoded) for i in range(size) if BROKEN not in decoded([i])}
    kinds = {decoded([i]): may_complete(added[i], ["</x>\n"]) for i in added}
    assert [text for text, may in kinds.items() if may and "\n" not in text and ">" not in text] == []
    assert kinds["x>\n"] and kinds["\n"] and not kinds["</"] and not kinds["x"] and not kinds["ab"]
    assert not kinds[">"]  # the stop string continues after it


def test_tokens_are_decoded_once() -> None:
    calls: list[Sequence[int]] = []

    def counted(ids: Sequence[int]) -> str:
        calls.append(ids)
        return decode(ids)

    stopping = StopStrings(counted)
    tokens = np.array([[1, 3, 1], [4, 1, 3]])
    first = stopping.suspects(tokens, ("b",))
    assert first.tolist() == [[False, True, False], [True, False, True]]
    before = len(calls)
    assert stopping.suspects(tokens[:, ::-1], ("b",)).tolist() == first[:, ::-1].tolist()
    assert stopping.suspects(tokens, ("a",)).tolist() == [[True, True, True], [True, True, True]]
    assert len(calls) == before
    assert stopping.suspects(np.zeros((0, 3), dtype=np.int32), ("a",)).shape == (0, 3)


def test_number_of_cached_tables_is_bounded() -> None:
    stopping = StopStrings(decode)
    for _ in range(2):
        for i in range(TABLES + 10):
            assert stopping.suspects(np.array([1, 2]), ("b", f"{i}")).tolist() == [False, True]
    assert len(stopping.kinds) == TABLES
