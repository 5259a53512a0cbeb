"""Untrusted files: a command exits with 0, or with 2 and one line, and prints no control characters."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import preset_folder

from assay.cli.main import main

EVIL = "\x1b]0;pwned\x07\x1b[2J\u202e\u2066\x9b31m"
LONG = "n" * 5_000
Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `assay`, checks what must hold for all input, and returns the output."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int | None = None) -> str:
        capsys.readouterr()
        result = main([*map(str, words)])
        out, err = capsys.readouterr()
        assert result in ((0, 2) if code is None else (code,)), err
        assert "Traceback" not in err
        assert not set(out + err) & set("\x1b\x07\x9b\u202e\u2066\r")
        if result == 2:
            lines = [line for line in err.splitlines() if line.startswith("assay: ")]
            assert len(lines) == 1 and len(lines[0]) < 1_100, err
        return out + err

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preset_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with another file in it."""

    def change(name: str, content: bytes | str | dict[str, Any], drop: str = "") -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in model.iterdir():
            if file.name != drop:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).hardlink_to(file)
        (folder / name).unlink(missing_ok=True)
        if isinstance(content, dict):
            content = json.dumps(json.loads((model / name).read_text()) | content)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return change


def test_very_long_names(command: Command, model: Path) -> None:
    for words in (
        ("eval", f"run:{LONG}@last"),
        ("chat", f"run:{LONG}@last"),
        ("chat", LONG),
        ("train", "--resume", LONG),
        ("train", LONG),
        ("train", "--name", LONG, "--task", "abacus", "--model", "preset:nano"),
        ("export", f"run:{LONG}", "out"),
        ("export", model, LONG),
        ("runs", LONG),
        ("data", "show", LONG),
        ("data", "show", "jsonl", "--path", LONG),
        ("env", "check", f"{LONG}.py:Env"),
        ("score", LONG, "--task", "gsm8k", "--out", LONG),
        (LONG,),
    ):
        command(*words, code=2)


def test_deeply_nested_files(command: Command, tmp_path: Path, changed: Callable[..., Path]) -> None:
    deep_toml, deep_json = "x = " + "[" * 9_999 + "]" * 9_999, "[" * 99_999 + "]" * 99_999
    (tmp_path / "deep.toml").write_text(deep_toml)
    assert "nested" in command("train", "deep.toml", code=2)
    run = tmp_path / "runs" / "deep"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(deep_toml)
    assert "damaged" in command("runs", code=0)
    for words in (("runs", "deep"), ("eval", "run:deep@last"), ("train", "--resume", "deep")):
        command(*words, code=2)
    command("train", "--task.args.x", "[" * 9_999, code=2)
    (tmp_path / "rows.jsonl").write_text('{"question": ' + deep_json + "}\n")
    command("data", "show", "jsonl", "--path", "rows.jsonl", code=2)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        command("export", changed(name, deep_json), f"out-{name}", code=2)


def test_input_output_errors_name_the_file_and_the_reason(command: Command, tmp_path: Path) -> None:
    """Reading this file of the system fails with EIO; a folder where a file should be with EISDIR."""
    for words in (
        ("train", "/proc/self/mem"),
        ("data", "show", "jsonl", "--path", "/proc/self/mem"),
        ("chat", "/proc/self/mem"),
        ("score", "/proc/self/mem", "--task", "gsm8k", "--out", "out.jsonl"),
        ("eval", "x", "--task", "abacus", "--prompt.few_shot_file", "/proc/self/mem"),
        ("chat", tmp_path, "--prompt", "x"),
    ):
        output = command(*words, code=2)
        assert words[1] is tmp_path or "/proc/self/mem" in output or words[0] == "eval", output
    run = tmp_path / "runs" / "odd"
    (run / "config.toml").mkdir(parents=True)
    (run / "metrics.jsonl").mkdir()
    command("runs")


def test_escape_sequences_in_data_are_not_printed(command: Command, tmp_path: Path) -> None:
    row = {"question": f"Q{EVIL}", "answer": f"1{EVIL}", "solution": f"S{EVIL}", "id": f"id{EVIL}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert "Q␛" in command("data", "show", "jsonl", "--path", "rows.jsonl", code=0)
    (tmp_path / "bad.jsonl").write_text(json.dumps({EVIL: 1}) + "\n")
    assert "␛" in command("data", "show", "jsonl", "--path", "bad.jsonl", code=2)
    command("data", "show", f"no{EVIL}", code=2)
    command("train", f"{EVIL}.toml", code=2)


def test_escape_sequences_in_runs_are_not_printed(command: Command, tmp_path: Path) -> None:
    for index, summary in enumerate(
        (
            {"task": EVIL, "model": EVIL, "algorithm": EVIL, "steps": 3},
            {"task": [EVIL], "model": {"a": EVIL}, "wall_s": EVIL, "before": {"accuracy": EVIL}},
            {"before": 5, "after": [1], "paired": EVIL, "steps": EVIL},
        )
    ):
        run = tmp_path / "runs" / f"run{index}{EVIL}"
        run.mkdir(parents=True)
        (run / "config.toml").write_text(f"name = {json.dumps(EVIL)}\n[task]\nname = {json.dumps(EVIL)}\n")
        (run / "summary.json").write_text(json.dumps(summary))
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        (run / "environment.json").write_text(json.dumps({"started": EVIL if index else 7}))
    assert command("runs", code=0).count("␛]0;pwned") > 3
    command("runs", "nope", code=2)
    for index in range(3):
        command("runs", f"run{index}{EVIL}")


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
CONFIGS: list[dict[str, Any]] = [
    *({key: value} for key in SIZES for value in (-1, 10**18)),
    *({SIZES[place % 5]: value} for place, value in enumerate((0, 10**30, 1.5, "12", None, float("nan")))),
    {"head_dim": -4},
    {"num_key_value_heads": 10**12},
    {"max_position_embeddings": -1},
    {"max_position_embeddings": float("nan")},
    {"rope_parameters": [1]},
    {"rope_parameters": {"rope_type": "llama3", "factor": "x"}},
    {"rope_theta": "big", "rope_parameters": None},
    {"rms_norm_eps": float("nan")},
    {"model_type": 7},
    {"model_type": "gpt2", "n_embd": -5, "vocab_size": 10**15},
    {"model_type": "mamba", "hidden_size": "x"},
    {"eos_token_id": {"a": 1}},
    {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}, "model_type": "evil"},
]


def test_invalid_values_in_config_json(command: Command, changed: Callable[..., Path]) -> None:
    for index, change in enumerate(CONFIGS):
        command("export", changed("config.json", change), f"out-{index}")


class Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_weights_that_are_pickles(command: Command, changed: Callable[..., Path], tmp_path: Path) -> None:
    import pickle

    for index, content in enumerate((Code(), {"a": Code()}, {"a": 1}, [torch.ones(2)], {1: torch.ones(2)}, "text")):
        torch.save(content, tmp_path / "weights")
        folder = changed("pytorch_model.bin", (tmp_path / "weights").read_bytes(), drop="model.safetensors")
        assert "plain weights" in command("export", folder, f"out{index}", code=2)
    generator = random.Random(0)
    torch.save({"model.norm.weight": torch.ones(64)}, tmp_path / "weights")
    sound = (tmp_path / "weights").read_bytes()
    for index in range(12):
        damaged = bytearray(sound)
        for _ in range(generator.choice((1, 30, 300))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        command("export", changed("pytorch_model.bin", bytes(damaged), drop="model.safetensors"), f"cut{index}")
    for content in (pickle.dumps(Code()), b"", b"PK\x03\x04", b"\x80\x02" + b"(" * 9_999):
        command("export", changed("pytorch_model.bin", content, drop="model.safetensors"), "out", code=2)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_files_that_are_damaged(command: Command, model: Path, changed: Callable[..., Path]) -> None:
    generator = random.Random(1)
    cases: list[tuple[str, Any]] = [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": [["x", "y"]]}}),
        ("tokenizer.json", {"added_tokens": [{"id": 10**12, "content": "<eos>", "special": True}]}),
        (
            "tokenizer_config.json",
            {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
        ),
        ("tokenizer_config.json", {"chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}),
        ("tokenizer_config.json", {"chat_template": 7}),
        ("tokenizer_config.json", {"eos_token": 5, "model_max_length": "x"}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.T", None]}},
        ),
        ("generation_config.json", '{"eos_token_id": [-1, "x", 1e400]}'),
    ]
    text = (model / "tokenizer.json").read_bytes()
    for _ in range(8):
        damaged = bytearray(text)
        for _ in range(generator.choice((1, 20))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        cases.append(("tokenizer.json", bytes(damaged)))
    for name, content in cases:
        folder = changed(name, content)
        if "chat_template" in str(content):
            (folder / "chat_template.jinja").unlink(missing_ok=True)
        command("chat", folder, "--prompt", "1", "--max", "2", "--temperature", "0")


def text_of(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(pairs: dict[str, tuple[int, bytes]], count: int | None = None) -> bytes:
    body = b"".join(text_of(key) + struct.pack("<I", kind) + value for key, (kind, value) in pairs.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) if count is None else count) + body


def test_tokenizers_of_malformed_gguf_files(command: Command, tmp_path: Path) -> None:
    huge = struct.pack("<Q", 2**62)
    tokens = struct.pack("<IQ", 8, 2) + text_of("a") + text_of("b")
    base = {"general.architecture": (8, text_of("llama")), "tokenizer.ggml.model": (8, text_of("gpt2"))}
    files = [
        gguf(base | {"x": (8, huge)}),
        gguf(base | {"x": (9, struct.pack("<I", 8) + huge)}),
        gguf(base | {"x": (9, struct.pack("<I", 0) + huge)}),
        gguf(base | {"x": (9, struct.pack("<IQ", 9, 1) * 50_000)}),
        gguf(base | {"x": (99, b"")}),
        gguf(base, count=2**60),
        gguf(base),
        gguf({"tokenizer.ggml.model": (4, struct.pack("<I", 7))}),
        gguf(base | {"tokenizer.ggml.tokens": (9, tokens)}),
        gguf(base | {"tokenizer.ggml.tokens": (9, tokens), "tokenizer.ggml.merges": (9, tokens)}),
        gguf(base | {"tokenizer.ggml.tokens": (9, tokens), "tokenizer.ggml.pre": (9, tokens)}),
        gguf(base | {"tokenizer.ggml.tokens": (4, struct.pack("<I", 1)), "tokenizer.chat_template": (7, b"\1")}),
        gguf(base | {"tokenizer.ggml.eos_token_id": (8, text_of("x"))}),
        b"GGUF",
        b"",
    ]
    generator = random.Random(2)
    for _ in range(10):
        damaged = bytearray(files[8])
        damaged[generator.randrange(4, len(damaged))] ^= 1 << generator.randrange(8)
        files.append(bytes(damaged))
    for content in files:
        (tmp_path / "model.gguf").write_bytes(content)
        command("chat", tmp_path / "model.gguf", "--prompt", "1", code=2)


def test_answers_of_a_model_are_printed_without_control_characters(
    command: Command, model: Path, changed: Callable[..., Path]
) -> None:
    """The model's own tokens are escape sequences."""
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["model"]["vocab"] = {
        (EVIL + key if index > 8 else key): i for index, (key, i) in enumerate(tree["model"]["vocab"].items())
    }
    folder = changed("tokenizer.json", json.dumps(tree))
    assert "␛" in command("chat", folder, "--prompt", f"1{EVIL}", "--max", "8", "--temperature", "1", code=0)
