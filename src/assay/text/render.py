"""Render prompts as token ids, and completions as token ids with loss masks.

Prompts are rendered by a chat template, or, for base models, by a plain text template such as
"{examples}Question: {question}\\nAnswer:". Special tokens come from templates only. In content (messages, system text,
few-shot examples, fields of a problem, tool results, worked solutions) a string such as "<|im_end|>" is ordinary text.

For endpoints that take messages or text, `MessageRenderer` returns these instead of token ids.
"""

from __future__ import annotations

import json
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from assay.text.tokenizer import Tokenizer
from assay.types import Message, Prompt, UserError, plural

Shot = tuple[str, str]  # a question and its worked solution

COLUMNS = (("question", "solution"), ("prompt", "completion"), ("question", "answer"))
MAX_SEARCHED = 1_000  # prompts searched for worked solutions; generated tasks are endless


def read_text_file(path: str | Path) -> str:
    """The text of a prompt file, without the newline at its end."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig").removesuffix("\n")
    except FileNotFoundError as error:
        raise UserError(f'no such file: "{path}"') from error
    except UnicodeDecodeError as error:
        raise UserError(f'"{path}" is not a UTF-8 text file') from error
    except OSError as error:
        raise UserError(f'cannot read "{path}": {error.strerror}') from error


def load_few_shot(path: str | Path, n: int | None = None) -> list[Shot]:
    """The first n pairs of a JSONL file: question and solution (or answer), or prompt and completion."""
    shots: list[Shot] = []
    # split("\n") instead of splitlines(): JSON strings may contain other line separators
    for number, line in enumerate(read_text_file(path).split("\n"), start=1):
        if n is not None and len(shots) >= n:
            break
        if line.strip():
            shots.append(_shot_of_line(line, f"{path}, line {number}"))
    if not shots if n is None else len(shots) < n:
        wanted = "at least 1 is" if n is None else f"{n} are"
        examples = plural(len(shots), "few-shot example")
        raise UserError(f'"{path}" has {examples}, but {wanted} needed')
    return shots


def few_shot_from_prompts(prompts: Iterable[Prompt], n: int) -> list[Shot]:
    """The first n prompts that have a worked solution."""
    worked = ((p.question, p.solution) for p in islice(prompts, n + MAX_SEARCHED) if p.solution is not None)
    shots = list(islice(worked, n))
    if len(shots) < n:
        raise UserError(
            f"{plural(n, 'few-shot example')} requested, but only {plural(len(shots), 'prompt')} with a worked solution"
        )
    return shots


def _shot_of_line(line: str, where: str) -> Shot:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if isinstance(row, Mapping):
        for question, solution in COLUMNS:
            if isinstance(row.get(question), str) and isinstance(row.get(solution), str):
                return row[question], row[solution]
    raise UserError(f"{where}: a few-shot example needs text columns question and solution, or prompt and completion")


DEFAULT_TEMPLATE = "{examples}Question: {question}\nAnswer:"
BRACE_HINT = "a literal brace is written twice: {{ or }}"
Piece = tuple[str, str | None]  # literal text, then the name of a placeholder or None


NO_TEMPLATE = 'set prompt.style = "raw" for plain text prompts, or prompt.template'


def where_templates_are(tokenizer: Tokenizer) -> str:
    """Say so if the tokenizer's folder lacks the files with chat templates; empty if it has one of them."""
    folder = Path(tokenizer.hf.name_or_path or "?")
    files = ("tokenizer_config.json", "chat_template.jinja")
    if not folder.is_dir() or any((folder / name).is_file() for name in (*files, "chat_template.json")):
        return ""
    return f", because {folder} lacks {' and '.join(files)} (copy them from the original model)"


class RawTemplate:
    """A template with {question}, {examples}, {system} and any field of a prompt; literal braces are {{ and }}.

    {examples} is replaced by few-shot examples and earlier turns of the conversation, each formatted like the part of
    the template after {examples}. Without {system}, system text is put first, followed by an empty line. `escape` is
    applied to all inserted values, not to the template itself.
    """

    def __init__(self, template: str, escape: Callable[[str], str] = str) -> None:
        if "{%" in template or re.search(r"\{\{-?\s*(messages|message|bos_token|content)\b", template):
            raise UserError('prompt.template is a Jinja template: set prompt.style = "chat" to use it as chat template')
        self.pieces = _parse(template)
        self._escape = escape
        self.names = [name for _, name in self.pieces if name is not None]
        if not self.names:
            raise UserError("prompt.template has no placeholder: add {question}")
        start = self.names.index("examples") + 1 if "examples" in self.names else 0
        self._shot_pieces = self.pieces[start:]

    @property
    def default_stop(self) -> tuple[str, ...]:
        """The words before {question}, on a new line: a model that writes them starts a new question by itself."""
        literals = [literal for literal, name in self.pieces if name == "question"]
        words = literals[0].split("\n")[-1].strip() if literals else ""
        return (f"\n{words}",) if any(letter.isalpha() for letter in words) else ()

    def render(self, prompt: Prompt, system: str | None, few_shot: Sequence[Shot]) -> str:
        own_system = next((m["content"] for m in prompt.messages if m["role"] == "system"), "")
        system = own_system if system is None else system
        shots = [*few_shot, *_earlier_turns(prompt)]
        if shots and "examples" not in self.names:
            raise UserError("prompt.template has no {examples}: add it for few-shot examples and earlier turns")
        values = {
            **prompt.fields,
            "question": prompt.question,
            "system": system,
            "examples": "".join(self._shot(question, solution) for question, solution in shots),
        }
        text = self._fill(self.pieces, values)
        return f"{self._escape(system)}\n\n{text}" if system and "system" not in self.names else text

    @staticmethod
    def gap(before: str, after: str) -> str:
        """A space to separate an answer from its prompt, if there is no whitespace yet."""
        return "" if before[-1:].isspace() or after[:1].isspace() else " "

    def next_question(self, question: str, reply: str) -> str:
        """The next question after a reply, formatted like the examples; a beginning at the end of the reply is kept."""
        rendered = self._fill(self._shot_pieces, {"question": question, "system": ""})
        started = next((stop for stop in self.default_stop if reply.endswith(stop)), "")
        return rendered.removeprefix(started.lstrip("\n")) if started else f"\n\n{rendered}"

    def _shot(self, question: str, solution: str) -> str:
        rendered = self._fill(self._shot_pieces, {"question": question, "system": ""})
        return f"{rendered}{self.gap(rendered, solution)}{self._escape(solution)}\n\n"

    def _fill(self, pieces: Sequence[Piece], values: Mapping[str, Any]) -> str:
        parts: list[str] = []
        content = ""  # adjacent values are escaped together
        for literal, name in pieces:
            if name == "examples":  # contains template text, and content that is already escaped
                literal += _value(values, name)
                name = None
            if literal:
                parts += [self._escape(content), literal]
                content = ""
            if name is not None:
                content += _value(values, name)
        return "".join([*parts, self._escape(content)])


def _parse(template: str) -> list[Piece]:
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"prompt.template: {error} ({BRACE_HINT})") from error
    pieces: list[Piece] = []
    for literal, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise UserError(f"prompt.template: {{{shown}}} is not a plain name ({BRACE_HINT})")
        pieces.append((literal, name))
    return pieces


def _value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        known = ", ".join(f"{{{known}}}" for known in sorted(values))
        raise UserError(f"prompt.template: unknown placeholder {{{name}}}; known: {known} ({BRACE_HINT})")
    return str(values[name])


def _earlier_turns(prompt: Prompt) -> list[Shot]:
    """Pairs of a question and its reply from earlier turns of the conversation."""
    turns = [message for message in prompt.messages if message["role"] != "system"]
    return [(q["content"], a["content"]) for q, a in pairwise(turns) if (q["role"], a["role"]) == ("user", "assistant")]


Style = Literal["auto", "chat", "raw"]
# Placeholder reply to inspect how a template renders replies; random, so that no message can contain it.
PROBE = f"ASSAY-REPLY-PROBE-{secrets.token_hex(8)}"
# Replies that show how a template changes earlier replies of a conversation.
REPLIES = {
    "changes them": PROBE,
    "drops <think> sections": f"<think>\n{PROBE}\n</think>\n\n{PROBE}",
    "trims whitespace": f"\n {PROBE} \n",
}


class Renderer:
    """Renders prompts for one model, and decodes its completions.

    `style`: "chat" uses a chat template, "raw" a plain text template with {question}; "auto" is raw if `template` is
    given, else chat. `template`: the raw template, or, for "chat", a Jinja template instead of the tokenizer's.
    `system` replaces the system message of prompts; None keeps it, or the default of the chat template.
    `add_bos`: None adds a bos token if the tokenizer does so for plain text. It is never added twice.
    `stop`: strings that end an answer; None: the default of the style.
    """

    has_tokens = True  # whether sequences consist of token ids

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
            raise UserError(f'unknown prompt.style "{style}"; use auto, chat or raw')
        if style == "auto":
            style = "raw" if template is not None else "chat"
        if style == "chat" and template is None and not tokenizer.has_chat_template:
            raise UserError(f"the model has no chat template{where_templates_are(tokenizer)}: {NO_TEMPLATE}")
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

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for words unknown to the tokenizer; None if there is none."""
        return self.tokenizer.hf.unk_token_id

    def prompt_text(self, prompt: Prompt) -> str:
        """The rendered prompt as text."""
        return self.tokenizer.unescape(self._escaped_text(prompt))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The rendered prompt as token ids."""
        return self._with_bos(self.tokenizer.encode(self._escaped_text(prompt)))

    @property
    def chat_template(self) -> str | None:
        """The source of the template that renders chats; None for a plain text template."""
        return None if self._raw else self.tokenizer.hf.get_chat_template(self._chat_template)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text as it is, without a template; special tokens in it are recognised."""
        return self._with_bos(self.tokenizer.encode(text))

    def all_prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """`prompt_ids` of many prompts, faster than in a loop."""
        texts = [self._escaped_text(prompt) for prompt in prompts]
        return [self._with_bos(ids) for ids in self.tokenizer.encode_all(texts)]

    def example(self, prompt: Prompt, completion: str) -> tuple[list[int], list[int]]:
        """Token ids and loss mask for supervised training: 0 for the prompt, 1 for the completion and its end token."""
        return self._episode_example(prompt, ((self._without_end_text(completion), ""),))

    def worked_example(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        """`example` of the solution of a prompt, or of its worked episode, whose actions have the mask 1."""
        if prompt.episode:
            return self._episode_example(prompt, prompt.episode)
        return self.example(prompt, prompt.solution or "")

    def _episode_example(
        self, prompt: Prompt, episode: Sequence[tuple[str, str | Sequence[Message]]]
    ) -> tuple[list[int], list[int]]:
        """`example` of actions, each with what follows it: messages, or text that continues the reply.

        Actions are tokenized separately, so that the prompt has exactly the ids of `prompt_ids`. In raw style a space
        separates them from the prompt, as in few-shot examples, unless there is whitespace already.
        """
        if self._end_id is None:
            raise UserError("the tokenizer has no end-of-text token, which supervised training needs: set one")
        text = self._escaped_text(prompt)
        ids = self._with_bos(self.tokenizer.encode(text))
        mask = [0] * len(ids)
        for number, (action, following) in enumerate(episode):
            inline = isinstance(following, str) and bool(following)
            if self._raw and (number == 0 or not isinstance(episode[number - 1][1], str)):
                action = self._raw.gap(text, action) + action
            action_ids = [*self.tokenizer.encode(self._content(action)), *([] if inline else [self._end_id])]
            context: list[int] = []
            if isinstance(following, str):
                context = self.inline_ids(following)
            elif number + 1 < len(episode):
                context = self.next_turn_ids(prompt, action_ids, following)
            ids += action_ids + context
            mask += [1] * len(action_ids) + [0] * len(context)
        return ids, mask

    def next_turn_ids(self, prompt: Prompt, reply_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Token ids between a sampled reply and the next one: the missing end of the reply, if any, and `messages`.

        Only these are tokenized; sampled tokens are never tokenized again.
        """
        if self._raw:
            text = "\n".join(message["content"] for message in messages)
            return self.tokenizer.encode(self._raw.next_question(text, self.decode(reply_ids)))
        reply: Message = {"role": "assistant", "content": PROBE}
        _, found, after = self._chat_text([*self._conversation(prompt), reply, *messages], True).rpartition(PROBE)
        if not found:
            raise UserError(
                "the chat template drops earlier replies, so episodes cannot continue in it: use another one"
            )
        ids = self.tokenizer.encode(after)
        last = reply_ids[-1] if reply_ids else None
        if last in self.stop_token_ids and last in ids:  # what the reply ends with, perhaps after a space
            place = ids.index(last)
            if not self.tokenizer.decode(ids[:place], skip_special=False).strip():
                return ids[place + 1 :]
        return ids

    def inline_ids(self, text: str) -> list[int]:
        """Text that is put into a reply while it is written, such as a tool's result."""
        return self.tokenizer.encode(self._content(text)) if text else []

    def rewritten_history(self) -> str:
        """How the chat template changes earlier replies; empty if it renders them as they were sampled.

        Episodes keep the tokens as they were sampled. A model that is served with the template sees others.
        """
        if self._raw:
            return ""
        asked: Message = {"role": "user", "content": "?"}
        opening = self._chat_text([asked], open_reply=True)
        changes = []
        for what, content in REPLIES.items():
            reply: Message = {"role": "assistant", "content": content}
            text = self.tokenizer.unescape(self._chat_text([asked, reply, asked], open_reply=True))
            if not text.startswith(opening + content):
                changes.append(what)
        if "changes them" in changes:
            return "changes the text before or within them"  # this implies the other changes
        return " and ".join(changes)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without its end token and other special tokens."""
        return self.tokenizer.decode(self._without_end(ids))

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many completions, faster than in a loop."""
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
        """The rendered prompt with escaped content (see Tokenizer.escape)."""
        if self._raw:
            return self._raw.render(prompt, self.system, self.few_shot)
        return self._chat_text(self._conversation(prompt), open_reply=True)

    def _chat_text(self, messages: Sequence[Message], open_reply: bool = False) -> str:
        escaped = [Message(role=self._content(m["role"]), content=self._content(m["content"])) for m in messages]
        return self.tokenizer.chat_text(escaped, template=self._chat_template, open_reply=open_reply)

    def _content(self, text: str) -> str:
        """Escape text before it is inserted into a template; warns once about special-token strings."""
        escaped = self.tokenizer.escape(text)
        if escaped != text and not self._warned:
            self._warned = True
            warnings.warn(
                "a prompt, a solution or a tool result contains the text of a special token, which is encoded as "
                "ordinary text: put special tokens into prompt.template",
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
        """The completion without end tokens written as text, as in some data sets."""
        ends = tuple(filter(None, map(self.tokenizer.token_text, self.stop_token_ids)))
        while ends and completion.endswith(ends):
            completion = next(completion.removesuffix(end) for end in ends if completion.endswith(end))
        return completion

    def _find_end_id(self) -> int | None:
        """The end token of a reply: the first special token that the chat template adds after it, else eos."""
        if self._raw:
            return self.tokenizer.eos_id
        asked: Message = {"role": "user", "content": "?"}
        text = self._chat_text([asked, {"role": "assistant", "content": PROBE}])
        _, probe, after = text.rpartition(PROBE)
        if not probe and self._chat_template is not None:
            raise UserError(
                'prompt.template is not a Jinja chat template: for a template with {question}, set prompt.style = "raw"'
            )
        ids = self.tokenizer.encode(after) if probe else []
        ends = [index for index in ids if index in self.tokenizer.eos_ids or index in self.tokenizer.special_ids]
        return ends[0] if ends else self.tokenizer.eos_id


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
