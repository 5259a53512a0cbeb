"""Use a model without training it: `assay.load`, `assay.generate` and `assay.serve`."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from assay.api.arguments import SHORT_FOR_EVAL, model_source, overrides_of, settings_of
from assay.api.notebook import html_pre
from assay.api.session import as_prompt
from assay.build.measure import KEPT, inherited_settings
from assay.config import MeasureConfig, ServeConfig, TrainConfig
from assay.config.settings import PYTHON, toml_value
from assay.runs.console import Console
from assay.text.tokenizer import text_before_stop
from assay.types import Closeable, Completion, Finish, Prompt, UserError, excerpt, missing_extra, plural

if TYPE_CHECKING:  # torch is imported when a model is loaded
    from assay.engine import BaseEngine
    from assay.system.program import SupervisedProgram
    from assay.text import Renderer

Question = str | Prompt | Sequence[Mapping[str, Any]]  # a text, a problem of a task, or messages with role and content
TEMPERATURE = 0.7  # unless the arguments give another one
SHORT = {name: key for name, key in SHORT_FOR_EVAL.items() if name != "samples"}
INHERITED = ("prompt.", "task.")  # of a run's checkpoint; its task has the few-shot examples


class SamplingOptions(TypedDict, total=False):
    """How answers are sampled; see `LoadedModel.generate`."""

    temperature: float | None
    max_new_tokens: int | None
    top_p: float | None
    top_k: int | None
    stop: str | Sequence[str] | None
    seed: int | None
    system: str | None


@dataclass(frozen=True, repr=False)
class Generation:
    """One sampled answer. `str` gives its text."""

    prompt: Question
    """what was asked, as it was given"""
    text: str
    """the answer, without end tokens and without the stop string that ended it"""
    token_ids: list[int]
    """its tokens, with the end token; empty if an endpoint returned text"""
    logprobs: list[float]
    """log-probability of each token, at the sampling temperature"""
    finish: Literal["stop", "length"]
    """stop: an end token or stop string; length: max_new_tokens, or the end of the context"""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({excerpt(self.text, 200)!r}, {plural(len(self.token_ids), 'token')}, {self.finish})"

    def _repr_html_(self) -> str:
        return html_pre(self.text)


class LoadedModel(Closeable):
    """A model that answers; made by `assay.load`. In a `with` block, its memory is released at the end."""

    def __init__(self, name: str, renderer: Renderer, engine: BaseEngine, values: Mapping[str, Any]) -> None:
        self.name = name
        self.settings = values
        """settings, as dotted names and values"""
        self._parts: tuple[Renderer, BaseEngine] | None = (renderer, engine)
        self._lock = threading.Lock()  # one call at a time reads the events of the engine

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Question, *, samples: Literal[1] = 1, **options: Unpack[SamplingOptions]
    ) -> Generation: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Question, *, samples: int, **options: Unpack[SamplingOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Iterable[Question], *, samples: Literal[1] = 1, **options: Unpack[SamplingOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompts: Iterable[Question], *, samples: int, **options: Unpack[SamplingOptions]
    ) -> list[list[Generation]]: ...
    def generate(
        self,
        prompts: Any,
        *,
        samples: int = 1,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        system: str | None = None,
    ) -> Any:
        """Sample answers to one prompt, or to a list of prompts, which are answered together.

        Args:
            prompts: A question, a list of messages such as `[{"role": "user", "content": "..."}]`, or a list of these.
            samples: Number of answers per prompt.
            temperature: 0 takes the most likely token, 1 samples from the unchanged distribution. Default: 0.7.
            max_new_tokens: Maximum length of an answer. Default: as in the run of a checkpoint, or 512.
            top_p: Sample from the most likely tokens of this total probability.
            top_k: Sample from this number of most likely tokens.
            stop: Strings that end an answer, in addition to the model's end tokens.
            seed: The same seed gives the same answers, except to a prompt that is repeated in a list. Default: 0.
            system: System message, instead of the one in the settings.

        Returns:
            For one prompt a `Generation`, or a list of them if `samples` is above 1. For a list of prompts, a list with
            one entry of this kind per prompt.
        """
        from assay.engine import Request, generate
        from assay.rollout import request_seed, sampling_params, with_stops

        renderer, engine = self._opened()
        given = {"temperature": temperature, "max_new_tokens": max_new_tokens, "top_p": top_p, "top_k": top_k}
        overrides = overrides_of(
            {**given, "stop": stop, "samples": samples, "seed": seed}, MeasureConfig, SHORT_FOR_EVAL
        )
        cfg = settings_of(MeasureConfig, None, {**self.settings, **overrides})
        params = with_stops(sampling_params(cfg.eval, cfg.eval.samples), renderer)
        if system is not None:
            renderer = copy.copy(renderer)
            renderer.system = system
        single = is_one_prompt(prompts)
        questions: list[Question] = [prompts] if single else list(prompts)
        asked = [as_question(question) for question in questions]
        requests, seen = list[Request](), Counter[str]()
        for number, (prompt, ids) in enumerate(zip(asked, renderer.all_prompt_ids(asked), strict=True), start=1):
            noise = request_seed(cfg.seed, -1, prompt.id + f"#{seen[prompt.id]}" * bool(seen[prompt.id]))
            requests.append(Request(ids, params, noise, name=f"prompt {number}"))
            seen[prompt.id] += 1
        with self._lock:
            answers = generate(engine, requests)
        results = [
            [self._generation(question, completion, params.stop) for completion in completions]
            for question, completions in zip(questions, answers, strict=True)
        ]
        shaped = results if samples > 1 else [result[0] for result in results]
        return shaped[0] if single else shaped

    def _generation(self, question: Question, completion: Completion, stops: Sequence[str]) -> Generation:
        renderer, _ = self._opened()
        text = renderer.decode(completion.appended)
        stopped = completion.finish is Finish.STOP
        return Generation(
            question,
            text_before_stop(text, stops) if stopped else text,
            completion.token_ids,
            completion.engine_logprobs,
            "stop" if stopped else "length",
        )

    @overload
    def logprobs(  # type: ignore[overload-overlap]
        self, prompt: Question, completion: str | Generation
    ) -> list[float]: ...
    @overload
    def logprobs(self, prompt: Question, completion: Sequence[str | Generation]) -> list[list[float]]: ...
    def logprobs(self, prompt: Question, completion: Any) -> Any:
        """Log-probabilities of the tokens of a given completion, at temperature 1.

        Args:
            prompt: A question, or a list of messages.
            completion: A text, whose tokens are scored without an end token; or a `Generation`, whose own tokens are
                scored. A list of these gives a list.
        """
        renderer, engine = self._opened()
        if not engine.info.capabilities.score:
            raise UserError(
                f"the engine of {self.name} computes no log-probabilities of given texts: choose another one"
            )
        asked = as_question(prompt)
        several = isinstance(completion, Iterable) and not isinstance(completion, str)
        completions = list(completion) if several else [completion]
        context = renderer.prompt_ids(asked)
        ids = [self._completion_ids(asked, entry) for entry in completions]
        with self._lock:
            scores = engine.score([[*context, *tokens] for tokens in ids])
        values = [row[len(context) - 1 :] for row in scores]
        return values if several else values[0]

    def _completion_ids(self, prompt: Prompt, completion: str | Generation) -> list[int]:
        renderer, _ = self._opened()
        if isinstance(completion, Generation):
            return completion.token_ids
        if not isinstance(completion, str):
            raise UserError(f"completion must be a text or a Generation, or a list of these, not {completion!r:.80}")
        ids, mask = renderer.example(prompt, completion)
        tokens = [index for index, sampled in zip(ids, mask, strict=True) if sampled]
        return tokens[:-1] if tokens and tokens[-1] in renderer.stop_token_ids else tokens

    def close(self) -> None:
        """Release the memory of the model. It cannot be used afterwards."""
        if self._parts is None:
            return
        from assay.models.device import release_memory

        (_, engine), self._parts = self._parts, None
        engine.close()
        del engine
        release_memory()

    def _opened(self) -> tuple[Renderer, BaseEngine]:
        if self._parts is None:
            raise UserError(f"{self.name} was closed: load it again with assay.load")
        return self._parts

    def __repr__(self) -> str:
        if self._parts is None:
            return f"LoadedModel({self.name!r}, closed)"
        renderer, engine = self._parts
        if not renderer.has_tokens:
            return f"LoadedModel({self.name!r}, at an endpoint)"
        info = engine.info
        return f"LoadedModel({self.name!r}, {str(info.dtype).removeprefix('torch.')} on {info.device})"


def load(
    model: Any, *, tokenizer: Any = None, config: str | Path | None = None, trust: bool = False, **settings: Any
) -> LoadedModel:
    """Load a model to generate answers and to compute log-probabilities.

    Args:
        model: A folder, a hub id, a GGUF file, a checkpoint of a run ("run:NAME@last", whose prompt and length settings
            are used, but not its environment), or a transformers model.
        tokenizer: The tokenizer of a transformers model.
        config: A TOML file of a training run, whose prompt settings are used instead.
        trust: Use code and files that the settings of a run name, even if it was started by someone else.
        settings: Defaults of `LoadedModel.generate`, such as `temperature`, and settings, such as
            `device="cuda:1"`, `model={"max_length": 4096}` or `prompt={"system": "Answer briefly."}`.
    """
    overrides = overrides_of(settings, MeasureConfig, SHORT, ("tokenizer", "config", "trust"))
    source = source_of(model, tokenizer, overrides)

    inherited = inherited_settings(
        [source], overrides, trust, lambda key: key.startswith(INHERITED) or key in KEPT, config, PYTHON
    )
    values = {"eval.temperature": TEMPERATURE, **inherited, **overrides}
    cfg = settings_of(MeasureConfig, None, values)
    return LoadedModel(source, *served(source, cfg), values)


def source_of(model: Any, tokenizer: Any, overrides: dict[str, Any]) -> str:
    """The model as a setting; one in memory is written to the folder of the runs.

    A `LoadedModel` also determines that folder, unless `overrides` do.
    """
    if isinstance(model, LoadedModel):
        overrides.setdefault("runs_dir", model.settings.get("runs_dir", TrainConfig().runs_dir))
        return model.name
    return model_source(model, tokenizer, overrides.get("runs_dir", TrainConfig().runs_dir))


def served(source: str, cfg: MeasureConfig) -> tuple[Renderer, BaseEngine]:
    """The renderer and the engine of a model, which answers any prompt."""
    from assay.build.models import build_server
    from assay.build.problems import build_task

    needs_task = cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.task.name
    with Console(sys.stderr, quiet=True) as console:
        return build_server(source, cfg, build_task(cfg.task) if needs_task else None, console, any_style=True)


@overload
def generate(model: Any, prompts: Question, *, samples: Literal[1] = 1, **settings: Any) -> Generation: ...
@overload
def generate(model: Any, prompts: Question, *, samples: int, **settings: Any) -> list[Generation]: ...
@overload
def generate(
    model: Any, prompts: Iterable[Question], *, samples: Literal[1] = 1, **settings: Any
) -> list[Generation]: ...
@overload
def generate(model: Any, prompts: Iterable[Question], *, samples: int, **settings: Any) -> list[list[Generation]]: ...
def generate(model: Any, prompts: Any, *, samples: int = 1, **settings: Any) -> Any:
    """Load a model, sample answers, and release the model. To ask more than once, use `assay.load`.

    Args:
        model: As for `assay.load`, or a `LoadedModel`, which stays loaded.
        prompts: A question, a list of messages, or a list of these.
        samples: Number of answers per prompt.
        settings: Arguments of `LoadedModel.generate`, such as `temperature`, and of `assay.load`.
    """
    sampling = {name: value for name, value in settings.items() if name in SamplingOptions.__annotations__}
    others = {name: value for name, value in settings.items() if name not in sampling}
    if isinstance(model, LoadedModel):
        if others:
            raise UserError(f"'{next(iter(others))}' is an argument of assay.load: leave it out for a loaded model")
        return model.generate(prompts, samples=samples, **sampling)
    with load(model, **others) as loaded:
        return loaded.generate(prompts, samples=samples, **sampling)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, not several."""
    if isinstance(prompts, str | Prompt) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(entry, Mapping) for entry in prompts)


def as_question(prompt: Any) -> Prompt:
    try:
        return as_prompt(prompt)
    except UserError:
        raise UserError(
            f"a prompt must be a text, or a list of messages with role and content, not {prompt!r:.80}"
        ) from None


# A model behind an HTTP server of its own process

SHORT_FOR_SERVE = {name: f"http.{name}" for name in ("host", "name", "api_key_env")}
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address of this machine, for servers that listen on all
_running: set[ModelServer] = set()  # so that a server without another reference is not stopped


class ModelServer(Closeable):
    """A server with the interface of the OpenAI API, in a process that ends with this program.

    In a `with` block, it is stopped at the end.
    """

    def __init__(self, program: SupervisedProgram, url: str, model: str) -> None:
        self._program = program
        self._remove = weakref.finalize(self, shutil.rmtree, program.log.parent, True)
        self._last_log = ""
        self.url = url
        self.model = model
        """the model's name in requests"""

    @property
    def openai_base_url(self) -> str:
        """For OpenAI's client: `OpenAI(base_url=server.openai_base_url, api_key="none")`."""
        return f"{self.url}/v1"

    @property
    def log(self) -> str:
        """What the server has printed."""
        with suppress(OSError):
            self._last_log = self._program.log.read_text(errors="replace")
        return self._last_log

    def close(self) -> None:
        """Finish the running requests, and stop the server."""
        _running.discard(self)
        self._program.close()
        self._last_log = self.log
        self._remove()

    def wait_until_ready(self, seconds: float) -> None:
        """Raise a UserError if the server ends, or does not answer within this time."""
        from assay.engine.remote.launch import becomes_healthy

        if not becomes_healthy(self.url, "", seconds, lambda: self._program.ended is not None):
            reason = self._program.tail().removeprefix("assay: ")
            if (ended := self._program.ended) is not None:
                raise UserError(f"the server of {self.model} did not start: {reason or ended}")
            raise UserError(
                f"the server of {self.model} was not ready after {seconds:g} s (last line: {reason or 'none'}): "
                "raise wait"
            )

    def __repr__(self) -> str:
        return f"ModelServer({self.url!r}, model {self.model!r}, {self._program.ended or 'running'})"


def serve(
    model: Any, *, tokenizer: Any = None, port: int = 0, wait: float = 300.0, trust: bool = False, **settings: Any
) -> ModelServer:
    """Serve a model over HTTP in the background, with the interface of the OpenAI API. Returns when it answers.

    Args:
        model: A folder, a hub id, a GGUF file, a checkpoint of a run ("run:NAME@last", whose prompt and length settings
            are used), or a transformers model.
        tokenizer: The tokenizer of a transformers model.
        port: Port to listen on. Default: any free one.
        wait: Seconds in which the server must be ready.
        trust: Use code and files that the settings of a run name, even if it was started by someone else.
        settings: Settings of `assay serve`, such as `name="policy"` (of the model in requests), `device="cuda:1"` or
            `engine={"max_batch": 64}`.
    """
    if find_spec("uvicorn") is None or find_spec("httpx") is None:
        raise missing_extra("assay.serve", "serve")
    from assay.engine.remote.launch import module_environment
    from assay.system.http_server import bind
    from assay.system.program import SupervisedProgram

    overrides = overrides_of(settings, ServeConfig, SHORT_FOR_SERVE, ("tokenizer", "port", "wait", "trust"))
    source = source_of(model, tokenizer, overrides)
    cfg = settings_of(ServeConfig, None, {"http.port": port, **overrides})
    with bind(cfg.http.host, cfg.http.port) as listener:  # raises if the port is in use
        overrides["http.port"] = listener.getsockname()[1]
    words = [f"--{key}={toml_value(value)}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "assay", "serve", source, *words, *["--trust"] * trust]
    log = Path(tempfile.mkdtemp(prefix="assay-serve-")) / "server.log"
    host = LOCAL.get(cfg.http.host, cfg.http.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{overrides['http.port']}"
    server = ModelServer(SupervisedProgram(command, log, module_environment()), url, cfg.http.name or source)
    _running.add(server)
    try:
        server.wait_until_ready(wait)
    except BaseException:
        server.close()
        raise
    return server
