"""How answers are sampled, models measured, and a run saved, logged and spread out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from assay.config.kinds import Above0, Count, NonNegative, Positive, Section, Split

BUILT_IN_ENGINES = ("auto", "native", "hf")


class SamplingConfig(Section):
    """How training answers are sampled."""

    temperature: Above0 = 1.0
    """1 samples from the policy itself"""
    top_k: Count = 0
    """0: off. Truncation makes importance ratios inexact"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: off. Truncation makes importance ratios inexact"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: off; else tokens less likely than this share of the likeliest one are not drawn"""
    max_new_tokens: Positive = 256
    """answers are cut off here; of an episode: all that the policy writes in it"""
    min_new_tokens: Count = 0
    """end tokens are not drawn before there are as many"""
    stop: list[str] = Field(default_factory=list)
    """strings that end an answer, besides the model's own end tokens"""


class EvalConfig(Section):
    """How models are measured."""

    every: Count = 0
    """evaluate on eval.split every so many steps; 0: only at the start and the end"""
    split: Split = "validation"
    """what the periodic evaluation and the choice of the best checkpoint look at"""
    final_split: Split | Literal["all"] = "test"
    """what before and after are measured on; all: every row of a single file (what assay eval --data takes)"""
    examples: Count = 200
    """problems of the periodic evaluation; 0: all"""
    final_examples: Count = 0
    """problems of before and after; 0: all"""
    samples: Positive = 1
    """answers a problem"""
    temperature: NonNegative = 0.0
    """0 is greedy"""
    top_k: Count = 0
    """0: off"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: off"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: off"""
    max_new_tokens: Count = 0
    """0: as in training; without a training run: 512"""
    stop: list[str] = Field(default_factory=list)
    """strings that end an answer; empty: as in training"""


class SaveConfig(Section):
    """Checkpoints and rollout files."""

    every: Count = 50
    """checkpoint every so many steps; 0: only at the end"""
    keep: Positive = 2
    """latest checkpoints kept, besides the best one and the start"""
    best: bool = True
    """also whenever a periodic evaluation comes out best; false: the best is one of those that are saved anyway"""
    rollouts: Annotated[int, Field(ge=-1)] = -1
    """steps whose rollouts are kept on disk; -1: all, 0: none"""
    grace_s: NonNegative = 30.0
    """seconds that a step may take to end after Ctrl-C or SIGTERM; later, sampling or an evaluation is broken off"""


class LogConfig(Section):
    """Where metrics go besides the run directory."""

    wandb: str = ""
    """Weights & Biases project; empty: off"""
    tensorboard: bool = False
    """write TensorBoard files into the run directory"""


class ParallelConfig(Section):
    """How a run that torchrun starts is spread over its processes."""

    tp: Positive = 1
    """processes that hold one model together (tensor parallelism); the others split the batch"""
    mode: Literal["auto", "ddp", "fsdp"] = "auto"
    """between those that split the batch. ddp: whole copies; fsdp: parts; auto: fsdp on GPUs from 1e9 parameters on"""
    heartbeat_timeout_s: NonNegative = 300.0
    """a process that has shown no sign of life for so many seconds ends the run; 0: it is reported and waited for"""


def check_engine_name(name: str) -> str:
    if name not in BUILT_IN_ENGINES and ":" not in name.strip(":"):
        choices = ", ".join(f"'{engine}'" for engine in BUILT_IN_ENGINES)
        raise PydanticCustomError(
            "engine_name", "should be {choices} or your own as file.py:function", {"choices": choices}
        )
    return name


class EngineConfig(Section):
    """Generation."""

    name: Annotated[str, AfterValidator(check_engine_name)] = "auto"
    """native for the Llama and Qwen families, hf for everything else (auto), or your own as file.py:function"""
    max_batch: Count = 0
    """sequences decoded at once; 0: 1,024 on CUDA, 256 elsewhere"""
    memory: NonNegative = 0.0
    """GiB for keys and values; 0: what max_batch sequences can use, within 40 % (CUDA) or 25 % of what is free"""
    lend: bool = False
    """give the memory of keys and values back while the trainer works (CUDA); recorded graphs stay as they are"""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of sequences that are running when new weights arrive: computed again with them, or kept as it is"""
    prefill_tokens: Count = 0
    """prompt tokens computed between two stretches of decoding; 0: 8,192 on CUDA, 1,024 elsewhere"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: as the device prefers; float64: see the run's dtype"""
