"""Prompts -> token ids, completions -> token ids and loss masks. The only place that knows chat templates.

Special tokens come from templates alone. In content (messages, system text, few-shot examples, fields of a problem,
tool results, worked solutions) a string such as "<|im_end|>" is ordinary text.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from typing import Literal

from assay.text.few_shot import Shot
from assay.text.raw_template import DEFAULT_TEMPLATE, RawTemplate
from assay.text.tokenizer import Tokenizer
from assay.types import Message, Prompt, UserError

Style = Literal["auto", "chat", "raw"]
# Stands for a reply when we look what a template puts after one; random, so that no message can contain it.
PROBE = f"ASSAY-REPLY-PROBE-{secrets.token_hex(8)}"
# Replies by which one sees how a template treats them once they are history.
REPLIES = {
    "changes them": PROBE,
    "drops <think> sections": f"<think>\n{PROBE}\n</think>\n\n{PROBE}",
    "trims whitespace": f"\n {PROBE} \n",
}


class Renderer:
    """How one model is asked, and how its answers are read.

    `style`: "chat" through a chat template, "raw" through a plain text template with {question}; "auto" is raw if a
    `template` is given, else chat. `template`: the raw template, or for "chat" a Jinja template instead of the model's.
    `system` replaces a prompt's own system message; None leaves that, or else the chat template's default, alone.
    `add_bos`: None puts a bos token in front where the tokenizer says that its model expects one. Never twice.
    `stop`: strings that end an answer; None for the style's default.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        style: Style = "auto",
        template: str | None = None,
        system: str | None = None,
        few_shot: Sequence[Shot] = (),
        add_bos: bool | None = None,
        stop: Sequence[str] | None = None,
    ) -> None:
        if style not in ("auto", "chat", "raw"):
            raise UserError(f'unknown prompt.style "{style}": use auto, chat or raw')
        if style == "auto":
            style = "raw" if template is not None else "chat"
        if style == "chat" and template is None and not tokenizer.has_chat_template:
            raise UserError(
                'the model has no chat template: set prompt.style = "raw" to ask in plain text, or give prompt.template'
            )
        if add_bos and tokenizer.bos_id is None:
            raise UserError("add_bos is set, but the tokenizer has no bos token")
        self.tokenizer = tokenizer
        self.style = style
        self.system = system
        self.few_shot = tuple(few_shot)
        self._add_bos = tokenizer.expects_bos if add_bos is None else add_bos
        self._chat_template = template if style == "chat" else None
        raw_template = DEFAULT_TEMPLATE if template is None else template
        self._raw = RawTemplate(raw_template, self._content) if style == "raw" else None
        self._warned = False
        self._end_id = self._find_end_id()
        ends = tokenizer.eos_ids if self._end_id is None else (self._end_id, *tokenizer.eos_ids)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        default_stop = self._raw.default_stop if self._raw else ()
        self.stop: tuple[str, ...] = default_stop if stop is None else tuple(stop)

    def prompt_text(self, prompt: Prompt) -> str:
        """What the model is asked, as text."""
        return self.tokenizer.unescape(self._escaped_text(prompt))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """What the model is asked, as token ids; the whole text is tokenised at once."""
        return self._with_bos(self.tokenizer.encode(self._escaped_text(prompt)))

    def all_prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """`prompt_ids` of each, faster."""
        texts = [self._escaped_text(prompt) for prompt in prompts]
        return [self._with_bos(ids) for ids in self.tokenizer.encode_all(texts)]

    def example(self, prompt: Prompt, completion: str) -> tuple[list[int], list[int]]:
        """Ids and loss mask for supervised training: 0 on the prompt, 1 on the completion and its one end token.

        The completion is tokenised by itself, so that the prompt's ids are exactly those of `prompt_ids`. In raw style
        a space sets it apart from the prompt, as in the few-shot examples, unless there is whitespace already.
        """
        if self._end_id is None:
            raise UserError("the tokenizer has no end-of-text token, so a completion's end cannot be taught: set one")
        text = self._escaped_text(prompt)
        prompt_ids = self._with_bos(self.tokenizer.encode(text))
        completion = self._without_end_text(completion)
        if self._raw:
            completion = self._raw.gap(text, completion) + completion
        completion_ids = [*self.tokenizer.encode(self._content(completion)), self._end_id]
        return prompt_ids + completion_ids, [0] * len(prompt_ids) + [1] * len(completion_ids)

    def next_turn_ids(self, prompt: Prompt, reply_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What comes between a reply, as it was sampled, and the next one: its end where it lacks one, and messages.

        Only this is tokenised: never again what was sampled.
        """
        if self._raw:
            text = "\n".join(message["content"] for message in messages)
            return self.tokenizer.encode(self._raw.next_question(text, self.decode(reply_ids)))
        reply: Message = {"role": "assistant", "content": PROBE}
        _, found, after = self._chat_text([*self._conversation(prompt), reply, *messages], True).rpartition(PROBE)
        if not found:
            raise UserError("the chat template drops earlier replies, so episodes cannot go on in it: use another one")
        ids = self.tokenizer.encode(after)
        ended = bool(reply_ids) and bool(ids) and reply_ids[-1] == ids[0] == self._end_id
        return ids[1:] if ended else ids

    def inline_ids(self, text: str) -> list[int]:
        """Text that is put into a reply while it is written, such as a tool's result."""
        return self.tokenizer.encode(self._content(text)) if text else []

    def rewritten_history(self) -> str:
        """How the chat template writes earlier replies otherwise than they were sampled; empty if it leaves them alone.

        Episodes keep the tokens as they were sampled. A model that is served with the template sees others.
        """
        if self._raw:
            return ""
        asked: Message = {"role": "user", "content": "?"}
        opening = self._chat_text([asked], open_reply=True)
        found = []
        for what, content in REPLIES.items():
            reply: Message = {"role": "assistant", "content": content}
            text = self.tokenizer.unescape(self._chat_text([asked, reply, asked], open_reply=True))
            if not text.startswith(opening + content):
                found.append(what)
        if "changes them" in found:
            return "changes what stands before or within them"  # and whatever else there is follows from it
        return " and ".join(found)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without its end token and other special tokens."""
        return self.tokenizer.decode(self._without_end(ids))

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each, faster."""
        return self.tokenizer.decode_all([self._without_end(ids) for ids in completions])

    def _conversation(self, prompt: Prompt) -> list[Message]:
        messages: list[Message] = list(prompt.messages)
        opening: list[Message] = [message for message in messages[:1] if message["role"] == "system"]
        rest = messages[len(opening) :]
        if self.system is not None:
            opening = [{"role": "system", "content": self.system}]
        for question, solution in self.few_shot:
            opening += [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
        return opening + rest

    def _escaped_text(self, prompt: Prompt) -> str:
        """What the model is asked, with its content escaped (see Tokenizer.escape)."""
        if self._raw:
            return self._raw.render(prompt, self.system, self.few_shot)
        return self._chat_text(self._conversation(prompt), open_reply=True)

    def _chat_text(self, messages: Sequence[Message], open_reply: bool = False) -> str:
        escaped = [Message(role=self._content(m["role"]), content=self._content(m["content"])) for m in messages]
        return self.tokenizer.chat_text(escaped, template=self._chat_template, open_reply=open_reply)

    def _content(self, text: str) -> str:
        """Text that is put into a template: special-token strings in it are ordinary text."""
        escaped = self.tokenizer.escape(text)
        if escaped != text and not self._warned:
            self._warned = True
            warnings.warn(
                "a prompt, a solution or a tool result contains the text of a special token, which is encoded as "
                "ordinary text: special tokens belong into prompt.template",
                stacklevel=2,
            )
        return escaped

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        return [bos, *ids] if self._add_bos and bos is not None and ids[:1] != [bos] else ids

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        kept = list(ids)
        while kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return kept

    def _without_end_text(self, completion: str) -> str:
        """A completion without end tokens that are written out at its end, as in some data sets."""
        ends = tuple(filter(None, map(self.tokenizer.token_text, self.stop_token_ids)))
        while ends and completion.endswith(ends):
            completion = next(completion.removesuffix(end) for end in ends if completion.endswith(end))
        return completion

    def _find_end_id(self) -> int | None:
        """The token after a reply: the first special one that the chat template puts there, else eos."""
        if self._raw:
            return self.tokenizer.eos_id
        asked: Message = {"role": "user", "content": "?"}
        text = self._chat_text([asked, {"role": "assistant", "content": PROBE}])
        _, found, after = text.rpartition(PROBE)
        if not found and self._chat_template is not None:
            raise UserError(
                'prompt.template is no Jinja chat template: with {question} in it, set prompt.style = "raw"'
            )
        ids = self.tokenizer.encode(after) if found else []
        ends = [index for index in ids if index in self.tokenizer.eos_ids or index in self.tokenizer.special_ids]
        return ends[0] if ends else self.tokenizer.eos_id
