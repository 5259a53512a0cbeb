"""Special-token strings inside content, such as "<|im_end|>" in a tool result, are ordinary text.

Content is escaped before it goes into a template: each special-token string in it becomes a placeholder. In the
rendered text, special tokens that are still written out are the template's own. `encode` tells the two apart and
encodes the whole text at once, so that prefix spaces and merges are those of one text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from assay.types import UserError

_NONCE = secrets.token_hex(8)  # content cannot contain placeholders by guessing; token ids do not depend on it


class SpecialTokens:
    """The special tokens of one tokenizer, by their text."""

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
        """The content with placeholders for special-token strings; ordinary content as it is."""
        return self._special.sub(lambda found: f"assaytext{_NONCE}x{self._ids[found[0]]}x", content)

    def unescape(self, text: str) -> str:
        return self._placeholder.sub(lambda found: self._texts[int(found[1])], text) if _NONCE in text else text

    def has_placeholder(self, text: str) -> bool:
        return _NONCE in text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with placeholders: what they stand for is encoded as ordinary text."""
        return list(self._renamed_backend.encode(self._either.sub(self._rename, text), add_special_tokens=False).ids)

    def _rename(self, found: re.Match[str]) -> str:
        return _new_name(self._ids[found[0]]) if found[1] is None else self._texts[int(found[1])]

    @cached_property
    def _renamed_backend(self) -> Any:
        """The same tokenizer, but its special tokens have other names, so their old names are ordinary text."""
        from tokenizers import Tokenizer as Backend

        names = {text: _new_name(index) for text, index in self._ids.items()}
        tree = json.loads(self._backend.to_str())
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = tree["model"]
        _rename_vocabulary(model, names)
        tree["post_processor"] = None  # refers to special tokens by name, and adds only what nobody asks for here
        try:
            renamed = Backend.from_str(json.dumps(tree))
        except Exception as error:  # the library raises plain exceptions
            raise UserError(
                f"special tokens in prompts cannot be told from text with this tokenizer: {error}"
            ) from error
        wrong = [text for text, index in self._ids.items() if renamed.token_to_id(names[text]) != index]
        if wrong:
            raise UserError(f"this tokenizer cannot encode {wrong[0]} as ordinary text: remove it from the prompts")
        return renamed


def _new_name(index: int) -> str:
    return f"assaytoken{_NONCE}x{index}x"


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename the special tokens in a model's part of a tokenizer.json."""
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
