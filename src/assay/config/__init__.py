"""The typed settings of a run. The string below a field is its help; `assay train --help` prints them all."""

from assay.config.algorithm import AlgoConfig
from assay.config.kinds import Above0, Below1, Count, Finite, Fraction, NonNegative, Positive, Section, Seed, Split
from assay.config.learning import CriticConfig, LoopConfig, OptimConfig, ReplayConfig, SftConfig
from assay.config.problems import EnvConfig, LoraConfig, ModelConfig, PromptConfig, RewardConfig, TaskConfig
from assay.config.running import EngineConfig, EvalConfig, LogConfig, ParallelConfig, SamplingConfig, SaveConfig
from assay.config.whole import MeasureConfig, TrainConfig

__all__ = [
    "Above0",
    "AlgoConfig",
    "Below1",
    "Count",
    "CriticConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "Finite",
    "Fraction",
    "LogConfig",
    "LoopConfig",
    "LoraConfig",
    "MeasureConfig",
    "ModelConfig",
    "NonNegative",
    "OptimConfig",
    "ParallelConfig",
    "Positive",
    "PromptConfig",
    "ReplayConfig",
    "RewardConfig",
    "SamplingConfig",
    "SaveConfig",
    "Section",
    "Seed",
    "SftConfig",
    "Split",
    "TaskConfig",
    "TrainConfig",
]
