"""The typed settings of a run. The string below a field is its help; `assay train --help` prints them all."""

from assay.config.algorithm import AlgoConfig
from assay.config.sections import (
    ClusterConfig,
    CriticConfig,
    EndpointConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    HttpConfig,
    InferenceServerConfig,
    JudgeConfig,
    LogConfig,
    LoopConfig,
    MeasureConfig,
    ModelConfig,
    OpenAIConfig,
    OptimConfig,
    PromptConfig,
    ReferenceServerConfig,
    RemoteEngineConfig,
    ReplayConfig,
    RewardConfig,
    SamplingConfig,
    ServeConfig,
    ServerConfig,
    SftConfig,
    SGLangConfig,
    TaskConfig,
    TrainConfig,
    VLLMConfig,
)
from assay.config.settings import Count, NonNegative, Positive, Section
