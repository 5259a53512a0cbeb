"""Text <-> token ids: a thin wrapper around a transformers fast tokenizer, so that saving gives an ordinary folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from assay.text.special_tokens import SpecialTokens
from assay.types import UserError

if TYPE_CHECKING:
    from assay.text.chat_template import ChatTemplate

# Tokens that end an assistant's turn in one chat format or another. Not <|end|>: some formats end a section with it.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>")
# How a tokenizer was loaded, which transformers keeps among its settings and would save with them.
LOADING_OPTIONS = ("is_local", "local_files_only")


class Tokenizer:
    """What the other rooms may know of a tokenizer. `hf` is the transformers tokenizer underneath."""

    def __init__(self, hf: Any, end_ids: Iterable[int] = ()) -> None:
        """`end_ids`: end tokens that the model's own files name beyond those the tokenizer knows of."""
        if not getattr(hf, "is_fast", False):
            raise UserError(f"{type(hf).__name__} is not a fast tokenizer: the model's folder needs a tokenizer.json")
        self.hf = hf
        self._backend = hf.backend_tokenizer
        # A tokenizer.json may ask for truncation or padding, which would cut or pad prompts unseen.
        self._backend.no_truncation()
        self._backend.no_padding()
        for name in LOADING_OPTIONS:  # saved files must not depend on whether the run was resumed
            hf.init_kwargs.pop(name, None)
        special = {token.content: index for index, token in hf.added_tokens_decoder.items() if token.special}
        found = [hf.eos_token_id, *(special.get(name) for name in TURN_ENDS), *end_ids]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(index for index in found if index is not None))
        self.special_ids: frozenset[int] = frozenset(special.values()) | frozenset(hf.all_special_ids)
        self.vocab_size: int = len(hf)
        self.bos_id: int | None = hf.bos_token_id
        self.eos_id: int | None = hf.eos_token_id
        self.pad_id: int = next((i for i in (hf.pad_token_id, *self.eos_ids) if i is not None), 0)
        self._added_texts: dict[int, str] = {index: token.content for index, token in hf.added_tokens_decoder.items()}
        control_ids = self.special_ids.union(self.eos_ids)
        control = {text: index for index, text in self._added_texts.items() if text and index in control_ids}
        self._special = SpecialTokens(self._backend, control)
        self._templates: dict[str, ChatTemplate] = {}

    def escape(self, content: str) -> str:
        """Content to put into a template: `encode` takes special-token strings in it for ordinary text."""
        return self._special.escape(content)

    def unescape(self, text: str) -> str:
        """The text as a person should read it."""
        return self._special.unescape(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text and nothing else. Special tokens in it count, unless content was escaped."""
        if self._special.has_placeholder(text):
            return self._special.encode(text.encode("utf-8", "replace").decode("utf-8"))
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except TypeError:
            if not isinstance(text, str):
                raise
            # Lone surrogates, which JSON can hold and UTF-8 cannot, become question marks.
            readable = text.encode("utf-8", "replace").decode("utf-8")
            return list(self._backend.encode(readable, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, in as many threads as there are cores."""
        if any(map(self._special.has_placeholder, texts)):
            return [self.encode(text) for text in texts]
        try:
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError:  # one of them is not UTF-8
            return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some ids. Broken UTF-8 becomes U+FFFD; ids beyond the vocabulary (padding rows) are nothing."""
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=skip_special)

    def decode_all(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each, in as many threads as there are cores."""
        return self._backend.decode_batch(lists, skip_special_tokens=True)

    def token_text(self, index: int) -> str:
        """The text of one added token, such as <|im_end|>; empty where there is none of this id."""
        return self._added_texts.get(index, "")

    def is_part_of(self, other: Tokenizer) -> bool:
        """Whether the other one knows each of its tokens, by the same id."""
        known = other.hf.get_vocab()
        return all(known.get(token) == index for token, index in self.hf.get_vocab().items())

    @property
    def expects_bos(self) -> bool:
        """Whether the tokenizer puts a bos token before plain text, as its model was trained to see (Llama, Gemma)."""
        return self.bos_id is not None and self._backend.encode("a").ids[:1] == [self.bos_id]

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def chat_text(self, messages: Sequence[Any], *, template: str | None = None, open_reply: bool = False) -> str:
        """Messages through a chat template (the tokenizer's own unless given), as text."""
        from assay.text.chat_template import ChatTemplate  # late: with the tokenizer's own libraries

        source = self.hf.get_chat_template(template)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source)
        variables = {**self.hf.special_tokens_map, "tools": None, "documents": None}
        return self._templates[source].render(messages, {**variables, "add_generation_prompt": open_reply})

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, its config and the chat template: what AutoTokenizer reads."""
        self.hf.save_pretrained(str(folder))


def load_tokenizer(source: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a local Hugging Face folder, a hub id or a GGUF file."""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        from assay.text.from_gguf import load_gguf_tokenizer  # late: it is rarely needed

        hf, end_ids = load_gguf_tokenizer(path)
        return Tokenizer(hf, end_ids)
    if path.is_file():
        raise UserError(f'"{source}" is a file: a tokenizer comes from a Hugging Face folder, a hub id or a .gguf file')
    if path.is_dir():
        return Tokenizer(_from_pretrained(str(path), trust_remote_code), _end_ids_of_folder(path))
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or not source.strip():
        raise UserError(f'there is no folder "{source}" to load a tokenizer from')
    return Tokenizer(_from_pretrained(source, trust_remote_code), _end_ids_of_hub(source))


def _from_pretrained(source: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # late: the import takes seconds

    is_folder = Path(source).is_dir()
    local_only = is_folder or not _hub_reachable()
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_only, use_fast=True
        )
    except Exception as error:  # files from anywhere make transformers fail in any way
        if "trust_remote_code" in str(error):
            advice = "it runs code of its own: read that code, then allow it with trust_remote_code"
        elif is_folder:
            advice = "the folder needs tokenizer.json and tokenizer_config.json"
        elif local_only:
            advice = "the Hugging Face hub cannot be reached: check the name and the network, or give a local folder"
        else:
            advice = "no such local folder, and the Hugging Face hub did not give one: check the name"
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f'no tokenizer from "{source}": {advice} ({first_line})') from error


def _hub_reachable() -> bool:
    """Whether the hub's name resolves: the hub client itself retries for most of a minute before it gives up."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves names
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _end_ids_of_folder(folder: Path) -> list[int]:
    """What generation_config.json, or else config.json, calls the end of a text."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f'"{file}" is not valid JSON: {error}') from error
        found = values.get("eos_token_id") if isinstance(values, dict) else None
        if found is not None:
            return _as_ids(found)
    return []


def _end_ids_of_hub(source: str) -> list[int]:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(source, local_files_only=not _hub_reachable())
    except OSError:  # many models have none
        return []
    return _as_ids(config.eos_token_id)


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and index >= 0]
