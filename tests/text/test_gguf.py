"""Tokenizers in GGUF files: ours as they were, and those that llama.cpp knows in its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from assay.text import Tokenizer, char_tokenizer, word_tokenizer
from assay.text.tokenizer import HF_JSON, gguf_metadata, load_tokenizer

gguf = pytest.importorskip("gguf")
TEXT = "two words, 12 + 7 = 19\n  end"


def byte_level(*splits: Any) -> Tokenizer:
    """A small byte-level BPE as Qwen's, with a chat template and two ends."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*letters, "wo", "Ġwo", "12"])}
    backend = Backend(models.BPE(vocabulary, [("w", "o"), ("Ġ", "wo"), ("1", "2")]))
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_step]) if splits else byte_step
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", special=False)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    hf.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    return Tokenizer(hf, [hf.convert_tokens_to_ids("<|endoftext|>")])


def qwen2_split() -> Any:
    return pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)


def written(path: Path, metadata: dict[str, Any]) -> Path:
    from assay.models.gguf import add_value

    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "make", [char_tokenizer, lambda: word_tokenizer(TEXT.split()), lambda: byte_level(qwen2_split())]
)
def test_a_tokenizer_comes_back(make: Any, tmp_path: Path) -> None:
    before = make()
    after = load_tokenizer(str(written(tmp_path / "m.gguf", gguf_metadata(before, before.vocab_size))))
    assert after.encode(TEXT) == before.encode(TEXT)
    assert after.decode(after.encode(TEXT)) == before.decode(before.encode(TEXT))
    assert (after.eos_id, after.pad_id, after.bos_id) == (before.eos_id, before.pad_id, before.bos_id)
    assert set(after.eos_ids) == set(before.eos_ids) and after.special_ids == before.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert after.chat_text(messages) == before.chat_text(messages)


@pytest.mark.parametrize(
    ("splits", "name"),
    [
        ([qwen2_split()], "qwen2"),
        ([], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=True)], "smollm"),
        ([pre_tokenizers.Whitespace()], None),  # llama.cpp has no such split
    ],
)
def test_byte_level_tokenizers_have_the_form_that_llama_cpp_reads(splits: list[Any], name: str | None) -> None:
    tokenizer = byte_level(*splits)
    metadata = gguf_metadata(tokenizer, tokenizer.vocab_size + 2)
    assert metadata.get("tokenizer.ggml.pre") == name
    assert metadata["tokenizer.ggml.model"] == ("gpt2" if name else "none")
    assert json.loads(metadata[HF_JSON])["model"]["type"] == "BPE"
    if name:
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        assert len(tokens) == len(kinds) == tokenizer.vocab_size + 2
        assert kinds[-5:] == [3, 3, 4, 5, 5] and set(kinds[:-5]) == {1}  # special, special, added, padding
        assert metadata["tokenizer.ggml.merges"] == ["w o", "Ġ wo", "1 2"]
        assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"


@pytest.mark.parametrize("name", ["qwen2", "smollm"])
def test_transformers_splits_text_alike_without_the_tokenizer_json(name: str, tmp_path: Path) -> None:
    tokenizer = byte_level(qwen2_split() if name == "qwen2" else pre_tokenizers.Digits(individual_digits=True))
    metadata = gguf_metadata(tokenizer, tokenizer.vocab_size)
    del metadata[HF_JSON]
    assert load_tokenizer(str(written(tmp_path / "m.gguf", metadata))).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.peer
def test_llama_cpp_reads_text_and_weights_alike(tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="the package xllamacpp, a build of llama.cpp, is not installed")
    from assay.models import build_preset
    from assay.models.gguf import greedy, save_gguf

    tokenizer, new = byte_level(qwen2_split()), 12
    model = build_preset("pico", tokenizer.vocab_size, 128, seed=3)
    save_gguf(model, tmp_path / "m.gguf", "f16", gguf_metadata(tokenizer, tokenizer.vocab_size))
    prompt = tokenizer.encode(TEXT + "<|im_end|>")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.cpuparams.n_threads = str(tmp_path / "m.gguf"), 128, False, 1
    request = {"prompt": TEXT + "<|im_end|>", "max_tokens": new, "temperature": 0, "ignore_eos": True}
    answer = xllamacpp.Server(params).handle_completions(request)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    expected = greedy(model, [prompt], new).sequences[0][len(prompt) :]
    assert answer["choices"][0]["text"] == tokenizer.decode(expected)
