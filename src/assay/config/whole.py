"""All the settings of a command, section by section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.config.algorithm import AlgoConfig
from assay.config.kinds import Section, Seed
from assay.config.learning import CriticConfig, LoopConfig, OptimConfig, ReplayConfig, SftConfig
from assay.config.problems import EnvConfig, LoraConfig, ModelConfig, PromptConfig, RewardConfig, TaskConfig
from assay.config.running import EngineConfig, EvalConfig, LogConfig, ParallelConfig, SamplingConfig, SaveConfig


class TrainConfig(Section):
    """A training run."""

    name: str = ""
    """name of the run; empty: that of the config file"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    seed: Seed = 0
    """of everything: data order, sampling, fresh weights"""
    device: str = "auto"
    """cuda, mps, cpu or auto"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """computation in training; master weights are float32. float64 for both is slow, and meant for comparing layouts"""
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: LoopConfig = Field(default_factory=LoopConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)


class MeasureConfig(Section):
    """An evaluation of finished models: the sections of a training run that matter to it."""

    runs_dir: str = "runs"
    """folder that holds the runs"""
    seed: Seed = 0
    """of sampling"""
    device: str = "auto"
    """cuda, mps, cpu or auto"""
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
