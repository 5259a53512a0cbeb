"""One model in a conversation: its own history, its prompts, and its answers as text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from assay.engine.base import Engine, Request, SamplingParams
from assay.text import Renderer
from assay.types import Finish, Message, Prompt, UserError, Verdict

REPLACEMENT = "\ufffd"  # what decoders make of bytes that are not, or not yet, a whole character
OnText = Callable[[int, str], None]  # (sample index, new text)


class AnswerInterrupted(Exception):
    """The person does not want to read the rest of an answer."""


@dataclass
class Reply:
    """One answer, whole or as far as it came."""

    text: str  # to read: without the stop string that ended it
    full_text: str  # to judge: as evaluations see it
    tokens: int
    finish: Finish | None  # None: stopped by the person
    verdict: Verdict | None = None


class TextStream:
    """Token ids in, new text out. The pieces never change later, and joined they are the answer's text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        self.token_ids.append(token)
        # A character may take several tokens, and its first bytes alone decode to replacement characters.
        text = self._before_stop(self.full_text.rstrip(REPLACEMENT))
        return self._advance(text[: len(text) - self._open_stop(text)])

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return self._advance(self._before_stop(self.full_text))

    @property
    def full_text(self) -> str:
        return self._decode(self.token_ids)

    def _advance(self, text: str) -> str:
        if not text.startswith(self.text):  # bytes of an unfinished character can make the decoder doubt earlier ones
            return ""
        new, self.text = text[len(self.text) :], text
        return new

    def _before_stop(self, text: str) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _open_stop(self, text: str) -> int:
        """How much of the end may be the beginning of a stop string."""
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)


@dataclass
class Speaker:
    """A model and what was said to it so far."""

    name: str
    renderer: Renderer
    engine: Engine
    history: list[Message] = field(default_factory=list)

    def prompt_ids(self, prompt: Prompt) -> tuple[list[int], str]:
        """The tokens of history and prompt, and a note if the earlier turns had to be left out."""
        note = ""
        try:
            ids = self.renderer.prompt_ids(replace(prompt, messages=(*self.history, *prompt.messages)))
        except UserError as error:
            if not self.history:
                raise UserError(f"{self.name}: {error}") from error
            ids = self.renderer.prompt_ids(prompt)
            note = f"{self.name} is asked without the earlier turns: {error}"
        if len(ids) >= self.engine.max_length:
            raise UserError(
                f"{self.name}: {len(ids)} tokens leave no room for an answer in a context of {self.engine.max_length}: "
                "ask something shorter" + (", or forget the earlier turns with /clear" if self.history else "")
            )
        return ids, note

    def answer(self, ids: Sequence[int], params: SamplingParams, seed: int, on_text: OnText) -> list[Reply]:
        """The samples, told to `on_text` as they are written. Ctrl-C ends them where they are."""
        stops = (*params.stop, *self.renderer.stop)
        params = replace(params, stop_token_ids=self.renderer.stop_token_ids, stop=stops)
        streams = [TextStream(self.renderer.decode, stops) for _ in range(params.n)]

        def on_token(_: int, sample: int, token: int) -> None:
            on_text(sample, streams[sample].add(token))

        finishes: list[Finish | None] = [None] * params.n
        with suppress(KeyboardInterrupt, AnswerInterrupted):
            (completions,) = self.engine.generate([Request(ids, params, seed, name=self.name)], on_token)
            finishes = [completion.finish for completion in completions]
            for sample, stream in enumerate(streams):
                on_text(sample, stream.finish())
        return [
            Reply(stream.text, stream.full_text, len(stream.token_ids), finish)
            for stream, finish in zip(streams, finishes, strict=True)
        ]

    def unknown_words(self, text: str) -> list[str]:
        """The parts of a text for which the tokenizer has nothing but its unknown token."""
        hf = self.renderer.tokenizer.hf
        if hf.unk_token_id is None:
            return []
        found = hf.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = [span for index, span in zip(found.ids, found.offsets, strict=True) if index == hf.unk_token_id]
        return list(dict.fromkeys(text[start:end] for start, end in spans))
