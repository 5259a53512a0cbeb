"""A reward model as judge: a sequence-classification model, in a process of its own or behind an endpoint.

It reads the conversation with the answer as the last message, and has one output per label. `RewardModelProcess` starts
this module as a child process, so that the process that asks needs no torch.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from assay.config import JudgeConfig
from assay.rewards.model_judge import ConcurrentJudge, ModelJudge, NotJudged, is_finite_number, question_of
from assay.rewards.pool import Item, JudgeModel
from assay.system.awaiting import SequenceBatches
from assay.system.model_files import check_model_files
from assay.system.openai_client import Endpoint
from assay.system.spawn import RemoteWorker, WorkerDied, exit_reason, serve
from assay.types import UserError, describe_error, excerpt

AT_ONCE = 256  # sequences per call of the process
PATHS = {"classify": "/classify", "pooling": "/pooling", "sglang": "/classify"}
Conversation = Sequence[Mapping[str, Any]]  # messages; the last is the answer
ModelInput = Conversation | str | Sequence[int]  # a conversation, a text, or token ids
Failed = str  # why there are no outputs
Outputs = list[float] | Failed


def make_model_judge(cfg: JudgeConfig) -> JudgeModel:
    return RewardModelJudge(cfg) if cfg.kind == "reward_model" else ModelJudge(cfg)


class RewardModelJudge(ConcurrentJudge):
    """Judges answers by the outputs of a classification model."""

    def __init__(self, cfg: JudgeConfig) -> None:
        if not cfg.model:
            raise UserError("no judge: set judge.model to the folder of a reward model, or its name at judge.url")
        if cfg.url and cfg.api == "sglang" and not cfg.tokenizer:
            raise UserError("judge.api = 'sglang' needs judge.tokenizer, the folder or hub id of the model's tokenizer")
        self.endpoint = Endpoint(cfg, "judge", root=True) if cfg.url else None
        super().__init__(cfg, self.endpoint, lambda reply: is_outputs(reply.get("outputs")))
        self.judged = 0  # conversations that the local model has judged
        local = self.endpoint is None
        self.process = RewardModelProcess(cfg.model if local else cfg.tokenizer, cfg.device, with_model=local)
        given = ("outputs", cfg.batch_tokens) if local else ("render",)
        self._batches = ProcessBatches(self.process, *given)
        self._identity = {"url": self.endpoint.url, "api": cfg.api} if self.endpoint else local_identity(cfg.model)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.process.close()

    async def _end(self) -> None:
        await super()._end()
        await self._batches.stop()

    @property
    def spent(self) -> str:
        return super().spent if self.endpoint else f"{self.judged:,} answers judged"

    async def _judged(self, item: Item) -> tuple[float, str, dict[str, float]]:
        conversation, extra = conversation_of(item), self.endpoint.extra if self.endpoint else {}
        request = {"reward_model": self.cfg.model, **self._identity, "messages": conversation, "extra": extra}
        reply = await self._reply(request, partial(self._send, conversation))
        score = score_of(reply["outputs"], self.cfg)
        return reward_of(score, self.cfg), f"{score:.4g}", {"score": score}

    async def _send(self, conversation: Conversation) -> dict[str, Any]:
        if self.endpoint is not None:
            return {"outputs": await self._from_endpoint(self.endpoint, conversation)}
        outputs = await self._from_process(conversation)
        self.judged += 1
        return {"outputs": outputs}

    async def _from_process(self, conversation: Conversation) -> list[Any]:
        """Outputs of the local model, or token ids."""
        try:
            (result,) = await self._batches.submit([conversation])
        except WorkerDied as death:  # the next call starts another
            reason = exit_reason(death.exit_code)
            raise NotJudged(f"the process of the reward model ended ({reason}): is there enough memory?") from None
        except UserError as error:
            setting = "judge.model" if self.endpoint is None else "judge.tokenizer"
            advice = "give a folder or a hub id, or set judge.url to the server of the model"
            raise UserError(f"{setting}: {error}: {advice}") from None
        except RuntimeError as error:
            raise NotJudged(f"the reward model failed: {error}") from None
        if isinstance(result, str):
            raise NotJudged(result)
        return result

    async def _from_endpoint(self, endpoint: Endpoint, conversation: Conversation) -> list[float]:
        body: dict[str, Any] = {"model": self.cfg.model}
        ids = await self._from_process(conversation) if self.cfg.tokenizer else None
        if self.cfg.api == "sglang":
            body["input_ids"] = ids
        else:
            body |= {"messages": conversation} if ids is None else {"input": ids}
            body["use_activation"] = False  # the outputs themselves, not probabilities
        path = PATHS[self.cfg.api]
        answer = await endpoint.post(path, body)
        outputs = outputs_in(answer)
        if outputs is None:
            raise endpoint.garbage(path, answer, "outputs of a classification model")
        self.usage.add(with_usage(answer))
        return outputs


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
        raise NotJudged(f"the outputs of the reward model are not finite: {list(outputs)}")
    if cfg.label_values:
        if len(cfg.label_values) != len(outputs):
            raise NotJudged(f"judge.label_values has {len(cfg.label_values)} values, the model {len(outputs)} outputs")
        return sum(p * value for p, value in zip(softmax(outputs), cfg.label_values, strict=True))
    if cfg.label >= len(outputs):
        raise NotJudged(f"judge.label = {cfg.label}, but the model has {len(outputs)} outputs, numbered from 0")
    return outputs[cfg.label]


def reward_of(score: float, cfg: JudgeConfig) -> float:
    value = (score - cfg.offset) * cfg.factor
    return sigmoid(value) if cfg.sigmoid else value


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softmax(outputs: Sequence[float]) -> list[float]:
    weights = [math.exp(output - max(outputs)) for output in outputs]
    return [weight / sum(weights) for weight in weights]


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


class RewardModelProcess:
    """The process, as another one sees it. It starts with the first call, and again after it has died."""

    def __init__(
        self, source: str, device: str, with_model: bool = True, dtype: str = "auto", threads: int = 0
    ) -> None:
        self._load = (source, device, with_model, dtype)
        self._environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self.worker: RemoteWorker | None = None
        self.closed = False
        self.problem: UserError | None = None  # of the model: it is not loaded again

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `RewardModelWorker`; raises `WorkerDied` if the process ends instead."""
        if self.problem is not None:
            raise self.problem
        try:
            worker = self.worker = self.worker or self._start()
        except UserError as error:
            self.problem = error
            raise
        try:
            return worker.call(method, *arguments)
        except WorkerDied:
            self.end()
            raise

    def close(self) -> None:
        """For good, also while another thread waits for the process."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """The next call starts another process."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    def _start(self) -> RemoteWorker:
        worker = self.worker = RemoteWorker(__name__, environment=os.environ | self._environment)
        try:
            if self.closed:  # meanwhile
                raise RuntimeError("the reward model is closed")
            worker.call("load", *self._load)
        except BaseException:
            self.end()
            raise
        return worker


class ProcessBatches(SequenceBatches[ModelInput, Any]):
    """Passes the sequences of concurrent calls to a method of the process of a model, together."""

    def __init__(self, process: RewardModelProcess, method: str, *options: int) -> None:
        super().__init__(AT_ONCE)
        self._process, self._call = process, (method, options)

    async def compute(self, items: list[ModelInput]) -> Sequence[Any]:
        method, options = self._call
        return await asyncio.to_thread(self._process.call, method, items, *options)


class RewardModelWorker:
    """Methods are called by name, `load` first."""

    model: Any = None
    max_length = 0  # tokens; 0: no limit

    def load(self, source: str, device: str, with_model: bool = True, dtype: str = "auto") -> None:
        """Load the tokenizer and, unless it is not needed, the model."""
        path = str(Path(source).expanduser()) if Path(source).expanduser().exists() else source
        if Path(path).is_dir():
            check_model_files(Path(path))
        try:
            self.tokenizer: Any = load_tokenizer(path)
            if with_model:
                self._load_model(path, device, dtype)
        except Exception as error:  # a damaged file can raise any error in transformers
            what = "classification model" if with_model else "tokenizer"
            raise UserError(f"'{source}' cannot be loaded as a {what} ({describe_error(error)})") from None

    def _load_model(self, path: str, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        name = ("bfloat16" if chosen.type == "cuda" else "float32") if dtype == "auto" else dtype
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, name), use_safetensors=True, output_loading_info=True
        )
        self.model, info = loaded
        if missing := sorted(info["missing_keys"]):  # a language model has no head for scores
            raise ValueError(f"it lacks the weights {', '.join(missing[:3])}")
        self.model.to(chosen).eval()
        config = self.model.config.get_text_config()
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        self.pads = config.pad_token_id is not None  # else a batch has one sequence: transformers finds no last token

    def info(self) -> dict[str, Any]:
        """Properties of the model that a server reports."""
        config = self.model.config
        labels = [str(config.id2label.get(index, index)) for index in range(config.num_labels)]
        where = f"{str(self.model.dtype).removeprefix('torch.')} on {self.model.device}"
        return {
            "labels": labels,
            "activation": activation_of(config.problem_type, len(labels)),
            "max_length": self.max_length,
            "parameters": self.model.num_parameters(),
            "where": where,
        }

    def render(self, conversations: Sequence[Conversation]) -> list[list[int] | Failed]:
        """Token ids: by the chat template, or question and answer as a pair if the tokenizer has none."""
        return [problem or ids for ids, problem in map(self._encode, conversations)]

    def _encode(self, item: ModelInput) -> tuple[list[int], Failed]:
        """Token ids, and why they could not be computed."""
        try:
            return self._ids(item), ""
        except Exception as error:  # a chat template can raise any error
            return [], f"the chat template rejects the messages ({excerpt(str(error))})"

    def _ids(self, item: ModelInput) -> list[int]:
        if isinstance(item, str):
            return list(self.tokenizer(item)["input_ids"])
        if not all(isinstance(part, Mapping) for part in item):
            return list(item)  # type: ignore[arg-type]
        messages: list[dict[str, str]] = list(map(dict, item))  # type: ignore[arg-type]
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        question = "\n\n".join(message["content"] for message in messages[:-1])
        return list(self.tokenizer(question, messages[-1]["content"])["input_ids"])

    def outputs(self, conversations: Sequence[Conversation], batch_tokens: int) -> list[Outputs]:
        """The model's outputs, one number per label, in order."""
        return [outputs for outputs, _ in self.classify(conversations, batch_tokens)]

    def classify(
        self, items: Sequence[ModelInput], batch_tokens: int, max_tokens: int = 0
    ) -> list[tuple[Outputs, int]]:
        """The model's outputs and the number of tokens of each item, in order. `max_tokens`: per item; 0: no limit."""
        encoded = [self._encode(item) for item in items]
        longest = min((limit for limit in (self.max_length, max_tokens) if limit), default=0)
        results: list[Outputs] = [problem or self._problem(ids, longest) for ids, problem in encoded]
        good = {index: ids for index, (ids, _) in enumerate(encoded) if not results[index]}
        for batch in self._batches(good, batch_tokens):
            for index, values in zip(batch, self._compute([good[index] for index in batch]), strict=True):
                results[index] = values
        return [(result, len(ids)) for result, (ids, _) in zip(results, encoded, strict=True)]

    def _problem(self, ids: Sequence[int], longest: int) -> Failed:
        """Why the model cannot read these tokens; empty if it can."""
        if not ids:
            return "the input has no tokens"
        if longest and len(ids) > longest:
            return f"the input has {len(ids)} tokens; the maximum is {longest}"
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        return ""

    def _batches(self, sequences: Mapping[int, Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
        """Indices of sequences of similar length: at most `batch_tokens` with padding, or a single one."""
        batch: list[int] = []
        for index in sorted(sequences, key=lambda index: len(sequences[index])):
            if batch and (len(sequences[index]) * (len(batch) + 1) > batch_tokens or not self.pads):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _compute(self, sequences: Sequence[Sequence[int]]) -> list[Outputs]:
        """The logits of a batch; halved if it does not fit into memory."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        try:
            with torch.inference_mode():
                pad_id = self.model.config.get_text_config().pad_token_id or 0
                rows = [torch.tensor(sequence, device=self.model.device) for sequence in sequences]
                ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
                mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                logits = self.model(input_ids=ids, attention_mask=mask).logits
                return logits.float().cpu().tolist()
        except torch.OutOfMemoryError:
            if len(sequences) == 1:
                return [f"there is not enough memory for {len(sequences[0])} tokens"]
        half = len(sequences) // 2
        return self._compute(sequences[:half]) + self._compute(sequences[half:])


def activation_of(problem_type: str | None, labels: int) -> str:
    """How outputs become probabilities, as in vLLM: by the kind of problem that the model was trained for."""
    if problem_type == "regression":
        return "identity"
    return "sigmoid" if problem_type == "multi_label_classification" or labels == 1 else "softmax"


def load_tokenizer(path: str) -> Any:
    """The tokenizer as stored in tokenizer.json; transformers would choose a class by the type of the model."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(path).is_dir() or (Path(path) / "tokenizer.json").is_file():
        try:
            return PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError):  # a hub id without tokenizer.json
            pass
    return AutoTokenizer.from_pretrained(path)


def main() -> None:
    serve(RewardModelWorker())
