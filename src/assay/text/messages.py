"""Prompts for endpoints that take messages or text: no tokenizer is loaded.

The rest of the package handles sequences of ids. Here an id is the index of a text in a table, not a token: a prompt
has one id per message, and a completion has as many ids as the endpoint counted tokens, of which the first has the
text and the others are empty.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from assay.text.render import DEFAULT_TEMPLATE, RawTemplate, Renderer, Shot
from assay.types import Message, Prompt, UserError

EMPTY = 0  # id of the empty text


class TextTable:
    """Messages and texts by id. Thread-safe."""

    def __init__(self) -> None:
        self._entries: list[Message | str] = [""]
        self._lock = threading.Lock()

    def add(self, entry: Message | str) -> int:
        with self._lock:
            self._entries.append(entry)
            return len(self._entries) - 1

    def completion_ids(self, text: str, tokens: int = 1) -> list[int]:
        """Ids of a completion that has this number of tokens, at least one."""
        return [self.add(text) if text else EMPTY, *[EMPTY] * (tokens - 1)]

    def text(self, ids: Sequence[int]) -> str:
        """The texts of a sequence, joined; messages in it are left out."""
        entries = (self._entries[index] for index in ids)
        return "".join(entry for entry in entries if isinstance(entry, str))

    def messages(self, ids: Sequence[int]) -> list[Message]:
        """The messages of a sequence; completions in it are messages of the assistant."""
        messages: list[Message] = []
        reply: Message | None = None
        for index in ids:
            entry = self._entries[index]
            if not isinstance(entry, str):
                messages.append(entry)
                reply = None
            elif reply is None:
                reply = {"role": "assistant", "content": entry}
                messages.append(reply)
            else:
                reply["content"] += entry
        return messages


class MessageRenderer(Renderer):
    """Renders prompts as messages (style "chat"), or as text of a plain text template (style "raw")."""

    def __init__(
        self,
        texts: TextTable,
        *,
        style: Literal["chat", "raw"] = "chat",
        template: str | None = None,
        system: str | None = None,
        few_shot: Sequence[Shot] = (),
    ) -> None:
        """The arguments are those of `Renderer`; the endpoint applies the chat template of its model."""
        if style == "chat" and template is not None:
            raise UserError("prompt.template needs openai.api = completions: a chat endpoint has its own template")
        self.texts, self.style, self.system, self.few_shot = texts, style, system, tuple(few_shot)
        self._raw = RawTemplate(template or DEFAULT_TEMPLATE) if style == "raw" else None
        self.stop_token_ids = ()
        self.stop = self._raw.default_stop if self._raw else ()

    @property
    def unknown_id(self) -> int | None:
        return None

    def prompt_text(self, prompt: Prompt) -> str:
        if self._raw:
            return self._raw.render(prompt, self.system, self.few_shot)
        return "\n".join(f"{message['role']}: {message['content']}" for message in self._conversation(prompt))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if self._raw:
            return [self.texts.add(self.prompt_text(prompt))]
        return [self.texts.add(message) for message in self._conversation(prompt)]

    def all_prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self.prompt_ids(prompt) for prompt in prompts]

    def next_turn_ids(self, prompt: Prompt, reply_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        if self._raw:
            text = "\n".join(message["content"] for message in messages)
            return [self.texts.add(self._raw.next_question(text, self.decode(reply_ids)))]
        return [self.texts.add(message) for message in messages]

    def inline_ids(self, text: str) -> list[int]:
        if not self._raw:
            raise UserError(
                "this environment continues replies, which chat endpoints cannot: use openai.api completions"
            )
        return [self.texts.add(text)] if text else []

    def rewritten_history(self) -> str:
        return ""

    def decode(self, ids: Sequence[int]) -> str:
        return self.texts.text(ids)

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in completions]
