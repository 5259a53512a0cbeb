"""The OpenAI API: requests are parsed and checked here, and errors get the form that its clients expect.

Fields are checked by hand: pydantic models saved 19 of 564 lines, took up to 1.8 times as long, and gave vaguer errors.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.config import HttpConfig
from assay.engine.base import EngineInfo, Request, SamplingParams
from assay.text import Renderer
from assay.types import Message, Prompt, UserError, clip, plural

MAX_STOPS, MAX_STOP_LENGTH = 16, 1_000
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 8  # in addition to the model's end tokens
MAX_SCORES = 1 << 20  # log-probabilities of prompt tokens and their alternatives per request
MIN_TEMPERATURE = 1e-3  # lower ones could overflow
DEFAULT_TOKENS = 16  # of /v1/completions, as in the OpenAI API
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that do not change the answer.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields that are accepted only with values that have no effect.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("add_special_tokens", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("audio", "reasoning_effort"), ()),
    **{"echo": (False,), "suffix": ("",), "logit_bias": ({},)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],)},
}
COMMON = {"model", "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"}
COMMON |= {"stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "return_token_ids"}
COMMON |= {"prompt_logprobs"}
KINDS = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}


class ApiError(Exception):
    """An error response: the status, and the message of its JSON body."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> bytes:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def shown(value: Any) -> str:
    """A value as JSON, shortened, for an error message."""
    return clip(json.dumps(value), 60)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in the body of a request."""
    try:
        tree = json.loads(body, parse_constant=reject_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {str(error)[:200]}") from None
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object")
    return tree


def reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


class Fields:
    """Typed access to the fields of a JSON object. A field that is null counts as missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise ApiError(400, f"'{name}' must be {KINDS[kind]}, not {shown(value)}", name)
        return value

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise ApiError(400, f"'{name}' must be an integer from {low} to {high}, not {shown(value)}", name)
        return default if value is None else value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.values.get(name)
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise ApiError(400, f"'{name}' must be a number from {low:g} to {high:g}, not {shown(value)}", name)
        return default if value is None else float(value)

    def check_known(self, known: set[str]) -> None:
        for name in self.values.keys() - known - IGNORED:
            if name not in WITHOUT_EFFECT:
                raise ApiError(400, f"unknown field '{name[:60]}': remove it", name[:60], "unknown_parameter")
            if self.values[name] not in (None, *WITHOUT_EFFECT[name]):
                raise ApiError(400, f"'{name}' is not supported: remove it", name, "unsupported_parameter")


def is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def parse_inputs(value: Any, param: str) -> list[str | list[int]]:
    items = value if isinstance(value, list) and not is_token_list(value) else [value]
    if not items or not all(isinstance(item, str) or is_token_list(item) for item in items):
        raise ApiError(400, f"'{param}' must be a text, a list of token ids, or a list of these", param)
    return items


@dataclass
class CompletionRequest:
    """A checked request for completions."""

    prompts: list[list[int]]  # token ids
    params: SamplingParams
    seed: int
    chat: bool = False
    stream: bool = False
    include_usage: bool = False  # in a stream
    logprobs: bool = False
    top_logprobs: int = 0  # number of alternatives that are reported for each token
    token_ids: bool = False  # also return the ids of prompts and answers
    prompt_logprobs: int | None = None  # number of alternatives that are reported for each token of the prompts
    echoed: Sequence[str | list[int]] = ()  # prompts as they were sent, if they are repeated before the answers
    prompts_only: bool = False  # nothing is sampled

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def echo(self) -> bool:
        return bool(self.echoed)

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of the prompts' tokens are reported."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs)

    @property
    def alternatives(self) -> int:
        """Number of likely tokens that are needed for each position."""
        return max(self.top_logprobs, self.prompt_logprobs or 0)

    def requests(self) -> list[Request]:
        if self.prompts_only:
            return []
        return [Request(ids, self.params, self.seed, name="the request", stream=self.stream) for ids in self.prompts]


class RequestParser:
    """Parses requests for one model."""

    def __init__(self, renderer: Renderer, info: EngineInfo, cfg: HttpConfig, name: str, has_chat: bool) -> None:
        """`name`: of the model in requests."""
        self.renderer, self.info, self.cfg, self.name, self.has_chat = renderer, info, cfg, name, has_chat
        self.plain = copy.copy(renderer)
        self.plain.system = None

    def completion(self, tree: Mapping[str, Any]) -> CompletionRequest:
        fields = Fields(tree)
        fields.check_known(COMMON | {"prompt", "echo"})
        check_model(fields, self.name)
        inputs = parse_inputs(tree.get("prompt"), "prompt")
        echo = fields.get("echo", bool, False)
        logprobs = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
        limit = fields.integer("max_tokens", DEFAULT_TOKENS, 0 if echo or prompts_scored(tree) else 1, 1 << 31)
        generation = self._generation(fields, self._prompts(inputs), limit, "prompt", logprobs=logprobs is not None)
        generation.echoed = inputs if echo else ()
        # Without a prompt to score, 1 is what clients send for the sampled tokens alone.
        return self._with_scores(generation, logprobs if logprobs and (echo or logprobs > 1) else 0, "logprobs")

    def chat_completion(self, tree: Mapping[str, Any]) -> CompletionRequest:
        fields = Fields(tree)
        fields.check_known(COMMON | {"messages", "max_completion_tokens", "top_logprobs"})
        check_model(fields, self.name)
        ids = self.chat_ids(parse_messages(tree.get("messages")))
        low = 0 if prompts_scored(tree) else 1
        limit = fields.integer("max_completion_tokens", None, low, 1 << 31)
        limit = fields.integer("max_tokens", None, low, 1 << 31) if limit is None else limit
        logprobs = fields.get("logprobs", bool, False)
        generation = self._generation(fields, [ids], limit, "messages", logprobs=logprobs, chat=True)
        stops = tuple(dict.fromkeys((*generation.params.stop, *self.renderer.stop)))
        generation.params = replace(generation.params, stop=stops)
        count = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
        if count and not logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return self._with_scores(generation, count, "top_logprobs")

    def _with_scores(self, generation: CompletionRequest, alternatives: int, param: str) -> CompletionRequest:
        """A request with this number of alternatives to each token, if its tokens and prompts can be scored."""
        if alternatives and generation.stream:
            message = f"probabilities of other tokens ('{param}') are not supported in a stream: remove one of them"
            raise ApiError(400, message, param, "unsupported_parameter")
        generation.top_logprobs = alternatives
        if generation.stream and (generation.echo or generation.scores_prompts):
            name = "echo" if generation.echo else "prompt_logprobs"
            raise ApiError(
                400, f"'{name}' is not supported in a stream: remove one of them", name, "unsupported_parameter"
            )
        if not generation.scores_prompts:
            return generation
        if not self.info.capabilities.score:
            message = "the engine computes no log-probabilities of prompts: remove 'logprobs' or 'echo'"
            raise ApiError(400, message, "logprobs", "unsupported_parameter")
        count = generation.prompt_tokens * generation.params.n * (1 + generation.alternatives)
        if count > MAX_SCORES:
            message = f"{count} log-probabilities of prompts are more than {MAX_SCORES} per request: send fewer prompts"
            raise ApiError(400, message, "prompt")
        return generation

    def _prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        if len(prompts) > self.cfg.max_samples:
            raise ApiError(400, f"more than {self.cfg.max_samples} prompts: send fewer per request", "prompt")
        return [self.renderer.text_ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def chat_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of a chat, rendered by the template, up to the beginning of the answer."""
        if not self.has_chat:
            message = "the model has no chat template: use /v1/completions, or start the server with prompt.template"
            raise ApiError(400, message, "messages")
        # The system message of the settings is a default.
        renderer = self.plain if messages[0]["role"] == "system" else self.renderer
        try:
            return renderer.prompt_ids(Prompt("chat", tuple(messages)))
        except UserError as error:  # the template rejects the messages, e.g. the order of their roles
            raise ApiError(400, str(error), "messages") from None

    def _generation(
        self,
        fields: Fields,
        prompts: list[list[int]],
        limit: int | None,
        param: str,
        logprobs: bool,
        chat: bool = False,
    ) -> CompletionRequest:
        for ids in prompts:
            self._check_prompt(ids, param, room=0 if limit == 0 else 1)
        longest = max(map(len, prompts))
        rest = self.info.max_length - longest
        if limit is not None and limit > rest:
            sizes = f"the prompt of {longest} tokens and {limit} new ones"
            message = f"{sizes} exceed the maximum of {self.info.max_length}"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        options = fields.get("stream_options", dict, {})
        generation = CompletionRequest(
            prompts,
            self._params(fields, rest if limit is None else max(limit, 1)),
            fields.integer("seed", None, -(1 << 63), (1 << 63) - 1),
            chat=chat,
            stream=fields.get("stream", bool, False),
            include_usage=Fields(options).get("include_usage", bool, False),
            logprobs=logprobs,
            token_ids=fields.get("return_token_ids", bool, False),
            prompt_logprobs=fields.integer("prompt_logprobs", None, 0, MAX_TOP_LOGPROBS),
            prompts_only=limit == 0,
        )
        if generation.seed is None:
            generation.seed = secrets.randbits(63)
        if generation.samples > self.cfg.max_samples:
            message = f"{generation.samples} answers are more than {self.cfg.max_samples} per request: lower 'n'"
            raise ApiError(400, message, "n")
        return generation

    def _check_prompt(self, ids: Sequence[int], param: str, room: int) -> None:
        """`room`: minimum number of tokens that must fit after the prompt."""
        longest = min(self.cfg.max_prompt_tokens or self.info.max_length, self.info.max_length - room)
        if not ids:
            raise ApiError(400, "the prompt is empty: it needs at least one token", param)
        if len(ids) > longest:
            message = f"the prompt has {plural(len(ids), 'token')}; the maximum is {longest}"
            raise ApiError(400, message, param, "context_length_exceeded")
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            raise ApiError(400, f"a token id is outside the vocabulary of {self.info.vocab_size}", param)

    def _params(self, fields: Fields, limit: int) -> SamplingParams:
        temperature = fields.number("temperature", 1.0, 0.0, 100.0)
        if 0 < temperature < MIN_TEMPERATURE:
            raise ApiError(400, f"'temperature' must be 0 (greedy) or at least {MIN_TEMPERATURE:g}", "temperature")
        ends = () if fields.get("ignore_eos", bool, False) else self.renderer.stop_token_ids
        params = SamplingParams(
            n=fields.integer("n", 1, 1, self.cfg.max_samples),
            temperature=temperature,
            top_k=max(fields.integer("top_k", 0, -1, 1 << 31), 0),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            max_new_tokens=limit,
            min_new_tokens=fields.integer("min_tokens", 0, 0, 1 << 31),
            stop_token_ids=(*ends, *parse_stop_tokens(fields, self.info.vocab_size)),
            stop=parse_stops(fields.values.get("stop")),
        )
        if params.top_p == 0:  # the most likely token alone
            params = replace(params, top_p=1.0, top_k=1)
        if problem := params.problem():
            raise ApiError(400, problem)
        return params


def check_model(fields: Fields, served: str) -> None:
    name = fields.get("model", str, served)
    if name != served:
        message = f"the model '{name[:100]}' does not exist: this server has '{served}'"
        raise ApiError(404, message, "model", "model_not_found")


def prompts_scored(tree: Mapping[str, Any]) -> bool:
    return tree.get("prompt_logprobs") is not None


def parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, f"'stop' must be a text or a list of texts that are not empty, not {shown(value)}", "stop")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ApiError(400, f"'stop' may have {MAX_STOPS} texts of {MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


def parse_stop_tokens(fields: Fields, vocabulary: int) -> list[int]:
    ids = fields.get("stop_token_ids", list, [])
    if len(ids) > MAX_STOP_TOKENS or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        message = f"'stop_token_ids' must be a list of at most {MAX_STOP_TOKENS} token ids below {vocabulary}"
        raise ApiError(400, message, "stop_token_ids")
    return ids


def parse_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "'messages' must be a list with at least one message", "messages")
    return [parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ApiError(400, f"'{where}' must be an object with 'role' and 'content'", "messages")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"'{where}.role' must be one of {', '.join(ROLES)}, not {shown(role)}", "messages")
    content = value.get("content")
    if isinstance(content, list):  # parts
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        valid = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if valid else None
    if not isinstance(content, str):
        raise ApiError(400, f"'{where}.content' must be a text or a list of text parts", "messages")
    return Message(role="system" if role == "developer" else role, content=content)
