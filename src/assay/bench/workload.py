"""Workloads of the benchmarks: a model (a known shape with random weights, or one that is loaded) and requests.

Workloads and measurement settings are dataclasses whose fields are also the options of the command line. torch is
imported only when a model is built.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.types import Completion, Finish, Group, Progress, Prompt, Rollout, Turn, UserError, unknown_name

if TYPE_CHECKING:
    import torch

    from assay.engine import Request, SamplingParams
    from assay.models import Decoder, ModelSpec, PolicyModel


LONGEST = 1 << 19  # tokens; of random weights, the length is not limited by training


QWEN2 = {"family": "qwen2", "max_length": LONGEST, "rope_theta": 1e6, "qkv_bias": True, "tied": True}
QWEN3 = QWEN2 | {"family": "qwen3", "qkv_bias": False, "qk_norm": True}
LLAMA3 = QWEN2 | {"family": "llama", "qkv_bias": False, "rope_theta": 5e5, "tied": False}
SIZES = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab_size")


def shaped(family: dict[str, Any], *sizes: int) -> ModelSpec:
    """`family`: what a model has in common with its relatives. `sizes`: the values of `SIZES`."""
    from assay.models import ModelSpec

    return ModelSpec(**family | dict(zip(SIZES, sizes, strict=True)))


def tiny_llama() -> ModelSpec:
    from assay.models import preset

    return preset("tiny-llama", vocab_size=512, max_length=2048)


SHAPES: dict[str, Callable[[], ModelSpec]] = {
    "0.5b": partial(shaped, QWEN2, 896, 4864, 24, 14, 2, 64, 151936),  # Qwen2.5 0.5B
    "0.6b": partial(shaped, QWEN3, 1024, 3072, 28, 16, 8, 128, 151936),  # Qwen3 0.6B
    "1.5b": partial(shaped, QWEN2, 1536, 8960, 28, 12, 2, 128, 151936),  # Qwen2.5 1.5B
    "4b": partial(shaped, QWEN3, 2560, 9728, 36, 32, 8, 128, 151936),  # Qwen3 4B
    "7b": partial(shaped, QWEN2 | {"tied": False}, 3584, 18944, 28, 28, 4, 128, 152064),  # Qwen2.5 7B
    "8b": partial(shaped, LLAMA3, 4096, 14336, 32, 32, 8, 128, 128256),  # Llama 3.1 8B
    "tiny": partial(shaped, QWEN2, 64, 128, 2, 4, 2, 16, 512),  # for tests
    "tiny-llama": tiny_llama,  # for measurements on a CPU
}


def random_model(spec: ModelSpec, device: torch.device, seed: int) -> Decoder:
    """Norm weights are 1, all others normal with standard deviation 0.02, sampled on the device."""
    import torch

    from assay.models import Decoder

    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
    return model


def option(default: Any, text: str, *, minimum: int | None = None, **argparse_options: Any) -> Any:
    """A field of `CommandOptions`: an option of the command line. Its default is added to the help text."""
    shown = default
    if isinstance(default, bool):
        argparse_options["action"], shown = argparse.BooleanOptionalAction, "on" if default else "off"
    elif default is not None:
        argparse_options["type"] = type(default)
    argparse_options["help"] = text if default is None or text.endswith("]") else f"{text} [{shown}]"
    return field(default=default, metadata={"minimum": minimum, "argparse": argparse_options})


@dataclass(frozen=True)
class CommandOptions:
    """Settings that are options of the command line; those that are not given have no attribute in its namespace."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, minimum = getattr(self, setting.name), setting.metadata.get("minimum")
            if minimum is not None and value is not None and value < minimum:
                raise UserError(f"{option_name(setting.name)} must be at least {minimum}, not {value}")

    @classmethod
    def add_to(cls, group: argparse._ActionsContainer, *names: str) -> None:
        """Add the options of these fields; without names, of all."""
        for setting in fields(cls):
            if setting.metadata and (not names or setting.name in names):
                settings = setting.metadata["argparse"]
                group.add_argument(option_name(setting.name), default=argparse.SUPPRESS, **settings)

    @classmethod
    def given(cls, args: argparse.Namespace) -> dict[str, Any]:
        """The fields that were given on the command line."""
        return {setting.name: getattr(args, setting.name) for setting in fields(cls) if hasattr(args, setting.name)}

    def id_of(self, names: Iterable[str], **standard: Any) -> str:
        """The named fields that differ from their default, or from the `standard` value, for row ids."""
        standard = {setting.name: setting.default for setting in fields(self)} | standard
        return "".join(f"-{name}{value}" for name in names if (value := getattr(self, name)) != standard[name])


def option_name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"


@dataclass(frozen=True)
class Measurement(CommandOptions):
    """Where something is measured."""

    device: str = option("auto", "auto, cuda, cuda:N, mps or cpu")
    dtype: str = option("auto", "auto, float32 or bfloat16")


@dataclass(frozen=True)
class ModelOptions(CommandOptions):
    """A model with random weights, or one that is loaded."""

    shape: str = option("0.5b", "0.5b, 0.6b, 1.5b, 4b, 7b, 8b, tiny-llama or tiny, with random weights")
    model: str | None = option(None, "load a model instead: folder, .gguf or hub id", metavar="SOURCE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in SHAPES:
            raise unknown_name("shape", self.shape, SHAPES)

    @property
    def label(self) -> str:
        """The model's name in row ids."""
        if self.model is None:
            return self.shape
        path = Path(self.model)
        return (path.stem if path.suffix == ".gguf" else path.resolve().name if path.exists() else path.name).lower()

    def float32_model(self, device: torch.device, seed: int, progress: Progress | None = None) -> PolicyModel:
        """The policy as the trainer holds it; the engine copies its weights in its own dtype."""
        import torch

        from assay.models import load_model

        if self.model is not None:
            report = None if progress is None else partial(progress, f"loading {self.model}")
            return load_model(self.model, device=device, dtype=torch.float32, report=report)
        return random_model(SHAPES[self.shape](), device, seed)


FIXED, LONGTAIL = "fixed", "longtail"
LONGTAIL_BATCH = 1024  # default number of running sequences
STANDARD = {FIXED: {"prompts": 16, "new": 256}, LONGTAIL: {"prompts": 64, "new": 1024}}
# Lengths of the long tail: log-normal with the median at this fraction of the maximum, clipped to 1 and the maximum.
# With a maximum of 1,024 the median is 118, the mean about 200; 10 % exceed 480 and 2.5 % reach the maximum.
MEDIAN_FRACTION, SIGMA = 0.115, 1.1
LENGTHS_HELP = (
    f"longtail: each request has one sample, with a length from a log-normal distribution (sigma {SIGMA}, median "
    f"{MEDIAN_FRACTION} of --new, clipped at --new: for 1024 the mean is about 200)"
)
ROUND_TO = 64  # the engine's maximum length is a multiple of this
NAMED = ("prompt_tokens", "temperature", "top_p", "top_k", "min_p", "max_batch")  # in a row's id if not the default


@dataclass(frozen=True)
class Workload(ModelOptions):
    """Requests for one model: `prompts` x `samples` of one length, or `requests` with a long tail of lengths."""

    prompts: int = option(16, "distinct prompts [16; longtail: 64]", minimum=1)
    samples: int = option(64, "samples per prompt", minimum=1)
    prompt_tokens: int = option(128, "tokens per prompt", minimum=1)
    new: int = option(256, "new tokens per sequence [256]; longtail: the maximum [1024]", minimum=1)
    lengths: str = option(FIXED, LENGTHS_HELP, choices=(FIXED, LONGTAIL))
    requests: int = option(4096, "longtail only: requests of one sample, cycling through the prompts", minimum=1)
    max_batch: int | None = option(None, "running sequences at most [all; longtail: 1024]", minimum=1, type=int)
    seed: int = option(0, "seed of weights, prompts, lengths and sampling")
    temperature: float = option(1.0, "0 is greedy")
    top_p: float = option(1.0, "1 is off")
    top_k: int = option(0, "0 is off")
    min_p: float = option(0.0, "0 is off")
    quantize: str = option(
        "", "fp8: products of the layers in 8 bits; fp8_head: also of the head", choices=("", "fp8", "fp8_head")
    )
    kv_cache_dtype: str = option("auto", "fp8: keys and values in 8 bits", choices=("auto", "fp8"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_longtail and self.prompts > self.requests:
            raise UserError(f"--prompts {self.prompts} must not be above --requests {self.requests}")

    @property
    def is_longtail(self) -> bool:
        return self.lengths == LONGTAIL

    @property
    def sequences(self) -> int:
        return self.requests if self.is_longtail else self.prompts * self.samples

    @property
    def batch(self) -> int:
        """Maximum number of running sequences."""
        return self.max_batch or min(self.sequences, LONGTAIL_BATCH if self.is_longtail else self.sequences)

    @property
    def max_length(self) -> int:
        """Maximum length of prompt and completion, rounded up."""
        return -(-(self.prompt_tokens + self.new) // ROUND_TO) * ROUND_TO

    @cached_property
    def new_tokens(self) -> list[int]:
        """New tokens of each sequence; the same in every run."""
        if not self.is_longtail:
            return [self.new] * self.sequences
        rng = random.Random(f"{self.seed}/lengths")
        median = math.log(MEDIAN_FRACTION * self.new)
        return [min(max(round(rng.lognormvariate(median, SIGMA)), 1), self.new) for _ in range(self.requests)]

    @property
    def mean_new(self) -> float:
        return sum(self.new_tokens) / self.sequences

    @property
    def id(self) -> str:
        """A unique name: results of one workload never replace results of another."""
        quantized = f"-{self.quantize}" * bool(self.quantize) + "-fp8kv" * (self.kv_cache_dtype == "fp8")
        if not self.is_longtail:
            kind = f"{self.prompts}x{self.samples}x{self.new}"
            kind = "one-sequence" if kind == "1x1x512" else kind
            return f"gen-{self.label}-{kind}{self.id_of(NAMED)}{quantized}"
        distinct = self.prompts == self.requests
        kind, names = ("longtail-distinct", ()) if distinct else ("longtail", ("prompts",))
        return (
            f"gen-{self.label}-{kind}{self.id_of((*NAMED, *names, 'requests', 'new'), **STANDARD[LONGTAIL])}{quantized}"
        )

    def settings(self) -> dict[str, Any]:
        """All fields, with defaults resolved, for a row of results."""
        unused = "samples" if self.is_longtail else "requests"
        values = {name: value for name, value in asdict(self).items() if name != unused}
        shape = None if self.model else self.shape
        return values | {"shape": shape, "max_batch": self.batch, "mean_new": round(self.mean_new, 2)}

    def check_length(self, model: PolicyModel) -> None:
        if self.prompt_tokens + self.new > model.max_length:
            raise UserError(
                f"--prompt-tokens {self.prompt_tokens} and --new {self.new} exceed the maximum length of {self.label}, "
                f"{model.max_length} tokens: lower one of them"
            )

    def make_requests(self, vocab_size: int, run: int) -> list[Request]:
        """Every run has its own prompts, so that no run reuses cached prefixes of another."""
        from assay.engine import Request

        rng = random.Random(f"{self.seed}/{run}")
        prompts = [rng.choices(range(vocab_size), k=self.prompt_tokens) for _ in range(self.prompts)]
        if not self.is_longtail:
            return [Request(prompt, self.params(self.samples, self.new), rng.getrandbits(63)) for prompt in prompts]
        return [
            Request(prompts[index % self.prompts], self.params(1, new), rng.getrandbits(63))
            for index, new in enumerate(self.new_tokens)
        ]

    def params(self, n: int, new: int) -> SamplingParams:
        """No stop tokens: every sequence reaches its length."""
        from assay.engine import SamplingParams

        return SamplingParams(
            n=n, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, max_new_tokens=new
        )


TABLE = (
    Workload(),
    Workload(shape="1.5b"),
    Workload(lengths=LONGTAIL, prompts=64, new=1024),
    Workload(lengths=LONGTAIL, prompts=4096, new=1024),
    Workload(prompts=1, samples=1, new=512),
)
STARTUP = Workload()  # its start-up time is part of the table


@dataclass(frozen=True)
class Sequences(ModelOptions):
    """Sequences for training alone. All their tokens are trained except the first, which has no context."""

    sequences: int = option(16, "sequences of --train-only", minimum=1)
    tokens: int = option(1024, "tokens per sequence of --train-only", minimum=2)
    seed: int = option(0, "seed of weights and tokens")

    @property
    def id(self) -> str:
        return f"train-{self.label}-{self.sequences}x{self.tokens}"

    def group(self, vocab_size: int, run: int) -> Group:
        """Random answers to a prompt of one token: half of them with advantage 1, half with -1."""
        rng = random.Random(f"{self.seed}/{run}")
        prompt = Prompt(f"bench/{run}", ())
        uniform = [-math.log(vocab_size)] * (self.tokens - 1)  # close to the log-probabilities of random weights
        group = Group(prompt, [])
        for index in range(self.sequences):
            first, *rest = rng.choices(range(vocab_size), k=self.tokens)
            turn = Turn([first], Completion(rest, uniform, uniform, Finish.LENGTH), "")
            group.rollouts.append(Rollout(prompt, index, [turn], advantage=1.0 if index % 2 else -1.0))
        return group


TRAINING_TABLE = (Sequences(), Sequences(shape="1.5b"))
NANO = "nano"  # the smallest preset: most of the time is spent on the host


@dataclass(frozen=True)
class Episodes(CommandOptions):
    """The episodes that are played."""

    shape: str = option(NANO, "nano, or 0.5b, 1.5b... with one token per letter")
    episodes: int = option(2048, "number of episodes", minimum=1)
    samples: int = option(8, "episodes per environment seed", minimum=1)
    step_tokens: int = option(64, "maximum tokens per action", minimum=1)
    max_batch: int = option(256, "running episodes at most", minimum=1)
    seed: int = option(0, "seed of sampling")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in (known := (NANO, *SHAPES)):
            raise unknown_name("shape", self.shape, known)
        if self.episodes % self.samples:
            raise UserError(f"--episodes {self.episodes} must be a multiple of --samples {self.samples}")

    @property
    def id(self) -> str:
        shape = "" if self.shape == NANO else f"{self.shape}-"
        return f"episodes-{shape}{self.episodes}{self.id_of(('samples', 'step_tokens', 'max_batch'))}"


@dataclass(frozen=True)
class EpisodeOptions(Measurement):
    """How episodes are measured."""

    repeat: int = option(1, "timed runs of each mode after a warm-up run", minimum=1)


@dataclass(frozen=True)
class Options(Measurement):
    """How the engine is measured."""

    repeat: int = option(3, "timed runs after a warm-up run", minimum=1)
    mismatch: bool = option(True, "compare log-probabilities with the trainer's")
    parts: bool = option(False, "kernel times of a decode step by category (CUDA only)")


@dataclass(frozen=True)
class StepOptions(Measurement):
    """How a step, or training alone, is measured."""

    steps: int = option(3, "timed steps after a warm-up step", minimum=1)
    kl: float = option(0.0, "KL coefficient; above 0: with a reference model", metavar="COEF")
    set: tuple[str, ...] = ()  # KEY=VALUE, each a setting of the run

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"--kl must be 0 (no reference) or more, not {self.kl}")
        if self.set:
            parse_settings(self.set)


# Settings that are options of the command, not of --set.
OPTION_OF = {
    "model": "--shape or --model",
    "device": "--device",
    "dtype": "--dtype",
    "seed": "--seed",
    "train.prompts": "--prompts",
    "train.samples": "--samples",
    "sampling.max_new_tokens": "--new",
    "sampling.temperature": "--temperature",
    "algo.kl_coef": "--kl",
}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings of a run that --set names, by dotted key."""
    from assay.config import TrainConfig
    from assay.config.settings import Caller, load_settings, parse_overrides

    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise UserError(f"--set {word}: a setting and its value are needed, e.g. train.token_budget=8192")
        if option := OPTION_OF.get(key) or OPTION_OF.get(key.partition(".")[0]):
            raise UserError(f"--set {key} is an option of this command: {option}")
        if key in ("train.process", "source"):
            raise UserError(f"--set {key}: not supported, since a benchmark measures one process; leave it out")
    overrides = parse_overrides([f"--{word}" for word in words])
    load_settings(TrainConfig, None, overrides, Caller("in --set", "--set {}"))
    return overrides


def command_options(*groups: CommandOptions) -> list[str]:
    """The options of the command line that give these settings; default values are left out."""
    words: list[str] = []
    for setting, value in ((s, getattr(group, s.name)) for group in groups for s in fields(group)):
        name = option_name(setting.name)
        if value == setting.default:
            continue
        if isinstance(value, bool):
            words.append(name if value else name.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for item in values for word in (name, str(item))]
    return words
