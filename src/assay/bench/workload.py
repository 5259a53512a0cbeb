"""Workloads of the benchmarks: a model (a known shape with random weights, or one that is loaded) and requests."""

from __future__ import annotations

import math
import random
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from assay.engine import Request, SamplingParams
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.load import load_model, preset
from assay.models.spec import ModelSpec
from assay.types import UserError, unknown_name


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, vocab_size: int) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        intermediate=intermediate,
        max_length=32768,
        rope_theta=1e6,
        tied=True,
        qkv_bias=True,
    )


SHAPES: dict[str, ModelSpec] = {
    "0.5b": qwen2(896, 4864, layers=24, heads=14, head_dim=64, vocab_size=151936),  # Qwen2.5 0.5B
    "1.5b": qwen2(1536, 8960, layers=28, heads=12, head_dim=128, vocab_size=151936),  # Qwen2.5 1.5B
    "tiny": qwen2(64, 128, layers=2, heads=4, head_dim=16, vocab_size=512),  # for tests
    "tiny-llama": preset("tiny-llama", vocab_size=512, max_length=2048),  # for measurements on a CPU
}


def float32_model(shape: str, source: str | None, device: torch.device, seed: int) -> PolicyModel:
    """The policy as the trainer holds it; the engine copies its weights in its own dtype."""
    if source is not None:
        return load_model(source, device=device, dtype=torch.float32)
    return random_model(SHAPES[shape], device, seed)


@torch.no_grad()
def random_model(spec: ModelSpec, device: torch.device, seed: int) -> Decoder:
    """Norm weights are 1, all others normal with standard deviation 0.02, sampled on the device."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
    return model


def label(shape: str, source: str | None) -> str:
    """The model's name in row ids."""
    if source is None:
        return shape
    path = Path(source)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name if path.exists() else path.name).lower()


FIXED, LONGTAIL = "fixed", "longtail"
LONGTAIL_BATCH = 1024  # default number of running sequences
STANDARD = {FIXED: {"prompts": 16, "new": 256}, LONGTAIL: {"prompts": 64, "new": 1024}}
# Lengths of the long tail: log-normal with the median at this fraction of the maximum, clipped to 1 and the maximum.
# With a maximum of 1,024 the median is 118, the mean about 200; 10 % exceed 480 and 2.5 % reach the maximum.
MEDIAN_FRACTION, SIGMA = 0.115, 1.1
ROUND_TO = 64  # the engine's maximum length is a multiple of this
NAMED = ("prompt_tokens", "temperature", "top_p", "top_k", "min_p", "max_batch")  # in a row's id if not the default


@dataclass(frozen=True)
class Workload:
    """Requests for one model: `prompts` x `samples` of one length, or `requests` with a long tail of lengths."""

    shape: str = "0.5b"
    model: str | None = None  # a folder, GGUF or hub id in place of the shape
    prompts: int = 16  # distinct prompts
    samples: int = 64  # per prompt, if lengths are fixed
    prompt_tokens: int = 128
    new: int = 256  # tokens per sequence; with a long tail the maximum
    lengths: str = FIXED
    requests: int = 4096  # with a long tail: one sample each, cycling through the prompts
    max_batch: int | None = None
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown_name("shape", self.shape, SHAPES)
        for name in ("prompts", "samples", "prompt_tokens", "new", "requests", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
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
    def label(self) -> str:
        return label(self.shape, self.model)

    @property
    def id(self) -> str:
        """A unique name: results of one workload never replace those of another."""
        standard: dict[str, Any] = {field.name: field.default for field in fields(self)}
        names = list(NAMED)
        if not self.is_longtail:
            kind = f"{self.prompts}x{self.samples}x{self.new}"
            kind = "one-sequence" if kind == "1x1x512" else kind
        else:
            standard |= STANDARD[LONGTAIL]
            distinct = self.prompts == self.requests
            kind = "longtail-distinct" if distinct else "longtail"
            names += ["requests", "new"] if distinct else ["prompts", "requests", "new"]
        others = [f"-{name}{value}" for name in names if (value := getattr(self, name)) != standard[name]]
        return f"gen-{self.label}-{kind}{''.join(others)}"

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
        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_new_tokens=new,
        )


TABLE = (
    Workload(),
    Workload(shape="1.5b"),
    Workload(lengths=LONGTAIL, prompts=64, new=1024),
    Workload(lengths=LONGTAIL, prompts=4096, new=1024),
    Workload(prompts=1, samples=1, new=512),
)
STARTUP = Workload()  # its start-up time is part of the table


def command_options(settings: Any) -> list[str]:
    """The command-line options of this dataclass; default values are left out."""
    words: list[str] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        assert field.default is not MISSING, field.name
        if value == field.default:
            continue
        option = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            words += [word for item in value for word in (f"--{option}", item)]
        else:
            words += [f"--{option}", str(value)]
    return words
