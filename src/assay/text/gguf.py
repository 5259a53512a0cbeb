"""The tokenizer of a GGUF file: metadata for llama.cpp, and the whole tokenizer.json, which assay reads back."""

from __future__ import annotations

import json
from typing import Any

from assay.text.tokenizer import HF_JSON, TEXT_ENDS, Tokenizer

# Names that llama.cpp has for splits of text before the merges of a byte-level BPE.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens


def gguf_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Entries of a GGUF file. `rows`: of the embedding, which may have more than the tokenizer has tokens.

    If llama.cpp does not know the tokenizer (`split_name`), only other programs that read its tokenizer.json can encode
    text.
    """
    tree = json.loads(tokenizer.hf.backend_tokenizer.to_str())
    metadata: dict[str, Any] = {HF_JSON: json.dumps(tree, ensure_ascii=False)}
    if tokenizer.hf.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.hf.get_chat_template()
    metadata |= {f"tokenizer.ggml.{name}": index for name, index in special_tokens(tokenizer).items()}
    metadata["tokenizer.ggml.add_bos_token"] = tokenizer.expects_bos
    name = split_name(tree)
    if not name:
        return metadata | {"tokenizer.ggml.model": "none"}
    texts = {index: text for text, index in tokenizer.hf.get_vocab().items()}
    added = {token["id"]: token["special"] for token in tree["added_tokens"]}
    kinds = {index: CONTROL if special else USER_DEFINED for index, special in added.items()}
    merges = tree["model"]["merges"]
    return metadata | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(rows)],
        "tokenizer.ggml.token_type": [kinds.get(index, NORMAL) if index in texts else UNUSED for index in range(rows)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids by the names that GGUF files have for them. Ends of a text are found by their names (`TEXT_ENDS`)."""
    turn_ends = [index for index in tokenizer.eos_ids if tokenizer.token_text(index) not in TEXT_ENDS]
    ends = dict.fromkeys(index for index in (tokenizer.eos_id, *turn_ends) if index is not None)
    ids: dict[str, int | None] = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    ids |= {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id, "unknown": tokenizer.hf.unk_token_id}
    return {f"{name}_token_id": index for name, index in ids.items() if index is not None}


def split_name(tree: dict[str, Any]) -> str:
    """What llama.cpp calls the pre-tokenizer of a tokenizer.json; empty if none of its own splits equally."""
    if tree["model"]["type"] != "BPE" or not tree["model"]["merges"] or tree["model"].get("byte_fallback"):
        return ""
    steps = tree["pre_tokenizer"] or {}
    parts = steps.get("pretokenizers", [steps])
    kinds = [part.get("type") for part in parts]
    if kinds == ["Split", "ByteLevel"]:
        return SPLITS.get(parts[0]["pattern"].get("Regex", ""), "")
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    return "gpt-2" if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) else ""
