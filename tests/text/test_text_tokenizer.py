"""Tokenizers: wrapper, loading from folders, the hub and GGUF files, and the built-in tokenizers."""

from __future__ import annotations

import json
import pickle
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from assay.text import Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.text.tokenizer import read_metadata
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
    assert Tokenizer(byte_level(additional_special_tokens=[])).eos_ids == (0,)
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


def test_encoding_replaces_lone_surrogates_and_rejects_other_types() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    with pytest.raises(TypeError):
        tokenizer.encode(7)  # type: ignore[arg-type]


def test_batched_calls_equal_single_calls() -> None:
    tokenizer = Tokenizer(byte_level())
    texts = ["1 €", "", "a<|im_end|>b", " do n't  stop , now ! "]
    ids = [*map(tokenizer.encode, texts)]
    assert tokenizer.encode_all(texts) == ids
    assert tokenizer.encode_all([*texts, "\ud800"]) == [*ids, tokenizer.encode("\ud800")]
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


def test_end_token_is_the_pad_token_if_there_is_none() -> None:
    assert Tokenizer(byte_level()).pad_id == 0
    assert Tokenizer(byte_level()).bos_id is None


@pytest.mark.parametrize("make", ["no folder", "empty folder", "a file", "no gguf", "broken gguf", "short gguf"])
def test_invalid_tokenizer_sources_are_reported(make: str, tmp_path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.gguf").write_bytes(b"not one")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    if make == "empty folder":
        folder.mkdir()
    names = {"a file": "notes.txt", "no gguf": "no.gguf", "broken gguf": "broken.gguf", "short gguf": "short.gguf"}
    source = str(tmp_path / names.get(make, "folder"))
    with pytest.raises(UserError) as caught:
        load_tokenizer(source)
    assert source in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_folder_without_tokenizer_files_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")  # transformers alone would make an empty tokenizer
    with pytest.raises(UserError, match=r"has no tokenizer: tokenizer.json is missing.*model\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_unknown_hub_id_offline_fails_quickly(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r'"nobody/no-such-model".*hub cannot be reached'):
        load_tokenizer("nobody/no-such-model")


def write_gguf(path: Path, pre: str, text_end: str = "", **flags: bool) -> None:
    """A Llama file without tensors, whose vocabulary is the bytes, a few merges, and three or four special tokens."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<s>", "</s>", "<|eot_id|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "abc"]
    tokens += [text_end] if text_end else []
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 4) + [3 if text_end else 1])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}")
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_specials_template_digits_and_bos(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm", add_bos_token=True)
    assert read_metadata(path)["tokenizer.ggml.pre"] == "smollm"
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_ids == (1, 2)
    assert tokenizer.encode("<s></s><|eot_id|>") == [0, 1, 2]
    # The digit is cut off first, so the two newlines before it stay one token.
    assert [tokenizer.decode([index]) for index in tokenizer.encode("\n\n12")] == ["\n\n", "1", "2"]
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "<s>hi<|eot_id|>"
    tokenizer.save(tmp_path / "saved")
    reloaded = load_tokenizer(str(tmp_path / "saved"))
    assert tokenizer.expects_bos and reloaded.expects_bos
    assert reloaded.encode("\n\n12 <|eot_id|>") == tokenizer.encode("\n\n12 <|eot_id|>")


@pytest.mark.parametrize("text_end", ["<|endoftext|>", "<|end_of_text|>"])
def test_the_token_that_ends_a_text_ends_answers_of_a_gguf_model(tmp_path: Path, text_end: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "smollm", text_end)
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer.eos_ids == (1, 2, *tokenizer.encode(text_end)) and len(tokenizer.eos_ids) == 3


def test_llama3_gguf_prefers_whole_words_and_respects_add_bos_token(tmp_path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama-bpe")
    write_gguf(tmp_path / "b.gguf", "llama-bpe", add_bos_token=False)
    tokenizer = load_tokenizer(str(tmp_path / "a.gguf"))
    assert tokenizer.decode(tokenizer.encode("abc")[:1]) == "abc"  # in the vocabulary, though no merge leads there
    assert tokenizer.expects_bos
    assert not load_tokenizer(str(tmp_path / "b.gguf")).expects_bos


def test_smollm2_specials_and_template(smollm2: Tokenizer, tmp_path) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("<|im_start|><|im_end|>") == [1, 2]
    assert smollm2.eos_ids == (2, 0) and smollm2.bos_id == 1 and not smollm2.expects_bos
    assert smollm2.decode([0], skip_special=False) == "<|endoftext|>"
    assert smollm2.has_chat_template
    text = "Ann has 1234 coins.\n\n12 + 7 = 19, so it's   €5 — naïve 😀"
    assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.decode([*smollm2.encode("ok"), 50_000]) == "ok"
    smollm2.save(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode(text) == smollm2.encode(text)


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


def test_slow_tokenizers_are_rejected() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer(Slow())


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


def test_sizes_and_special_tokens() -> None:
    assert CHAR.vocab_size == 97 + 8
    assert WORD.vocab_size == len(WORDS) + 8
    for tokenizer in (CHAR, WORD):
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,))
        assert tokenizer.has_chat_template and not tokenizer.expects_bos
        assert tokenizer.decode([tokenizer.pad_id, 1, *tokenizer.eos_ids]) == ""


def test_builtin_chat_template_adds_two_tokens() -> None:
    question = "How many coins ?"
    for tokenizer in (CHAR, WORD):
        text = tokenizer.chat_text([{"role": "user", "content": question}], open_reply=True)
        assert len(tokenizer.encode(text)) == len(tokenizer.encode(question)) + 2


@pytest.mark.parametrize("tokenizer", [CHAR, WORD], ids=["char", "word"])
def test_saved_tokenizer_loads_in_transformers(tokenizer: Tokenizer, tmp_path) -> None:
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


@pytest.mark.parametrize("words", [[], ["two words"], [""], ["a<eos>"]])
def test_invalid_words_are_rejected(words: list[str]) -> None:
    with pytest.raises(UserError):
        word_tokenizer(words)
