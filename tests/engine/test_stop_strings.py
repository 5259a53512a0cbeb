from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel

from assay.engine.base import Decode
from assay.engine.completions import BROKEN, TABLES, StopStrings, added_by, completes_stop, may_complete

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


@pytest.mark.parametrize(
    ("kind", "ids", "stop"), [("suffixed", [0, 3], "ab"), ("words", [2], "##"), ("words", [2, 2], "#aa")]
)
def test_text_added_by_a_token_depends_on_its_position(kind: str, ids: list[int], stop: str) -> None:
    _, decoded = tokenizers()[kind]
    assert stop in decoded(ids)
    assert StopStrings(decoded).suspects(np.array(ids), (stop,))[-1]


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


def test_trailing_space_of_a_word_is_found_with_the_next_token() -> None:
    """The decoder of GPT-1 writes the space of "a</w>" only if another token follows."""
    size, decoded = tokenizers()["suffixed"]
    ends, stopping = [2, 3, 4, 5], StopStrings(decoded)
    for first in ends:
        stop = decoded([first]) + " "
        for following in range(size):
            ids = [0, first, following]
            assert StopStrings(decoded).suspects(np.array(ids), (stop,)).tolist()[-1]
            assert [stopping.suspects(np.array([token]), (stop,)).item() for token in ids][-1]  # one call per token
            assert stopping.completed(ids, (stop,)) and not stopping.completed(ids[:2], (stop,))


def test_few_tokens_are_suspects() -> None:
    size, decoded = tokenizers()["bytes"]
    added = {i: added_by(i, decoded) for i in range(size) if BROKEN not in decoded([i])}
    kinds = {decoded([i]): may_complete(added[i], ["</x>\n"]) for i in added}
    assert [text for text, may in kinds.items() if may and "\n" not in text and ">" not in text] == []
    assert kinds["x>\n"] and kinds["\n"] and not kinds["</"] and not kinds["x"] and not kinds["ab"]
    assert not kinds[">"]  # the stop string continues after it


def test_incomplete_characters_do_not_make_all_tokens_suspects() -> None:
    size, decoded = tokenizers()["bytes"]
    stopping = StopStrings(decoded)
    every = np.arange(size)
    broken = np.array([BROKEN in decoded([token, token]) for token in every])
    assert broken.any() and stopping.suspects(every, ("</x> ",))[~broken].mean() < 0.2


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
