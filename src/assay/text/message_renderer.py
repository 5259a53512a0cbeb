"""Prompts for endpoints that take messages or text: no tokenizer is loaded.

Where other renderers return token ids, `MessageRenderer` returns the messages and texts themselves. A completion adds
its text to such a sequence (`Completion.appended`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from assay.text.render import DEFAULT_TEMPLATE, RawTemplate, Renderer, Shot
from assay.types import Message, Prompt, UserError


class MessageRenderer(Renderer):
    """Renders prompts as messages (style "chat"), or as text of a plain text template (style "raw")."""

    has_tokens = False

    def __init__(
        self,
        *,
        style: Literal["chat", "raw"] = "chat",
        template: str | None = None,
        system: str | None = None,
        few_shot: Sequence[Shot] = (),
    ) -> None:
        """As for `Renderer`, but the endpoint applies the chat template of its model."""
        if style == "chat" and template is not None:
            raise UserError("prompt.template needs openai.api = completions: a chat endpoint has its own template")
        self.style, self.system, self.few_shot = style, system, tuple(few_shot)
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

    def prompt_ids(self, prompt: Prompt) -> list[Any]:
        return [self.prompt_text(prompt)] if self._raw else list(self._conversation(prompt))

    def all_prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[Any]]:
        return [self.prompt_ids(prompt) for prompt in prompts]

    def next_turn_ids(self, prompt: Prompt, reply_ids: Sequence[Any], messages: Sequence[Message]) -> list[Any]:
        if self._raw:
            text = "\n".join(message["content"] for message in messages)
            return [self._raw.next_question(text, self.decode(reply_ids))]
        return list(messages)

    def inline_ids(self, text: str) -> list[Any]:
        if not self._raw:
            raise UserError(
                "this environment continues replies, which chat endpoints cannot: use openai.api completions"
            )
        return [text] if text else []

    def rewritten_history(self) -> str:
        return ""

    def decode(self, ids: Sequence[Any]) -> str:
        return "".join(ids)

    def decode_all(self, completions: Sequence[Sequence[Any]]) -> list[str]:
        return [self.decode(ids) for ids in completions]
