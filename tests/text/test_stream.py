"""Text from streams of tokens: split characters, spaces between words, stop strings, and cost per token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from assay.tasks import Abacus
from assay.text import word_tokenizer
from assay.text.tokenizer import WINDOW, Detokenizer, TextStream, text_before_stop


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def byte_fallback(ids: Sequence[int]) -> str:
    """As SentencePiece models decode: words with a leading space, and single bytes for other characters."""
    return FALLBACK.decode(list(ids), skip_special_tokens=False)


WORDS = ["▁Hello", "▁world", "!", "▁木"]
FALLBACK = Backend(
    models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {w: 256 + i for i, w in enumerate(WORDS)}, [])
)
FALLBACK.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def joined(stream: Detokenizer | TextStream, tokens: Sequence[int], sizes: Sequence[int] = (1,)) -> str:
    pieces, start, turn = [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.add(tokens[start : start + size]))
        start, turn = start + size, turn + 1
    return "".join([*pieces, stream.finish()])


def test_a_character_is_returned_with_its_last_byte() -> None:
    text = "né 木 👩‍🚀!\n"
    stream = TextStream(decode_bytes)
    pieces = [stream.add([token]) for token in text.encode()] + [stream.finish()]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == "n" and pieces[1] == "" and pieces[2] == "é"


@pytest.mark.parametrize("before", ["", "7 +", "7 + 5 = 12 ;" * WINDOW])
def test_words_are_separated_by_spaces_from_each_other_and_their_context(before: str) -> None:
    tokenizer = word_tokenizer(Abacus().words())
    stream = TextStream(tokenizer.decode, context=tokenizer.encode(before))
    pieces = [stream.add([token]) for token in tokenizer.encode("5 = 12 ;")]
    assert pieces == [" 5" if before else "5", " =", " 12", " ;"]


@given(st.binary(max_size=200), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_of_any_bytes_are_the_text_of_all_tokens(data: bytes, sizes: list[int]) -> None:
    assert joined(Detokenizer(decode_bytes), data, sizes) == decode_bytes(data)


@given(st.text("aé木👩\u200d🚀 \n", max_size=80), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_of_split_characters_are_the_text_of_all_tokens(text: str, sizes: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    assert joined(Detokenizer(decode_bytes), data, sizes) == data.decode()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_byte_tokens_between_words_are_decoded(size: int) -> None:
    draw = random.Random(size)
    tokens: list[int] = []
    for _ in range(100):
        tokens += draw.choice([[256], [257], [258], [259], list("é".encode()), list("👩‍🚀".encode())])
    assert joined(Detokenizer(byte_fallback), tokens, [size]) == byte_fallback(tokens)


@pytest.mark.parametrize("data", [b"a" * 2000, "木".encode() * 700, b"\xe6" * 2000], ids=["text", "split", "invalid"])
def test_the_number_of_decoded_tokens_is_linear(data: bytes) -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode_bytes(ids)

    assert joined(Detokenizer(decode), data) == decode_bytes(data)
    assert decoded < 4 * WINDOW * len(data)


def test_a_stop_string_is_never_returned() -> None:
    stream = TextStream(decode_bytes, ["\nQuestion:"])
    pieces = [stream.add([token]) for token in b"12\nQuiet\nQuestion: 3"] + [stream.finish()]
    assert "".join(pieces) == "12\nQuiet"
    assert pieces[2] == "" and "\nQui" in pieces  # held back while it could have become a stop string


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_text_ends_before_the_stop_string_that_is_completed_first(text: str, stops: list[str], size: int) -> None:
    ends = (end for end in range(size, len(text), size) if any(stop in text[:end] for stop in stops))
    expected = text_before_stop(text[: next(ends, None)], stops)
    assert joined(TextStream(decode_bytes, stops), text.encode(), [size]) == expected
