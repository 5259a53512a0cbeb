"""Tokenizers: a wrapper around transformers' fast tokenizers, loaded from folders, the hub or GGUF files, or built in.

Special-token strings inside content, such as "<|im_end|>" in a tool result, are ordinary text. Content is escaped
before it is inserted into a template: each special-token string becomes a placeholder. Special tokens that remain in
the rendered text belong to the template. `encode` distinguishes the two and encodes the whole text at once, so that
prefix spaces and merges are the same as for one text.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import string
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from assay.system.model_files import check_model_files
from assay.types import UserError, describe_error

if TYPE_CHECKING:
    from assay.text.chat_template import ChatTemplate


# Tokens that end an assistant's turn in common chat formats. Not <|end|>, which ends a section in some formats.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>")
# Tokens that end a text. Chat models also end their answers with them, above all to prompts without a chat template.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# Loading options that transformers would save with the tokenizer's settings.
LOADING_OPTIONS = ("is_local", "local_files_only")


class Tokenizer:
    """A fast tokenizer. `hf` is the wrapped transformers tokenizer."""

    def __init__(self, hf: Any, end_ids: Iterable[int] = ()) -> None:
        """`end_ids`: end tokens from the model's files, in addition to the tokenizer's end tokens."""
        if not getattr(hf, "is_fast", False):
            raise UserError(f"{type(hf).__name__} is not a fast tokenizer: the model's folder needs a tokenizer.json")
        self.hf = hf
        self._backend = hf.backend_tokenizer
        # A tokenizer.json may enable truncation or padding, which would silently change prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        for name in LOADING_OPTIONS:  # saved files must not depend on how the tokenizer was loaded
            hf.init_kwargs.pop(name, None)
        special = {token.content: index for index, token in hf.added_tokens_decoder.items() if token.special}
        candidates = [hf.eos_token_id, *(special.get(name) for name in TURN_ENDS), *end_ids]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(index for index in candidates if index is not None))
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_templates": {}}  # compiled templates cannot be pickled

    def escape(self, content: str) -> str:
        """Escape content for a template, so that `encode` treats special-token strings in it as ordinary text."""
        return self._special.escape(content)

    def unescape(self, text: str) -> str:
        """The readable text without placeholders."""
        return self._special.unescape(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without added bos or eos. Special tokens are recognised, except in escaped content."""
        # Lone surrogates, valid in JSON but not in UTF-8, become question marks. Other types raise TypeError.
        text = str.encode(text, "utf-8", "replace").decode("utf-8")
        if _NONCE in text:
            return self._special.encode(text)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in one thread per core."""
        try:
            if not any(_NONCE in text for text in texts):
                return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError:  # a text is not valid UTF-8
            pass
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids. Invalid UTF-8 becomes U+FFFD; ids beyond the vocabulary (padding rows) are skipped."""
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=skip_special)

    def decode_all(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many sequences, in one thread per core."""
        return self._backend.decode_batch(lists, skip_special_tokens=True)

    def token_text(self, index: int) -> str:
        """The text of an added token, such as <|im_end|>; empty for other ids."""
        return self._added_texts.get(index, "")

    def is_part_of(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in the other tokenizer."""
        known = other.hf.get_vocab()
        return all(known.get(token) == index for token, index in self.hf.get_vocab().items())

    @property
    def expects_bos(self) -> bool:
        """Whether the tokenizer adds a bos token to plain text, as in training of the model (Llama, Gemma)."""
        return self.bos_id is not None and self._backend.encode("a").ids[:1] == [self.bos_id]

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def chat_text(self, messages: Sequence[Any], *, template: str | None = None, open_reply: bool = False) -> str:
        """Messages rendered by a chat template (default: the tokenizer's own), as text."""
        from assay.text.chat_template import ChatTemplate  # late: the import takes seconds

        source = self.hf.get_chat_template(template)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source)
        variables = {**self.hf.special_tokens_map, "tools": None, "documents": None}
        return self._templates[source].render(messages, {**variables, "add_generation_prompt": open_reply})

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, its config and the chat template, as AutoTokenizer reads them."""
        self.hf.save_pretrained(str(folder))


def load_tokenizer(source: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a local Hugging Face folder, a hub id or a GGUF file."""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        return Tokenizer(*load_gguf_tokenizer(path))
    if path.is_file():
        raise UserError(f'"{source}" is a file: give a Hugging Face folder, a hub id or a .gguf file for the tokenizer')
    if path.is_dir():
        check_model_files(path)
        return Tokenizer(_from_pretrained(str(path), trust_remote_code), _end_ids_of_folder(path))
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or not source.strip():
        raise UserError(f'no such folder: "{source}": give a Hugging Face folder, a hub id or a .gguf file')
    return Tokenizer(_from_pretrained(source, trust_remote_code), _end_ids_of_hub(source))


def _from_pretrained(source: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # late: the import takes seconds

    is_folder = Path(source).is_dir()
    if is_folder and not _has_vocabulary(Path(source)):  # transformers would return a tokenizer without tokens
        if not (Path(source) / "config.json").is_file():
            raise UserError(
                f'"{source}" has neither a model nor a tokenizer (config.json, tokenizer.json): check the path'
            )
        raise UserError(
            f'"{source}" has no tokenizer: tokenizer.json is missing; copy the tokenizer files of the original model '
            "into the folder, or set model.tokenizer to a folder or hub id that has them"
        )
    local_only = is_folder or not _hub_reachable()
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_only, use_fast=True
        )
    except Exception as error:  # damaged files make transformers raise any exception
        if "trust_remote_code" in str(error):
            advice = "it contains its own code: review the code, then allow it with trust_remote_code"
        elif is_folder:
            advice = "the folder needs tokenizer.json and tokenizer_config.json"
        elif local_only:
            advice = "the Hugging Face hub cannot be reached: check the name and the network, or give a local folder"
        else:
            advice = "no such local folder, and not found on the Hugging Face hub: check the name"
        raise UserError(f'cannot load the tokenizer "{source}": {advice} ({describe_error(error)})') from error


def _has_vocabulary(folder: Path) -> bool:
    """Whether a folder has the vocabulary of a tokenizer in one of the usual formats, or a tokenizer's own code."""
    names = ("tokenizer.json", "vocab.*", "*.vocab", "*.model", "*.tiktoken", "tokenization_*.py", "tokenizer.py")
    return any(True for name in names for _ in folder.glob(name))


def _hub_reachable() -> bool:
    """Whether the hub's host name resolves; the hub client itself retries for most of a minute."""
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
    """End tokens of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f'"{file}" cannot be read as JSON: {error}') from error
        end_ids = values.get("eos_token_id") if isinstance(values, dict) else None
        if end_ids is not None:
            return _as_ids(end_ids)
    return []


def _end_ids_of_hub(source: str) -> list[int]:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(source, local_files_only=not _hub_reachable())
    except OSError:  # many models have no generation config
        return []
    return _as_ids(config.eos_token_id)


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and index >= 0]


_NONCE = secrets.token_hex(8)  # makes placeholders unguessable for content; token ids do not depend on it


class SpecialTokens:
    """Escaping of the special tokens of one tokenizer."""

    def __init__(self, backend: Any, ids: Mapping[str, int]) -> None:
        self._backend, self._ids = backend, dict(ids)
        self._texts = {index: text for text, index in ids.items()}
        longest_first = sorted(ids, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first)) or "(?!)"
        placeholder = rf"assaytext{_NONCE}x(\d+)x"
        self._special = re.compile(special)
        self._placeholder = re.compile(placeholder)
        self._either = re.compile(f"{placeholder}|{special}")

    def escape(self, content: str) -> str:
        """Replace special-token strings in content by placeholders."""
        return self._special.sub(lambda match: f"assaytext{_NONCE}x{self._ids[match[0]]}x", content)

    def unescape(self, text: str) -> str:
        return self._placeholder.sub(lambda match: self._texts[int(match[1])], text) if _NONCE in text else text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with placeholders, whose original strings are encoded as ordinary text."""
        return list(self._renamed_backend.encode(self._either.sub(self._rename, text), add_special_tokens=False).ids)

    def _rename(self, match: re.Match[str]) -> str:
        return _new_name(self._ids[match[0]]) if match[1] is None else self._texts[int(match[1])]

    @cached_property
    def _renamed_backend(self) -> Any:
        """The tokenizer with renamed special tokens, so that their original names are ordinary text."""
        from tokenizers import Tokenizer as Backend

        names = {text: _new_name(index) for text, index in self._ids.items()}
        tree = json.loads(self._backend.to_str())
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_vocabulary(tree["model"], names)
        tree["post_processor"] = None  # refers to special tokens by name, and is not needed here
        try:
            renamed = Backend.from_str(json.dumps(tree))
        except Exception as error:  # the library raises plain exceptions
            raise UserError(f"this tokenizer cannot tell special tokens from text in prompts: {error}") from error
        wrong = [text for text, index in self._ids.items() if renamed.token_to_id(names[text]) != index]
        if wrong:
            raise UserError(f"this tokenizer cannot encode {wrong[0]} as ordinary text: remove it from the prompts")
        return renamed


def _new_name(index: int) -> str:
    return f"assaytoken{_NONCE}x{index}x"


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename special tokens in the model section of a tokenizer.json."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    else:  # Unigram: pairs of text and score
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = ((pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in names and not names.keys() & set(pair)]


# Vocabularies that split every digit before the GPT-2 pattern applies.
DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})

HF_JSON = "tokenizer.huggingface.json"  # in the metadata of GGUF files: the content of tokenizer.json
SPECIAL_KINDS = ("bos", "eos", "padding", "unknown")
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def load_gguf_tokenizer(path: Path) -> tuple[Any, list[int]]:
    """The tokenizer of a GGUF file as a transformers tokenizer, and its end tokens.

    The end tokens are `TEXT_ENDS`, which generation_config.json lists for the same models, and the tokens that the file
    names. For chat models, the file often names only the tokens that end a turn.
    """
    metadata = read_metadata(path)
    if "tokenizer.ggml.model" not in metadata:
        raise UserError(f'"{path}" contains no tokenizer: set model.tokenizer to a Hugging Face folder')
    from transformers import PreTrainedTokenizerFast  # late: the import takes seconds

    try:
        if HF_JSON in metadata:
            hf = _from_tokenizer_json(metadata)
        else:  # not AutoTokenizer, which reads the whole file to determine the architecture
            hf = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
            _complete(hf, metadata)
    except BaseException as error:  # damaged metadata causes any exception, including Rust panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(
            f'cannot build the tokenizer of "{path}" ({describe_error(error)}): the file may be incomplete; '
            "fetch it again, or set model.tokenizer to a Hugging Face folder"
        ) from error
    template = metadata.get("tokenizer.chat_template")
    if not hf.chat_template and isinstance(template, str):
        hf.chat_template = template
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = _as_ids([*named, *map(hf.get_vocab().get, TEXT_ENDS)])
    size = metadata.get("tokenizer.ggml.tokens")  # transformers adds <|endoftext|> to files that do not have it
    return hf, [index for index in ends if index < (size if isinstance(size, int) else len(hf))]


def _from_tokenizer_json(metadata: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(metadata[HF_JSON])
    ids = {f"{kind[:3]}_token": metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in SPECIAL_KINDS}
    names = {key: backend.id_to_token(index) for key, index in ids.items() if isinstance(index, int)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, clean_up_tokenization_spaces=False)


def _complete(hf: Any, metadata: dict[str, Any]) -> None:
    """Apply metadata that llama.cpp uses and transformers ignores: digit splits, whole words first, bos."""
    from tokenizers import pre_tokenizers

    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    backend = hf.backend_tokenizer
    if pre in DIGIT_BY_DIGIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in LLAMA3:
        backend.model.ignore_merges = True  # a word of the vocabulary is one token, regardless of merges
    default = metadata["tokenizer.ggml.model"] == "llama" or pre in LLAMA3
    if hf.bos_token_id is not None:
        hf.add_bos_token = bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file; for arrays only the length.

    For 128,000 tokens and 280,000 merges this takes 1 s; `GGUFReader` of the package gguf takes 17 s.
    """
    if not path.is_file():
        raise UserError(f'no such file: "{path}"')
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f'"{path}" is not a GGUF file')
            version = _number(file, "<I")
            if version not in (2, 3):
                raise UserError(f'"{path}" is GGUF version {version}, which is not supported: convert it to version 3')
            _number(file, "<Q")  # number of tensors
            pairs = _number(file, "<Q")
            return {_string(file): _value(file, _number(file, "<I")) for _ in range(pairs)}
    except UserError:
        raise
    except (struct.error, KeyError, ValueError, OSError, OverflowError, MemoryError, RecursionError) as error:
        raise UserError(f'"{path}" is damaged: its GGUF header cannot be read') from error


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("a string is longer than the file")
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


SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>", "<tool>")

# One token before a message and one after a reply, because short prompts make small models fast.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def char_tokenizer() -> Tokenizer:
    """A tokenizer with one token per printable ASCII character, newline and tab; other characters are <unk>."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    printable = string.digits + string.ascii_letters + string.punctuation + " \n\t"
    backend = Backend(models.BPE(vocab=_numbered(printable), merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()  # joins tokens without spaces
    return _wrap(backend)


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A tokenizer with one token per given word, number or symbol. Words are separated by whitespace."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    if not words:
        raise UserError("a word tokenizer needs at least one word")
    for word in words:
        if word.split() != [word]:
            raise UserError(f"words of a word tokenizer must be nonempty and without whitespace, got {word!r}")
        if any(special in word for special in SPECIALS):
            raise UserError(f'the word "{word}" contains a special token ({", ".join(SPECIALS)}): remove it')
    backend = Backend(models.WordLevel(vocab=_numbered(words), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend)


def _numbered(entries: Iterable[str]) -> dict[str, int]:
    """Ids of special tokens and entries, in this order and without duplicates."""
    return {entry: index for index, entry in enumerate(dict.fromkeys((*SPECIALS, *entries)))}


def _wrap(backend: object) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast  # late: the import takes seconds

    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[4:]),
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)


# Entries of a GGUF file: metadata for llama.cpp, and the whole tokenizer.json, which assay reads back

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


# Token ids to text while they are sampled

REPLACEMENT = "\ufffd"  # decoded from bytes that are not a whole character, or not yet
WINDOW = 16  # tokens that are decoded together; more only while a character is incomplete
CHARACTER = 4  # maximum number of tokens per character, which has at most 4 bytes in UTF-8

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes tokens as they arrive. The cost per token does not depend on the length of the text.

    Only the latest tokens are decoded. They begin where the text of earlier tokens was complete, and include tokens
    whose text was returned already, because decoding may strip the space before the first token.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        self._complete = 0  # tokens of the window up to which the text was complete before the latest `add`
        self._limit = WINDOW

    def add(self, tokens: Sequence[int]) -> str:
        """New text. The first tokens of a character yield nothing until it is complete."""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            new = self._advance(text.rstrip(REPLACEMENT))
            return new + self._split(text) if len(self._window) >= 2 * self._limit else new
        new = self._advance(text)
        if len(self._window) > self._limit and self._complete:
            del self._window[: self._complete]
            self._shown = self._decode(self._window)
            self._limit = WINDOW
        self._complete = len(self._window)
        return new

    def finish(self) -> str:
        """Text that was held back because a character was incomplete."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):  # an incomplete character can change how earlier bytes are decoded
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def _split(self, text: str) -> str:
        """Shorten a window of bytes that form no characters, where decoding its parts gives the same text."""
        for end in range(len(self._window) - 1, len(self._window) - 1 - CHARACTER, -1):
            first, rest = self._decode(self._window[:end]), self._decode(self._window[end:])
            if first + rest == text and first.startswith(self._shown):
                new = first[len(self._shown) :]
                del self._window[:end]
                self._shown, self._complete, self._limit = "", 0, WINDOW
                return new
        self._limit *= 2  # rare; a longer window is decoded before the next attempt
        return ""


class TextStream:
    """Turns token ids into pieces of text. Pieces are final: joined, they are the text of the answer.

    The text ends before the first stop string. Text that may be the beginning of a stop string is held back.
    `context`: earlier tokens of the same text, which are not returned.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._detokenizer.add(context[-WINDOW:])
        self._stops = stops
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        new = self._detokenizer.add(tokens)
        return self._before_stop(new) if self._stops else new

    def finish(self) -> str:
        """Text that was held back, because a stop string or character could have continued."""
        new = self._detokenizer.finish()
        if not self._stops:
            return new
        new, held = self._before_stop(new), self._held
        self._held = ""
        return new + held

    def _before_stop(self, new: str) -> str:
        if self._stopped:
            return ""
        text, self._held = self._held + new, ""
        end = first_stop(text, self._stops)
        if end is not None:
            self._stopped = True
            return text[:end]
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        if held := max(lengths, default=0):
            text, self._held = text[:-held], text[-held:]
        return text


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string in the text begins; None if there is none."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    return text[: first_stop(text, stops)]
