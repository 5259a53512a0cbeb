"""Tokenizers: end tokens, decoding, files, built-in ones; and text of tokens while they are sampled."""

from __future__ import annotations

import json
import pickle
import random
import string
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from assay.tasks import Abacus
from assay.text import Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.text.tokenizer import WINDOW, Detokenizer, TextStream, read_metadata, text_before_stop
from assay.types import UserError


def byte_level(**kwargs) -> PreTrainedTokenizerFast:
    """One token for each byte, <|im_end|> and </s> special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["</s>", "<|im_end|>", *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    kwargs.setdefault("additional_special_tokens", ["<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **kwargs)


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(byte_level(chat_template=template))
    messages = [{"role": "user", "content": "né"}]
    text = tokenizer.chat_text(messages)  # compiles the template
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.chat_text(messages) == text and copy.encode(text) == tokenizer.encode(text)


def test_end_tokens_come_from_the_tokenizer_the_turn_ends_and_the_generation_config(tmp_path) -> None:
    assert Tokenizer(byte_level()).eos_ids == (0, 1)
    plain = Tokenizer(byte_level(additional_special_tokens=[]))
    assert (plain.eos_ids, plain.pad_id, plain.bos_id) == ((0,), 0, None)
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_tokenizer(str(tmp_path)).eos_ids == (0, 1, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_tokenizer(str(tmp_path)).eos_ids == (0, 1, 9)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_tokenizer(str(tmp_path))


def test_decoding_handles_invalid_utf8_and_padding_ids() -> None:
    tokenizer = Tokenizer(byte_level())
    euro = tokenizer.encode("1 €")
    assert len(euro) == 5
    assert tokenizer.decode(euro) == "1 €"
    assert tokenizer.decode(euro[:-1]).rstrip("\ufffd") == "1 "
    assert tokenizer.decode([*euro, tokenizer.vocab_size + 100]) == "1 €"
    assert tokenizer.decode([*euro, 0, 1]) == "1 €"
    assert tokenizer.decode([*euro, 0], skip_special=False) == "1 €</s>"


def test_decoding_leaves_spaces_before_punctuation_alone() -> None:
    tokenizer = Tokenizer(byte_level(clean_up_tokenization_spaces=True))
    text = " do n't  stop , now ! "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batched_calls_equal_single_calls() -> None:
    tokenizer = Tokenizer(byte_level())
    texts = ["1 €", "", "a<|im_end|>b", " do n't  stop , now ! "]
    ids = [*map(tokenizer.encode, texts)]
    assert tokenizer.encode_all(texts) == ids
    assert tokenizer.encode_all([*texts, "a\ud800b"]) == [*ids, tokenizer.encode("a?b")]  # a lone surrogate
    with pytest.raises(TypeError):
        tokenizer.encode(7)  # type: ignore[arg-type]
    assert tokenizer.encode_all([]) == tokenizer.decode_all([]) == []
    lists = [*ids, ids[0][:-1], [*ids[0], 0, tokenizer.vocab_size + 100]]
    assert tokenizer.decode_all(lists) == [*map(tokenizer.decode, lists)]


def test_truncation_and_padding_of_tokenizer_json_are_disabled(tmp_path) -> None:
    hf = byte_level()
    hf.backend_tokenizer.enable_truncation(3)
    hf.backend_tokenizer.enable_padding(length=50, pad_id=0, pad_token="</s>")
    hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert len(load_tokenizer(str(tmp_path)).encode("abcdefgh")) == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("folder", None, "no such folder"),
        ("folder/tokenizer_config.json", b"{}", "neither a model nor a tokenizer"),
        ("folder/config.json", b'{"model_type": "qwen2"}', r"tokenizer.json is missing.*model\.tokenizer"),
        ("notes.txt", b"hello", "is a file"),
        ("no.gguf", None, "no such file"),
        ("broken.gguf", b"not one", "is not a GGUF file"),
        ("old.gguf", b"GGUF\x01\x00\x00\x00", "GGUF version 1, which is not supported"),
        ("short.gguf", b"GGUF\x03\x00\x00\x00", "is damaged"),
    ],
)
def test_invalid_tokenizer_sources_are_reported(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    """transformers alone would make an empty tokenizer of a folder with tokenizer_config.json."""
    file = tmp_path / name
    if content is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    source = str(tmp_path / name.split("/")[0])
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(source)
    assert source in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_hub_id_offline_fails_quickly(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r'"nobody/no-such-model".*hub cannot be reached'):
        load_tokenizer("nobody/no-such-model")


def write_gguf(path: Path, pre: str, text_end: str = "", **flags: bool) -> None:
    """A Llama file without tensors, whose vocabulary is the bytes, a few merges, and three or four special tokens."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<s>", "</s>", "<|eot_id|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "abc"]
    tokens += [text_end] if text_end else []
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "head_count": 1}
    special = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 2, "chat_template": template}
    types = [3, 3, 3] + [1] * (len(tokens) - 4) + [3 if text_end else 1]
    vocabulary = {"token_list": tokens, "token_types": types, "token_merges": ["Ċ Ċ"]}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {**sizes, "tokenizer_model": "gpt2", "tokenizer_pre": pre, **vocabulary, **special}.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("text_end", ["", "<|endoftext|>", "<|end_of_text|>"])
def test_a_gguf_file_gives_specials_template_digits_and_bos(tmp_path: Path, text_end: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm", text_end, add_bos_token=True)
    assert read_metadata(path)["tokenizer.ggml.pre"] == "smollm"
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_ids == (1, 2, *tokenizer.encode(text_end))
    assert len(tokenizer.eos_ids) == 2 + bool(text_end)  # the token that ends a text ends answers, too
    assert tokenizer.encode("<s></s><|eot_id|>") == [0, 1, 2]
    # The digit is cut off first, so the two newlines before it stay one token.
    assert [tokenizer.decode([index]) for index in tokenizer.encode("\n\n12")] == ["\n\n", "1", "2"]
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "<s>hi<|eot_id|>"
    tokenizer.save(tmp_path / "saved")
    reloaded = load_tokenizer(str(tmp_path / "saved"))
    assert tokenizer.expects_bos and reloaded.expects_bos
    assert reloaded.encode("\n\n12 <|eot_id|>") == tokenizer.encode("\n\n12 <|eot_id|>")


def test_llama3_gguf_prefers_whole_words_and_respects_add_bos_token(tmp_path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama-bpe")
    write_gguf(tmp_path / "b.gguf", "llama-bpe", add_bos_token=False)
    tokenizer = load_tokenizer(str(tmp_path / "a.gguf"))
    assert tokenizer.decode(tokenizer.encode("abc")[:1]) == "abc"  # in the vocabulary, though no merge leads there
    assert tokenizer.expects_bos
    assert not load_tokenizer(str(tmp_path / "b.gguf")).expects_bos


def saved_files(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    tokenizer.save(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("source", ["characters", "folder", "gguf", "llama3 gguf"])
def test_saving_a_loaded_tokenizer_writes_identical_files(tmp_path: Path, source: str) -> None:
    """A resumed run loads its tokenizer from a checkpoint: later checkpoints must not differ for that."""
    if source == "characters":
        tokenizer = char_tokenizer()
    elif source == "folder":
        byte_level(model_max_length=64, add_bos_token=True).save_pretrained(tmp_path / "source")
        tokenizer = load_tokenizer(str(tmp_path / "source"))
    else:
        write_gguf(tmp_path / "tiny.gguf", "smollm" if source == "gguf" else "llama-bpe")
        tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    first = saved_files(tokenizer, tmp_path / "first")
    assert saved_files(load_tokenizer(str(tmp_path / "first")), tmp_path / "second") == first
    assert {"is_local", "local_files_only"}.isdisjoint(json.loads(first["tokenizer_config.json"]))


@pytest.mark.parametrize("words", [[], ["two words"], [""], ["a<eos>"]])
def test_invalid_tokenizers_are_rejected(words: list[str]) -> None:
    with pytest.raises(UserError, match="word"):
        word_tokenizer(words)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer(SimpleNamespace(is_fast=False))


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


@given(st.text("aé木👩\u200d🚀\0\ud800 \n"))
def test_any_text_can_be_encoded(text: str) -> None:
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


@pytest.mark.parametrize("tokenizer", [CHAR, WORD], ids=["char", "word"])
def test_saved_tokenizer_loads_in_transformers(tokenizer: Tokenizer, tmp_path) -> None:
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,)) and not tokenizer.expects_bos
    assert tokenizer.decode([tokenizer.pad_id, 1, *tokenizer.eos_ids]) == ""
    question = "How many coins ?"
    opened = tokenizer.chat_text([{"role": "user", "content": question}], open_reply=True)
    assert len(tokenizer.encode(opened)) == len(tokenizer.encode(question)) + 2
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


# Text of tokens while they are sampled


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def byte_fallback(ids: Sequence[int]) -> str:
    """As SentencePiece models decode: words with a leading space, and single bytes for other characters."""
    return FALLBACK.decode(list(ids), skip_special_tokens=False)


SPOKEN = ["▁Hello", "▁world", "!", "▁木"]
FALLBACK = Backend(
    models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {w: 256 + i for i, w in enumerate(SPOKEN)}, [])
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
