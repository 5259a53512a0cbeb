"""The built-in tokenizers: round trips, and that they are ordinary Hugging Face tokenizers."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from assay.text import Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.types import UserError

WORDS = ["Ann", "has", "coins", ".", "How", "many", "?", "+", "-", "=", ";", "####", *map(str, range(41))]
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n\t"
CHAR, WORD = char_tokenizer(), word_tokenizer(WORDS)
TURNS = [{"role": "system", "content": "has"}, {"role": "user", "content": "How many ?"}]


@given(st.text(alphabet=CHARACTERS))
def test_characters_round_trip_one_token_each(text: str) -> None:
    ids = CHAR.encode(text)
    if not any(special in text for special in CHAR.hf.all_special_tokens):
        assert len(ids) == len(text)
    assert CHAR.decode(ids, skip_special=False) == text


@given(st.text())
def test_any_text_at_all_can_be_encoded(text: str) -> None:
    assert all(0 <= index < CHAR.vocab_size for index in CHAR.encode(text))


def test_unknown_characters_and_words_are_unk() -> None:
    unk = CHAR.hf.unk_token_id
    assert CHAR.encode("aéb") == [*CHAR.encode("a"), unk, *CHAR.encode("b")]
    assert WORD.encode("Ann owns coins") == [*WORD.encode("Ann"), unk, *WORD.encode("coins")]


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "  ", "\n", "\t "]))))
def test_words_round_trip_with_single_spaces(pairs: list[tuple[str, str]]) -> None:
    text = "".join(word + space for word, space in pairs)
    ids = WORD.encode(text)
    assert len(ids) == len(pairs)
    assert WORD.decode(ids) == " ".join(text.split())


def test_sizes_and_special_tokens() -> None:
    assert CHAR.vocab_size == 97 + 8
    assert WORD.vocab_size == len(WORDS) + 8
    for tokenizer in (CHAR, WORD):
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,))
        assert tokenizer.has_chat_template and not tokenizer.expects_bos
        assert tokenizer.decode([tokenizer.pad_id, 1, *tokenizer.eos_ids]) == ""


def test_chat_costs_two_tokens() -> None:
    question = "How many coins ?"
    for tokenizer in (CHAR, WORD):
        text = tokenizer.chat_text([{"role": "user", "content": question}], open_reply=True)
        assert len(tokenizer.encode(text)) == len(tokenizer.encode(question)) + 2


@pytest.mark.parametrize("tokenizer", [CHAR, WORD], ids=["char", "word"])
def test_a_saved_tokenizer_is_an_ordinary_one(tokenizer: Tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path)
    reloaded, plain = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    text = "Ann has 7 coins .\n####  12 unheard-of <eos>"
    ids = tokenizer.encode(text)
    assert reloaded.encode(text) == ids == plain(text, add_special_tokens=False)["input_ids"]
    assert reloaded.decode(ids) == tokenizer.decode(ids) == plain.decode(ids, skip_special_tokens=True)
    rendered = tokenizer.chat_text(TURNS, open_reply=True)
    assert reloaded.chat_text(TURNS, open_reply=True) == rendered
    chat = plain.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert chat == tokenizer.encode(rendered)
    for name in ("vocab_size", "eos_ids", "bos_id", "pad_id", "special_ids"):
        assert getattr(reloaded, name) == getattr(tokenizer, name)


def test_the_same_words_give_the_same_files(tmp_path) -> None:
    for name in ("a", "b"):
        word_tokenizer([*WORDS, *WORDS]).save(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


@pytest.mark.parametrize("words", [[], ["two words"], [""], ["a<eos>"]])
def test_words_that_cannot_be_words(words: list[str]) -> None:
    with pytest.raises(UserError):
        word_tokenizer(words)
