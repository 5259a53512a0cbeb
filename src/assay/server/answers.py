"""Formats of answers: the OpenAI API, and log-probabilities of prompts in the format of vLLM.

A server may send 10,000s of chunks per second, so the parts of a chunk that do not change are formatted once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from assay.engine.base import Decode, TokenChunk, TokenScores
from assay.server.protocol import CompletionRequest
from assay.text import Renderer
from assay.text.tokenizer import REPLACEMENT, Detokenizer, TextStream, text_before_stop
from assay.types import Completion

DONE = b"data: [DONE]\n\n"


Alternatives = Sequence[Sequence[tuple[str, float]]]  # per token: texts of likely tokens and their log-probabilities


def completion_logprobs(
    texts: Sequence[str],
    logprobs: Sequence[float | None],
    offsets: Sequence[int],
    alternatives: Alternatives | None = None,
) -> dict[str, Any]:
    """In the format of /v1/completions. `offsets`: where the tokens begin in the text."""
    tops = None
    if alternatives is not None:  # the first of several tokens with the same text is the most likely one
        tops = [dict(reversed(likely)) or None for likely in alternatives]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def offsets_from(start: int, texts: Sequence[str]) -> list[int]:
    """Where texts begin that are joined after `start` characters."""
    return [*accumulate(map(len, texts), initial=start)][:-1]


def offsets_in(text: str, token_ids: Sequence[int], texts: Sequence[str], decode: Decode) -> list[int]:
    """Where the tokens of a text begin in it. `texts`: of single tokens; there may be a bos token before the text."""
    if not "".join(texts).endswith(text):  # characters that take several tokens, or spaces that depend on context
        stream = Detokenizer(decode)
        texts = [stream.add([token]) for token in token_ids]
    before = max(sum(map(len, texts)) - len(text), 0)
    return [min(max(offset - before, 0), len(text)) for offset in offsets_from(0, texts)]


def chat_logprobs(
    texts: Sequence[str], logprobs: Sequence[float], alternatives: Alternatives | None = None
) -> dict[str, Any]:
    """In the format of /v1/chat/completions."""
    tops = alternatives if alternatives is not None else [()] * len(texts)
    content = [
        token_entry(text, logprob) | {"top_logprobs": [token_entry(*other) for other in likely]}
        for text, logprob, likely in zip(texts, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_entry(text: str, logprob: float) -> dict[str, Any]:
    """Tokens with a part of a character have no bytes."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class AnswerWriter:
    """Formats the answers to one request."""

    def __init__(
        self, generation: CompletionRequest, renderer: Renderer, texts: Callable[[int], str], model: str
    ) -> None:
        self.generation, self.renderer, self.texts = generation, renderer, texts
        self.sampled_tokens = 0
        self.head = {
            "id": f"{'chatcmpl' if generation.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if generation.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def usage(self) -> dict[str, int]:
        prompt, sampled = self.generation.prompt_tokens, self.sampled_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def body(self, completions: Sequence[Completion], scores: Sequence[TokenScores | None]) -> bytes:
        """The whole response. `completions` and `scores`: of the choices."""
        self.sampled_tokens = sum(len(completion.token_ids) for completion in completions)
        choices = [self._choice(index, *choice) for index, choice in enumerate(zip(completions, scores, strict=True))]
        tree: dict[str, Any] = {**self.head, "choices": choices, "usage": self.usage}
        if self.generation.chat and scores[0] is not None and self.generation.scores_prompts:
            tree["prompt_logprobs"] = self._prompt_logprobs(self.generation.prompts[0], scores[0])
        return json.dumps(tree).encode()

    def _choice(self, index: int, completion: Completion, scores: TokenScores | None) -> dict[str, Any]:
        generation = self.generation
        prompt_index = index // generation.params.n
        prompt, of_prompt = generation.prompts[prompt_index], None
        if scores is not None and generation.scores_prompts:
            of_prompt, scores = scores.part(0, len(prompt) - 1), scores.part(len(prompt) - 1)
        before = self._prompt_text(prompt_index) if generation.echo else ""
        text = text_before_stop(self.renderer.decode(completion.token_ids), generation.params.stop)
        choice: dict[str, Any] = {"index": index}
        if generation.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = before + text
        logprobs = self.logprobs(completion.token_ids, completion.engine_logprobs, len(before), scores)
        if generation.echo and logprobs is not None and of_prompt is not None:
            echoed = self._echoed_logprobs(prompt, before, of_prompt)
            logprobs = {name: values if values is None else values + logprobs[name] for name, values in echoed.items()}
        choice["logprobs"] = logprobs
        choice["finish_reason"] = completion.finish.value
        if generation.token_ids:
            choice["prompt_token_ids"] = prompt
            choice["token_ids"] = completion.token_ids
        if generation.prompt_logprobs is not None and of_prompt is not None and not generation.chat:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, of_prompt)
        return choice

    def logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        offset: int = 0,
        scores: TokenScores | None = None,
    ) -> dict[str, Any] | None:
        """`offset`: length of the text before these tokens."""
        if not self.generation.logprobs:
            return None
        texts, alternatives = [self.texts(token) for token in token_ids], None
        if scores is not None and self.generation.top_logprobs:
            alternatives = self._alternatives(token_ids, logprobs, scores)
        if self.generation.chat:
            return chat_logprobs(texts, logprobs, alternatives)
        return completion_logprobs(texts, logprobs, offsets_from(offset, texts), alternatives)

    def _alternatives(self, token_ids: Sequence[int], logprobs: Sequence[float], scores: TokenScores) -> Alternatives:
        """The likely tokens at each position; for completions with the token itself, as in the OpenAI API."""
        alternatives = []
        for token, logprob, likely in zip(token_ids, logprobs, scores.top, strict=True):
            likely = likely[: self.generation.top_logprobs]
            # A sampled token has its reported log-probability: another pass rounds it differently.
            entries = [(self.texts(other), logprob if other == token else value) for other, value in likely]
            if not self.generation.chat and all(other != token for other, _ in likely):
                entries.append((self.texts(token), logprob))
            alternatives.append(entries)
        return alternatives

    def _prompt_text(self, index: int) -> str:
        """A prompt as it was sent."""
        prompt = self.generation.echoed[index]
        return prompt if isinstance(prompt, str) else self.renderer.tokenizer.decode(prompt, skip_special=False)

    def _echoed_logprobs(self, prompt: Sequence[int], text: str, scores: TokenScores) -> dict[str, Any]:
        """Of the tokens of a prompt with this text. The first one has no log-probability."""
        texts, alternatives = [self.texts(token) for token in prompt], None
        if self.generation.top_logprobs:
            alternatives = [(), *self._alternatives(prompt[1:], scores.logprobs, scores)]
        offsets = offsets_in(text, prompt, texts, partial(self.renderer.tokenizer.decode, skip_special=False))
        return completion_logprobs(texts, [None, *scores.logprobs], offsets, alternatives)

    def _prompt_logprobs(self, prompt: Sequence[int], scores: TokenScores) -> list[dict[str, Any] | None]:
        """In the format of vLLM: by token id, the token itself first."""
        count = self.generation.prompt_logprobs
        positions: list[dict[str, Any] | None] = [None]
        # `scores` may also have the tokens of the answer.
        for token, logprob, rank, likely in zip(prompt[1:], scores.logprobs, scores.ranks, scores.top, strict=False):
            entries = {token: (logprob, rank)}
            for place, (other, value) in enumerate(likely[:count], 1):
                entries.setdefault(other, (value, place))
            positions.append({str(other): self._ranked(other, *values) for other, values in entries.items()})
        return positions

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.texts(token)}


class StreamWriter(AnswerWriter):
    """Formats the answers to one request as server-sent events."""

    def __init__(
        self, generation: CompletionRequest, renderer: Renderer, texts: Callable[[int], str], model: str
    ) -> None:
        super().__init__(generation, renderer, texts, model)
        if generation.chat:
            self.head["object"] = "chat.completion.chunk"
        start = json.dumps(self.head)[:-1]
        end = ',"usage":null}\n\n' if generation.include_usage else "}\n\n"
        fields = '"delta":{"content":' if generation.chat else '"text":'
        self._starts = [f'data: {start},"choices":[{{"index":{index},{fields}' for index in range(generation.samples)]
        self._start, self._end = start, end
        # Log-probabilities and token ids differ between chunks; without them all but the text is constant.
        self._plain = not (generation.logprobs or generation.token_ids)
        close = "}" if generation.chat else ""
        self._continues = f'{close},"logprobs":null,"finish_reason":null}}]{end}'
        self._close = close
        self._streams = [TextStream(renderer.decode, generation.params.stop) for _ in range(generation.samples)]
        self._offsets = [0] * generation.samples

    def opening(self) -> str:
        """The chunks that name the role, in a chat."""
        if not self.generation.chat:
            return ""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join(
            f'data: {self._start},"choices":[{{"index":{index},{delta}}}]{self._end}'
            for index in range(self.generation.samples)
        )

    def chunk(self, index: int, event: TokenChunk | Completion) -> str:
        """The chunk of new tokens, or of the end, of one choice; empty if there is nothing to send yet."""
        if isinstance(event, TokenChunk):
            self.sampled_tokens += len(event.token_ids)
            text = self._streams[index].add(event.token_ids)
            if self._plain:
                return f"{self._starts[index]}{quoted(text)}{self._continues}" if text else ""
            return self._detailed(index, text, event.token_ids, event.logprobs)
        text = self._streams[index].finish()
        finish = f'{self._close},"logprobs":null,"finish_reason":"{event.finish.value}"}}]{self._end}'
        return f"{self._starts[index]}{quoted(text)}{finish}"

    def closing(self) -> bytes:
        if not self.generation.include_usage:
            return DONE
        return f'data: {self._start},"choices":[],"usage":{json.dumps(self.usage)}}}\n\n'.encode() + DONE

    def _detailed(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
        values = self.logprobs(token_ids, logprobs, self._offsets[index])
        self._offsets[index] += len(text)
        ids = f',"token_ids":{json.dumps(list(token_ids))}' if self.generation.token_ids else ""
        rest = f'{self._close},"logprobs":{json.dumps(values)},"finish_reason":null{ids}}}]{self._end}'
        return f"{self._starts[index]}{quoted(text)}{rest}"
