"""A reward model as judge: a sequence-classification model, in a process of its own or behind an endpoint.

It reads the conversation with the answer as the last message, and has one output per label.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.config import JudgeConfig
from assay.rewards.model_judge import ModelJudge, ReplyCache, is_finite_number, question_of
from assay.rewards.pool import Item, JudgeModel, JudgeReport
from assay.rewards.reward_model_worker import RewardModelProcess
from assay.system.openai_client import Endpoint, EndpointError, Usage
from assay.system.spawn import WorkerDied, exit_reason
from assay.types import Status, UserError, Verdict

AT_ONCE = 256  # conversations per call of the process, between which progress is reported
PATHS = {"classify": "/classify", "pooling": "/pooling", "sglang": "/classify"}
Conversation = list[dict[str, str]]
Outputs = list[float] | Verdict  # the outputs of the model, or the verdict on a conversation without


def make_model_judge(cfg: JudgeConfig) -> JudgeModel:
    return RewardModelJudge(cfg) if cfg.kind == "reward_model" else ModelJudge(cfg)


class RewardModelJudge(JudgeModel):
    """Judges answers by the outputs of a classification model."""

    def __init__(self, cfg: JudgeConfig) -> None:
        self.cfg = cfg
        if not cfg.model:
            raise UserError("no judge: set judge.model to the folder of a reward model, or its name at judge.url")
        if cfg.url and cfg.api == "sglang" and not cfg.tokenizer:
            raise UserError("judge.api = 'sglang' needs judge.tokenizer, the folder or hub id of the model's tokenizer")
        self.cache = ReplyCache(cfg.cache, lambda reply: is_outputs(reply.get("outputs"))) if cfg.cache else None
        self.endpoint = Endpoint(cfg, "judge", root=True) if cfg.url else None
        self.cached = 0  # outputs that were read from the cache
        self.judged = 0  # conversations that the local model has judged
        local = self.endpoint is None
        self.process = RewardModelProcess(cfg.model if local else cfg.tokenizer, cfg.device, with_model=local)
        self._identity = {"url": self.endpoint.url, "api": cfg.api} if self.endpoint else local_identity(cfg.model)

    def close(self) -> None:
        try:
            if self.endpoint is not None:
                self.endpoint.close()
        finally:
            self.process.close()

    @property
    def usage(self) -> Usage:
        return Usage() if self.endpoint is None else self.endpoint.usage

    def describe_usage(self) -> str:
        spent = str(self.usage) if self.endpoint else f"{self.judged:,} answers judged"
        return f"judge {self.cfg.model}: {spent}" + (f", {self.cached:,} from the cache" if self.cached else "")

    def judge(self, items: Sequence[Item], report: JudgeReport | None = None) -> list[Verdict]:
        """Return one verdict per (completion, gold answer, fields), in order. Equal ones are computed once."""
        conversations = [conversation_of(item) for item in items]
        keys = [str(conversation) for conversation in conversations]
        different = dict(zip(keys, conversations, strict=True))
        stored = {key: self._stored(conversation) for key, conversation in different.items()}
        known: dict[str, Outputs] = {key: outputs for key, outputs in stored.items() if outputs is not None}
        wanted = {key: conversation for key, conversation in different.items() if key not in known}
        self.cached += sum(key in known for key in keys)
        if report is not None:
            report(len(known), len(items))
        names = list(wanted)
        step = AT_ONCE if self.endpoint is None else max(len(names), 1)
        for start in range(0, len(names), step):
            part = names[start : start + step]
            for key, outputs in zip(part, self._outputs([wanted[key] for key in part]), strict=True):
                known[key] = outputs
                self._store(wanted[key], outputs)
            if report is not None:
                report(sum(key in known for key in keys), len(items))
        return [self._verdict(known[key]) for key in keys]

    def _verdict(self, outputs: Outputs) -> Verdict:
        if isinstance(outputs, Verdict):
            return Verdict(outputs.reward, outputs.status, detail=outputs.detail)
        try:
            score = score_of(outputs, self.cfg)
        except UserError as error:
            return failure(str(error))
        reward = reward_of(score, self.cfg)
        status = Status.OK if reward >= self.cfg.threshold else Status.WRONG
        return Verdict(reward, status, f"{score:.4g}", {"score": score})

    # -- the cache

    def _request(self, conversation: Conversation) -> dict[str, Any]:
        extra = self.endpoint.extra if self.endpoint else {}
        return {"reward_model": self.cfg.model, **self._identity, "messages": conversation, "extra": extra}

    def _stored(self, conversation: Conversation) -> list[float] | None:
        reply = self.cache.get(self._request(conversation)) if self.cache is not None else None
        return reply["outputs"] if reply is not None else None

    def _store(self, conversation: Conversation, outputs: Outputs) -> None:
        if self.cache is not None and is_outputs(outputs):
            self.cache.put(self._request(conversation), {"outputs": outputs})

    # -- outputs of a model in a process, or behind an endpoint

    def _outputs(self, conversations: Sequence[Conversation]) -> list[Outputs]:
        try:
            if self.endpoint is not None:
                return self._from_endpoint(conversations)
            results = self._call("outputs", conversations, self.cfg.batch_tokens)
        except WorkerDied as death:  # the next call starts another
            why = f"the process of the reward model ended ({exit_reason(death.exit_code)}): is there enough memory?"
            return [failure(why) for _ in conversations]
        except RuntimeError as error:
            return [failure(f"the reward model failed: {error}") for _ in conversations]
        self.judged += sum(isinstance(result, list) for result in results)
        return [result if isinstance(result, list) else failure(result) for result in results]

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self.process.call(method, *arguments)
        except UserError as error:
            setting = "judge.model" if self.endpoint is None else "judge.tokenizer"
            advice = "give a folder or a hub id, or set judge.url to the server of the model"
            raise UserError(f"{setting}: {error}: {advice}") from None

    def _from_endpoint(self, conversations: Sequence[Conversation]) -> list[Outputs]:
        assert self.endpoint is not None
        tokens = self._call("render", conversations) if self.cfg.tokenizer else [None] * len(conversations)

        async def send_all() -> list[Outputs]:
            return list(await asyncio.gather(*map(self._send, conversations, tokens)))

        return self.endpoint.loop.call(send_all())

    def _body(self, conversation: Conversation, ids: list[int] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.cfg.model}
        if self.cfg.api == "sglang":
            return body | {"input_ids": ids}
        content = {"messages": conversation} if ids is None else {"input": ids}
        return body | content | {"use_activation": False}  # the outputs themselves, not probabilities

    async def _send(self, conversation: Conversation, ids: list[int] | str | None) -> Outputs:
        """`ids`: token ids, or why there are none; None: send the messages."""
        assert self.endpoint is not None
        if isinstance(ids, str):
            return failure(ids)
        path = PATHS[self.cfg.api]
        try:
            answer = await self.endpoint.post(path, self._body(conversation, ids))
            outputs = outputs_in(answer)
            if outputs is None:
                raise self.endpoint.garbage(path, answer, "outputs of a classification model")
        except EndpointError as error:
            return Verdict(0.0, Status.TIMEOUT if error.timed_out else Status.ERROR, detail=str(error))
        self.usage.add(with_usage(answer))
        return outputs


def failure(detail: str) -> Verdict:
    return Verdict(0.0, Status.ERROR, detail=detail)


def conversation_of(item: Item) -> Conversation:
    """The messages of the prompt, or its question, and the answer."""
    completion, _, fields = item
    given = fields.get("messages")
    messages = [dict(message) for message in given] if isinstance(given, list | tuple) and given else []
    messages = messages or [{"role": "user", "content": question_of(fields)}]
    return [*messages, {"role": "assistant", "content": completion}]


def score_of(outputs: Sequence[float], cfg: JudgeConfig) -> float:
    """The score that the settings select from the outputs."""
    if not all(map(math.isfinite, outputs)):
        raise UserError(f"the outputs of the reward model are not finite: {list(outputs)}")
    if cfg.label_values:
        if len(cfg.label_values) != len(outputs):
            raise UserError(f"judge.label_values has {len(cfg.label_values)} values, the model {len(outputs)} outputs")
        largest = max(outputs)
        weights = [math.exp(output - largest) for output in outputs]
        return sum(w * value for w, value in zip(weights, cfg.label_values, strict=True)) / sum(weights)
    if cfg.label >= len(outputs):
        raise UserError(f"judge.label = {cfg.label}, but the model has {len(outputs)} outputs, numbered from 0")
    return outputs[cfg.label]


def reward_of(score: float, cfg: JudgeConfig) -> float:
    value = (score - cfg.offset) * cfg.factor
    if not cfg.sigmoid:
        return value
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def outputs_in(answer: Mapping[str, Any]) -> list[float] | None:
    """The outputs in an answer of vLLM (`probs` of /classify, `data` of /pooling) or of SGLang (`embedding`)."""
    data = answer.get("data")
    entry = data[0] if isinstance(data, list) and data and isinstance(data[0], Mapping) else answer
    values = next((entry[name] for name in ("probs", "data", "embedding") if name in entry), None)
    if isinstance(values, list) and values and isinstance(values[-1], list):  # one list per token: the last one
        values = values[-1]
    if type(values) in (int, float):  # SGLang: an encoder with one label
        values = [values]
    return [float(value) for value in values] if is_outputs(values) else None  # type: ignore[union-attr]


def with_usage(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer with the number of tokens as in vLLM; SGLang reports it in `meta_info`."""
    reported = answer.get("meta_info")
    if answer.get("usage") or not isinstance(reported, Mapping):
        return answer
    return {"usage": {"prompt_tokens": reported.get("prompt_tokens"), "completion_tokens": 0}}


def is_outputs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_finite_number, value))


def local_identity(source: str) -> dict[str, Any]:
    """What tells a local model from an earlier one in the same folder: sizes and times of its weights."""
    folder = Path(source).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    stats = [(file.name, file.stat()) for file in files]
    return {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}
