"""One rollout as the page shows it: its line, its arrays, and the texts of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from web_parts import make_run

from assay.text import char_tokenizer, word_tokenizer
from assay.web.folder import FILE, RunFolder, RunTokenizer, load_tokens
from assay.web.index import cleaned, skip_reason, token_columns

TURNS = [
    {"text": "a", "context_tokens": 2, "tokens": 1, "masked": True},
    {"text": "b", "context_tokens": 1, "tokens": 2},
]
LINE: dict[str, Any] = {"turns": TURNS, "advantage": 0.5, "by_token": False}


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """Two rollouts; the second has two turns, the first of which is masked."""
    nan = float("nan")
    return {
        "offsets": np.array([0, 2, 8]),
        "token_ids": np.arange(8),
        "loss_mask": np.array([0, 1, 0, 0, 0, 0, 1, 1]),
        "engine_logprobs": np.array([0, -9, 0, 0, -1, 0, -2, -3], np.float32),
        "trainer_logprobs": np.array([nan, -9, nan, nan, nan, nan, -2.5, nan]),
        "ref_logprobs": np.full(8, nan),
        "token_advantages": np.array([0, 0, 0, 0, 0, 0, 0.1, 0.2]),
        **changes,
    }


def test_values_of_each_token() -> None:
    table = token_columns(arrays(), 1, LINE)
    assert table["ids"] == [2, 3, 4, 5, 6, 7]
    assert table["sampled"] == [0, 0, 1, 0, 1, 1] and table["mask"] == [0, 0, 0, 0, 1, 1]
    assert table["engine_logprobs"] == [None, None, -1, None, -2, -3]
    assert table["trainer_logprobs"] == [None, None, None, None, -2.5, None]
    assert table["ref_logprobs"] is None and table["entropies"] is None and table["sampling_logprobs"] is None
    assert table["advantages"] == [None, None, None, None, 0.5, 0.5]
    assert token_columns(arrays(), 1, {**LINE, "by_token": True})["advantages"] == [None, None, None, None, 0.1, 0.2]
    assert token_columns(arrays(), 1, {**LINE, "advantage": "NaN"})["advantages"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 5, 2])},
        {"offsets": np.array([0, 2, 99])},
        {"offsets": np.array([0, 2])},
        {"offsets": np.array([0, -3, 8])},
        {"token_ids": np.arange(4)},
        {"loss_mask": np.ones(8)},
        {"engine_logprobs": np.zeros(3)},
        {"engine_logprobs": np.array(["x"] * 8)},
    ],
)
def test_arrays_that_do_not_match(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises((ValueError, IndexError)):
        token_columns(arrays(**changes), 1, LINE)


def test_numbers_that_are_not_finite_are_none() -> None:
    line = cleaned(
        {
            "reward": "NaN",
            "advantage": "-Infinity",
            "verdict": {"reward": "Infinity", "parts": {"accuracy": "NaN", "format": 1.0}},
            "turns": [{"reward": "NaN", "entropy": 0.5}, 7],
            "text": "NaN",
        }
    )
    assert line["reward"] is None and line["advantage"] is None and line["text"] == "NaN"
    assert line["verdict"] == {"reward": None, "parts": {"accuracy": None, "format": 1.0}}
    assert line["turns"] == [{"reward": None, "entropy": 0.5}]
    assert cleaned({"verdict": None, "turns": 3})["turns"] == []


@pytest.mark.parametrize(
    ("updates", "told"),
    [
        ([{"what": "the loss"}], "an update was skipped, because the loss is not finite"),
        ([{"what": "the gradient"}] * 2, "2 updates were skipped, because the gradient is not finite"),
        (None, "its update was skipped"),
        (["x"], "its update was skipped"),
    ],
)
def test_why_an_update_was_skipped(updates: object, told: str) -> None:
    assert skip_reason({"updates": updates}) == told


# Texts of tokens

TEXT = "<|im_start|>user\nHéllo €uro 日本語 👩‍👩‍👧 ok\n\n  x = 3<|im_end|>"


def byte_level() -> Backend:
    """A byte-level tokenizer that knows no characters beyond single bytes, except in a few words."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(["user user ok ok hello 3 = x"] * 9, trainer)
    return backend


def byte_fallback() -> Backend:
    """Like the tokenizers of Llama 2 and Gemma: a space mark, bytes for unknown characters, a stripped first space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁H", "i", "▁the", "re", "H"]
    backend = Backend(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return backend


def test_pieces_of_bytes_join_to_the_text() -> None:
    backend = byte_level()
    ids = backend.encode(TEXT, add_special_tokens=False).ids
    texts, raw = RunTokenizer(backend).pieces(ids)
    assert "".join(texts) == TEXT == backend.decode(ids, skip_special_tokens=False) and len(texts) == len(ids)
    euro = next(place for place, text in enumerate(texts) if "€" in text)
    assert texts[euro - 2 : euro + 1] == ["", "", "€"]
    assert [raw[euro - 2], raw[euro - 1], raw[euro]] == ["E2", "82", "AC"]
    assert all(texts[place] == "" or not texts[place].isascii() for place in raw)
    assert 0 not in raw  # whole characters have no bytes


def test_an_answer_that_ends_within_a_character() -> None:
    backend = byte_level()
    ids = backend.encode("ok €👩日", add_special_tokens=False).ids
    for end in range(len(ids)):
        texts, _ = RunTokenizer(backend).pieces(ids[:end])
        assert "".join(texts) == backend.decode(ids[:end], skip_special_tokens=False) and len(texts) == end


def test_pieces_of_unknown_characters() -> None:
    backend = byte_fallback()
    names = ["▁H", "i", "▁the", "<0xE2>", "<0x82>", "<0xAC>", "re", "<0xFF>", "▁H", "<0xE2>", "i", "<0xE2>", "<0x82>"]
    ids = [backend.token_to_id(name) for name in names]
    texts, raw = RunTokenizer(backend).pieces(ids)
    assert "".join(texts) == backend.decode(ids, skip_special_tokens=False) and texts[:3] == ["H", "i", " the"]
    assert {raw[3], raw[5], raw[7]} == {"E2", "AC", "FF"}


@pytest.mark.parametrize("tokenizer", [char_tokenizer(), word_tokenizer(["one", "two", "+"])], ids=["char", "word"])
def test_tokenizers_of_presets(tokenizer: Any) -> None:
    ids = [4, *tokenizer.encode("one + two"), tokenizer.eos_id]
    texts, raw = RunTokenizer(tokenizer.hf.backend_tokenizer).pieces(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special=False) and raw == {}
    assert texts[-1].strip() == "<eos>"


def saved(folder: Path) -> Path:
    folder.mkdir(parents=True)
    byte_level().save(str(folder / FILE))
    return folder


@pytest.mark.parametrize("place", ["tokenizer", "checkpoints/step-000000/model", "base", "reference"])
def test_tokenizers_in_a_run(tmp_path: Path, place: str) -> None:
    path = make_run(tmp_path)
    saved(path / place)
    tokens, problem = load_tokens(RunFolder(path))
    assert tokens is not None and problem is None and tokens.decode([0]) == "<|im_start|>"


def set_model(path: Path, **settings: str) -> None:
    (path / "config.toml").write_text("[model]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))


def test_the_model_of_the_config(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs")
    saved(tmp_path / "models" / "mine")
    set_model(path, source=str(tmp_path / "models" / "mine"))
    assert load_tokens(RunFolder(path))[0] is not None
    set_model(path, source="models/mine")  # relative to the folder in which the run was started
    (path / "environment.json").write_text(json.dumps({"folder": str(tmp_path)}))
    assert load_tokens(RunFolder(path))[0] is not None
    set_model(path, source="elsewhere", tokenizer=str(tmp_path / "models" / "mine"))
    assert load_tokens(RunFolder(path))[0] is not None


@pytest.mark.parametrize(
    "source", ["some-org/some-model", "preset:nano", "run:other@last", "", "/does/not/exist", "\0", "a" * 9000]
)
def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    import socket

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    path = make_run(tmp_path)
    set_model(path, source=source)
    tokens, problem = load_tokens(RunFolder(path))
    assert tokens is None and problem is not None and "no tokenizer" in problem and "copy" in problem


def test_code_of_models_is_not_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}, "model_type": "x"}')
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}')
    (model / "tokenization_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = make_run(tmp_path)
    set_model(path, source=str(model))
    tokens, problem = load_tokens(RunFolder(path))
    assert tokens is None and problem is not None and "cannot be read" in problem
    assert not (tmp_path / "ran").exists()


def test_damaged_tokenizers_are_skipped(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / FILE).write_text('{"model": 3}')
    tokens, problem = load_tokens(RunFolder(path))
    assert tokens is None and f"tokenizer/{FILE} cannot be read" in (problem or "")
    saved(path / "base")
    assert load_tokens(RunFolder(path))[0] is not None


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs")
    (path / "tokenizer").symlink_to(saved(tmp_path / "elsewhere"))
    assert load_tokens(RunFolder(path))[0] is None


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    texts, _ = RunTokenizer(byte_level()).pieces([99_999, 5, 99_999])
    assert len(texts) == 3 and texts[0] == texts[2] == ""
    assert RunTokenizer(byte_level()).pieces([]) == ([], {})
