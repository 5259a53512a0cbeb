"""The tokenizer inside a GGUF file: vocabulary and merges by transformers, and what it leaves out from the metadata."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from assay.types import UserError

# Vocabularies whose text is cut at every digit before the GPT-2 pattern applies.
DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def load_gguf_tokenizer(path: Path) -> tuple[Any, list[int]]:
    """A transformers tokenizer, and the end tokens that the file names."""
    metadata = read_metadata(path)
    if "tokenizer.ggml.model" not in metadata:
        raise UserError(f'"{path}" holds no tokenizer: give a Hugging Face folder as the tokenizer instead')
    from transformers import PreTrainedTokenizerFast  # late: the import takes seconds

    try:
        # Not AutoTokenizer: it reads all of the file only to learn the architecture, which this needs not know.
        hf = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        _mend(hf, metadata)
    except BaseException as error:  # damaged metadata makes it fail in any way, panics of its Rust part included
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f'cannot build the tokenizer of "{path}": {first_line}') from error
    template = metadata.get("tokenizer.chat_template")
    if not hf.chat_template and isinstance(template, str):
        hf.chat_template = template
    names = ("eos", "eot", "eom")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return hf, [index for index in ends if isinstance(index, int) and 0 <= index < len(hf)]


def _mend(hf: Any, metadata: dict[str, Any]) -> None:
    """What llama.cpp derives from the metadata and transformers does not: digit splits, whole words first, bos."""
    from tokenizers import pre_tokenizers

    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    backend = hf.backend_tokenizer
    if pre in DIGIT_BY_DIGIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in LLAMA3:
        backend.model.ignore_merges = True  # a word that is in the vocabulary is one token, whatever the merges say
    default = metadata["tokenizer.ggml.model"] == "llama" or pre in LLAMA3
    if hf.bos_token_id is not None:
        hf.add_bos_token = bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF file; of arrays only the length. (Reading all of them takes seconds to minutes.)"""
    if not path.is_file():
        raise UserError(f'there is no file "{path}"')
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f'"{path}" is not a GGUF file')
            version = _number(file, "<I")
            if version not in (2, 3):
                raise UserError(f'"{path}" is GGUF version {version}, which is not supported: convert it to version 3')
            _number(file, "<Q")  # how many tensors
            pairs = _number(file, "<Q")
            return {_string(file): _value(file, _number(file, "<I")) for _ in range(pairs)}
    except (struct.error, KeyError, ValueError, OSError, OverflowError, MemoryError, RecursionError) as error:
        raise UserError(f'"{path}" is damaged: its GGUF header cannot be read') from error


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("a text longer than the file")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        return _skip_array(file)
    return _number(file, SCALARS[kind])


def _skip_array(file: BinaryIO) -> int:
    kind, length = _number(file, "<I"), _number(file, "<Q")
    if kind in SCALARS:
        file.seek(length * struct.calcsize(SCALARS[kind]), 1)
        return length
    for _ in range(length):
        _value(file, kind)
    return length
