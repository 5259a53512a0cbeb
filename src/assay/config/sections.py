"""What is solved, by which model, and how answers are asked for and judged.

How the policy learns from answers: critic, replay, optimizer, loop, warm start.

How answers are sampled, models measured, and a run saved, logged and spread out.

All the settings of a command, section by section.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from assay.config.algorithm import AlgoConfig
from assay.config.settings import Above0, Below1, Count, Finite, Fraction, NonNegative, Positive, Section, Seed, Split


class ModelConfig(Section):
    """The policy. `model = "SOURCE"` is short for `model.source`."""

    source: str = ""
    """Hugging Face folder, hub id, GGUF file, run:NAME@STEP (@last, @best), or preset:NAME for a fresh small model"""
    tokenizer: str = ""
    """tokenizer from another folder or hub id; for presets 'words' (the task's own words) or 'characters'"""
    max_length: Count = 0
    """longest prompt + completion in tokens; 0: what the model was made for (presets: 512)"""
    trust_remote_code: bool = False
    """run Python code that comes with a hub model; only for models you trust"""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model's own weights."""

    rank: Count = 0
    """of the adapters; 0: none, all weights are trained"""
    alpha: Above0 = 32.0
    """what an adapter adds is multiplied by alpha / rank"""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """linear layers to adapt, by the end of their names, e.g. ["q_proj", "v_proj"]; all-linear: all in the layers"""

    @field_validator("targets", mode="before")
    @classmethod
    def _single(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class TaskConfig(Section):
    """What to solve. `task = "NAME"` is short for `task.name`; on the command line it drops a file's path and args."""

    name: str = ""
    """gsm8k, math, countdown, abacus, jsonl, reasoning_gym:NAME, or your own as package.module:Thing, file.py:Thing"""
    path: str = ""
    """folder or JSONL file with the data, or a hub id; empty: the task's own default"""
    args: dict[str, Any] = Field(default_factory=dict)
    """the task's own knobs, e.g. task.args.max_steps = 3"""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class EnvConfig(Section):
    """An environment to act in, in one step or many. `env = "NAME"` is short for `env.name`."""

    name: str = ""
    """guess, countdown_tries; about a task: single, stepwise, calculator, python; or your own as file.py:Thing"""
    path: str = ""
    """folder or file that the environment reads; empty: its own default"""
    args: dict[str, Any] = Field(default_factory=dict)
    """the environment's own knobs, e.g. env.args.tries = 3"""
    max_steps: Count = 0
    """episodes are cut off after so many steps; 0: the environment's own limit"""
    max_tokens: Count = 0
    """tokens of one step; 0: all that is left of sampling.max_new_tokens, which holds for the whole episode"""
    max_seconds: NonNegative = 0.0
    """episodes still going on so long after they began are cut off; 0: never. What is cut off depends on the machine"""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class PromptConfig(Section):
    """How a problem becomes tokens."""

    style: Literal["auto", "chat", "raw"] = "auto"
    """chat: the tokenizer's template, an error where it has none; raw: prompt.template, for base models; auto: chat"""
    template: str = ""
    """raw prompt with {question}, {examples}, {system} or any field of the problem"""
    system: str = ""
    """system message"""
    system_file: str = ""
    """file to read the system message from"""
    few_shot: Count = 0
    """worked examples put before each question; with few_shot_file, 0: all of the file"""
    few_shot_file: str = ""
    """JSONL with question and solution columns to take them from; empty: the train split"""


class RewardConfig(Section):
    """How an answer is judged."""

    extract: Literal["", "boxed", "hash", "answer-tag", "last-number"] = ""
    """the form in which the final answer must stand; empty: the task's own"""
    strict: bool = True
    """only that form counts, and a number where the gold answer is one; false: other forms and expressions count too"""
    accuracy: Finite = 1.0
    """weight of a right answer"""
    format: Finite = 0.0
    """weight of having the asked form, right or wrong"""
    format_pattern: str = ""
    """regular expression that defines the form; empty: a final answer could be extracted"""
    length: Finite = 0.0
    """weight of being short: 1 up to target_length characters, falling to 0 at twice that"""
    target_length: Positive = 1000
    """see length"""
    correct: Finite = 1.0
    """accuracy of a right answer"""
    wrong: Finite = 0.0
    """accuracy of a wrong answer"""
    unparsable: Finite = 0.0
    """accuracy where no answer could be read"""
    function: str = ""
    """your own reward in place of the task's: package.module:function or file.py:function"""
    workers: Count = 2
    """judging processes; 0 judges in the training process, without isolation"""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0
    """hard time limit for one answer"""
    sandbox: Literal["auto", "strict", "off"] = "auto"
    """what judging processes may do; auto: strict for built-in judges, files and network for your own code"""
    pass_env: list[str] = Field(default_factory=list)
    """environment variables that judging processes may see, e.g. ["OPENAI_API_KEY"]; others are hidden from them"""

    @field_validator("pass_env", mode="before")
    @classmethod
    def _single(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ReplayConfig(Section):
    """Learning again from groups of earlier steps. Needs a loss with an importance ratio, or algo.correction."""

    groups: Count = 0
    """of earlier steps that are added to each step's own; 0: none"""
    capacity: Positive = 256
    """groups kept, the latest ones"""
    max_staleness: Count = 0
    """drop groups that a policy of more than so many steps ago has sampled; 0: never"""
    with_replacement: bool = False
    """a group may be drawn several times in one step"""
    load: str = ""
    """folder of a saved buffer that a new run begins with: ReplayBuffer.save, or replay/ of a run's checkpoint"""


class CriticConfig(Section):
    """With algo.critic: it learns what states are worth, and gives tokens their advantages (PPO)."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: a network as large as the policy; shared: a head on the policy's own, which learns for both"""
    coef: NonNegative = 0.5
    """shared: weight of its loss beside the policy's"""
    lr: Above0 = 1e-5
    """its learning rate, constant; shared: of the head"""
    gamma: Fraction = 1.0
    """discount of a token's distance from the reward"""
    gae_lambda: Fraction = 1.0
    """1: returns less values, unbiased; 0: one step ahead, as good as the values are"""
    clip: NonNegative = 0.5
    """how far a value may go from the one that gave credit before it stops paying; 0: any distance"""
    passes: Positive = 4
    """separate: optimizer steps on each batch; shared: as many as the policy makes"""
    bootstrap: bool = False
    """episodes that a limit cut off count as worth what it expects of them; false: as over, with what they have got"""
    normalise: bool = True
    """advantages of a batch get mean 0 and standard deviation 1"""
    max_grad_norm: Above0 = 1.0
    """its gradients are scaled down to this norm"""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum for the matrices of the layers, AdamW for everything else"""
    lr: Above0 = 1e-6
    """learning rate of whatever has none of its own below; a schedule scales them all"""
    matrix_lr: Above0 | None = None
    """learning rate of the matrices in the layers; muon needs one, e.g. 0.001; empty: lr"""
    embedding_lr: Above0 | None = None
    """learning rate of the embedding, and of a head that shares its weights; empty: lr"""
    head_lr: Above0 | None = None
    """learning rate of a head with weights of its own; empty: lr"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup: Count = 0
    """steps of linear warm-up"""
    final: Fraction = 0.0
    """fraction of the learning rate that linear and cosine schedules end with"""
    initial: Annotated[float, Field(gt=0, le=1)] = 1.0
    """fraction of the learning rate to start from, for all steps"""
    weight_decay: NonNegative = 0.0
    """decoupled; not applied to vectors (norms and biases)"""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """AdamW's moments"""
    momentum: Below1 = 0.95
    """Muon's momentum"""
    eps: Above0 = 1e-8
    """AdamW's epsilon"""
    max_grad_norm: NonNegative = 1.0
    """gradients are scaled down to this norm; 0: never"""


class LoopConfig(Section):
    """The loop."""

    steps: Count = 100
    """batches of rollouts to train on"""
    epochs: NonNegative = 0.0
    """length in passes over the train split instead of steps; 0: use steps"""
    budget: Count = 0
    """end, and schedule the learning rate, by answers sampled, those of dropped groups included; 0: by steps"""
    prompts: Positive = 16
    """prompts a step"""
    samples: Positive = 8
    """answers a prompt"""
    passes: Positive = 1
    """times the trainer goes over each batch of rollouts"""
    token_budget: Positive = 16384
    """most tokens in one forward and backward pass; memory goes with it, the result does not"""
    recompute: bool = False
    """keep only the inputs of layers for the backward pass: a fraction of the memory, a third more time"""
    compile: Literal["auto", "on", "off"] = "auto"
    """compile the layers with torch.compile; auto: on one GPU, for models of 100 million parameters or more"""
    offload_reference: bool = False
    """keep the reference model of a KL term in main memory, and on the GPU only while it is asked"""
    process: Literal["same", "separate"] = "same"
    """separate: each update in a process of its own, which leaves nothing on the GPU; takes seconds to start"""
    max_train_prompts: Count = 0
    """use only the first so many prompts of the train split; 0: all"""
    max_skipped: Count = 5
    """stop after so many steps in a row whose loss or gradient was not finite; 0: never"""


class SftConfig(Section):
    """A supervised warm start on worked solutions, before reinforcement."""

    steps: Count = 0
    """optimizer steps; 0: no warm start"""
    batch: Positive = 64
    """solutions a step"""
    lr: Above0 = 1e-5
    """learning rate, linear to 0"""
    warmup: Count = 10
    """steps of linear warm-up"""
    weight_decay: NonNegative = 0.0
    """as in optim"""
    args: dict[str, Any] = Field(default_factory=dict)
    """task knobs that differ for the demonstrations, e.g. sft.args.noise = 0.3"""


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
