"""Settings of models, tasks, rewards, training, sampling, evaluation and the engine, and of whole commands.

The string below a field is its help text.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from assay.config.algorithm import AlgoConfig
from assay.config.settings import (
    Above0,
    Args,
    Below1,
    Code,
    Count,
    Data,
    FilePath,
    Finite,
    Fraction,
    Host,
    NonNegative,
    Positive,
    Resource,
    Section,
    Seed,
    Split,
    Table,
    Variable,
)
from assay.types import MAX_REWARD


class ModelConfig(Section):
    """The policy. `model = "SOURCE"` is short for `model.source`."""

    short_form: ClassVar = "source"

    source: Data = ""
    """Hugging Face folder, hub id, GGUF file, run:NAME@STEP (@last, @best), or preset:NAME for a fresh small model"""
    tokenizer: Data = ""
    """tokenizer from another folder or hub id; for presets 'words' (the task's own words) or 'characters'"""
    max_length: Count = 0
    """longest prompt + completion in tokens; 0: the model's own maximum (presets: 512)"""
    trust_remote_code: Annotated[bool, Resource.PROGRAM] = False
    """run Python code that comes with a hub model; only for models you trust"""


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model's own weights."""

    rank: Count = 0
    """rank of the adapters; 0: no adapters, all weights are trained"""
    alpha: Above0 = 32.0
    """adapter outputs are scaled by alpha / rank"""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """linear layers to adapt, by name suffix, e.g. ["q_proj", "v_proj"]; all-linear: all of the transformer layers"""
    quantize: Literal["", "nf4"] = ""
    """nf4: store the frozen linear layers in 4 bits (QLoRA); empty: in float32"""


class TaskConfig(Section):
    """The task. `task = "NAME"` is short for `task.name`; on the command line it resets the file's path and args."""

    short_form: ClassVar = "name"

    name: Code = ""
    """name of the task, reasoning_gym:NAME, or your own as package.module:Name or file.py:Name"""
    path: Data = ""
    """folder or JSONL file with the data, or a hub id; empty: the task's default"""
    args: Args = Field(default_factory=dict)
    """arguments of the task, e.g. task.args.max_steps = 3"""


class EnvConfig(Section):
    """The environment, single-step or multi-step. `env = "NAME"` is short for `env.name`."""

    short_form: ClassVar = "name"

    name: Code = ""
    """name of the environment, verifiers:ENV_ID, or your own as file.py:Name; guess and countdown_tries need no task"""
    path: Data = ""
    """folder or file that the environment reads; empty: the environment's default"""
    args: Args = Field(default_factory=dict)
    """arguments of the environment, e.g. env.args.tries = 3"""
    max_steps: Count = 0
    """truncate episodes after this many steps; 0: the environment's own limit"""
    max_tokens: Count = 0
    """maximum tokens per step; 0: what remains of sampling.max_new_tokens, which limits the whole episode"""
    max_seconds: NonNegative = 0.0
    """truncate episodes after this many seconds; 0: never. Results then depend on the speed of the machine"""
    pool: Literal["local", "ray"] = "local"
    """where episodes are stepped. local: in each training process; ray: on all nodes of the Ray cluster"""


class PromptConfig(Section):
    """How a problem is rendered as a prompt."""

    alternatives = ("system", "system_file")

    style: Literal["auto", "chat", "raw"] = "auto"
    """chat: the tokenizer's chat template, an error if it has none; raw: prompt.template (base models); auto: chat"""
    template: str = ""
    """raw prompt with {question}, {examples}, {system} or any field of the problem"""
    system: str = ""
    """system message"""
    system_file: FilePath = ""
    """file to read the system message from"""
    few_shot: Count = 0
    """number of worked examples before each question; with few_shot_file, 0 means all examples of the file"""
    few_shot_file: FilePath = ""
    """JSONL file of examples with question and solution columns; empty: examples come from the train split"""


Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


class RewardConfig(Section):
    """How answers are judged and rewarded."""

    extract: Literal["", "boxed", "hash", "answer-tag", "last-number"] = ""
    """format of the final answer; empty: the task's default"""
    strict: bool = True
    """accept only that format, and only numbers where the gold answer is a number; false: accept other formats too"""
    accuracy: Reward = 1.0
    """weight of correctness"""
    format: Reward = 0.0
    """weight of following the answer format, whether the answer is correct or not"""
    format_pattern: str = ""
    """regular expression for the format; empty: any completion with an extractable answer follows it"""
    length: Reward = 0.0
    """weight of brevity: 1 up to target_length characters, decreasing linearly to 0 at twice that length"""
    target_length: Positive = 1000
    """length in characters up to which reward.length gives its full value"""
    correct: Reward = 1.0
    """correctness value of a correct answer"""
    wrong: Reward = 0.0
    """correctness value of a wrong answer"""
    unparsable: Reward = 0.0
    """correctness value if no answer could be extracted"""
    function: Code = ""
    """instead of the task's judge: your own reward function as file.py:function, or 'judge': the model of [judge]"""
    functions: Annotated[list[str], Resource.CODE] = Field(default_factory=list)
    """several, added with reward.weights; 'task': the task's judge, 'judge': a model; the first decides accuracy"""
    weights: list[Reward] = Field(default_factory=list)
    """one weight per entry of reward.functions; empty: all 1"""
    workers: Count = 2
    """number of judge processes; 0: judge in the training process, without isolation"""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0
    """time limit in seconds for judging one answer"""
    sandbox: Literal["auto", "strict", "off"] = "auto"
    """confinement of judge processes; auto: strict for built-in judges, file and network access for your own code"""
    pass_env: Annotated[list[str], Resource.VARIABLE] = Field(default_factory=list)
    """environment variables passed to judge processes, e.g. ["OPENAI_API_KEY"]; most others are hidden"""
    pool: Literal["local", "ray"] = "local"
    """where judge processes run. local: beside each training process; ray: on all nodes of the Ray cluster"""


class EndpointConfig(Section):
    """An OpenAI-compatible endpoint."""

    url: Host = ""
    """URL of the endpoint, e.g. https://api.openai.com/v1 or http://127.0.0.1:8000; /v1 is added if it has no path"""
    api_key_env: Variable = ""
    """environment variable with the API key; empty: no key"""
    max_concurrent: Positive = 16
    """maximum number of requests at the same time"""
    timeout_s: NonNegative = 120.0
    """repeat a request that is not answered within this many seconds; 0: wait without a limit"""
    retries: Count = 5
    """how often a request is repeated after rate limits, server errors, timeouts and lost connections"""
    extra: Table = Field(default_factory=dict)
    """more fields of every request, e.g. extra.reasoning_effort = "low"; they replace fields that assay sends"""


class JudgeConfig(EndpointConfig):
    """A model that judges answers, for 'judge' in reward.function or reward.functions."""

    kind: Literal["llm", "reward_model"] = "llm"
    """llm: a language model that is asked; reward_model: a sequence-classification model whose output is the score"""
    model: Data = ""
    """name of the model at the endpoint; reward_model without judge.url: folder or hub id of the model"""
    rubric: str = ""
    """what is judged, in words; the model gives a score from 1 to judge.scale"""
    rubric_file: FilePath = ""
    """file to read the rubric from"""
    scale: Annotated[int, Field(ge=2, le=100)] = 5
    """highest score; up to 9, the expected score is computed from token probabilities"""
    questions: list[str] = Field(default_factory=list)
    """yes/no questions instead of a rubric; the reward is the mean probability of yes"""
    template_file: FilePath = ""
    """file with the request to the judge, with {rubric} or {check}, {question}, {answer}, {gold}; empty: the default"""
    threshold: Finite = 0.5
    """an answer with at least this reward is counted as correct"""
    probabilities: bool = True
    """compute rewards from token probabilities; false, or where the endpoint has none: from the text"""
    max_tokens: Positive = 16
    """maximum tokens of the model's reply; more for a template that asks for reasoning before the score"""
    temperature: NonNegative = 0.0
    """sampling temperature of the judge"""
    cache: FilePath = "~/.cache/assay/judge"
    """folder in which replies are stored, so that the same request is never paid for twice; empty: no cache"""
    label: Count = 0
    """reward_model: index of the model's output that is the score"""
    label_values: list[float] = Field(default_factory=list)
    """reward_model with several labels: value of each label; the score is the expected value"""
    offset: Finite = 0.0
    """reward_model: subtracted from the score"""
    factor: Finite = 1.0
    """reward_model: the score minus judge.offset is multiplied by this"""
    sigmoid: bool = False
    """reward_model: map the result to 0 to 1"""
    api: Literal["classify", "pooling", "sglang"] = "classify"
    """reward_model with judge.url: classify of vLLM or assay serve, pooling of vLLM, or sglang: /classify of SGLang"""
    tokenizer: Data = ""
    """reward_model with judge.url: folder or hub id of its tokenizer, to send token ids; empty: send messages"""
    device: str = "auto"
    """reward_model without judge.url: device of its process: auto, cpu, cuda or cuda:N"""
    batch_tokens: Positive = 16384
    """reward_model without judge.url: maximum tokens of a batch, with padding"""


class ReplayConfig(Section):
    """Replay of groups of earlier steps. Needs a loss with an importance ratio, or algo.correction."""

    groups: Count = 0
    """number of replayed groups added to each step; 0: none"""
    capacity: Positive = 256
    """maximum number of groups in the buffer; the oldest are removed first"""
    max_staleness: Count = 0
    """drop groups that were sampled more than this many steps ago; 0: never"""
    with_replacement: bool = False
    """allow a group to be drawn several times in one step"""
    load: Data = ""
    """folder of a saved buffer to start from: written by ReplayBuffer.save, or replay/ of a checkpoint"""


class SourceConfig(Section):
    """Where the groups of a step come from. `source = "NAME"` is short for `source.name`."""

    short_form: ClassVar = "name"

    name: Literal["on_policy", "async"] = "on_policy"
    """on_policy: sample, then train; async: sample the groups of later steps while training"""
    max_staleness: Count = 1
    """async: largest age of a group in steps when it is trained; 0: as on_policy. Needs a loss with a ratio"""
    cancel_stale: bool = False
    """async: drop groups that take too long, instead of sampling them again; faster, but long answers become rarer"""


class CriticConfig(Section):
    """The critic (value model) that estimates advantages per token when algo.critic is on (PPO)."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: a network of the policy's size; shared: a value head on the policy's network"""
    coef: NonNegative = 0.5
    """shared: weight of the value loss relative to the policy loss"""
    lr: Above0 = 1e-5
    """learning rate of the critic (shared: of the value head), constant"""
    gamma: Fraction = 1.0
    """discount factor per token"""
    gae_lambda: Fraction = 1.0
    """GAE lambda; 1: returns minus values (unbiased, high variance); 0: one-step temporal differences"""
    clip: NonNegative = 0.5
    """PPO value clip range; 0: no clipping"""
    passes: Positive = 4
    """separate: optimizer steps per batch; shared: not used, the policy's steps train both"""
    bootstrap: bool = False
    """bootstrap truncated episodes with the value of their last state; false: treat truncation as termination"""
    normalise: bool = True
    """normalise the advantages of a batch to mean 0 and standard deviation 1"""
    max_grad_norm: Above0 = 1.0
    """maximum gradient norm of the critic"""


class OptimConfig(Section):
    """The optimizer and its schedule. `optim = "NAME"` is short for `optim.name`."""

    short_form: ClassVar = "name"

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum for the matrices of the layers, AdamW for everything else"""
    lr: Above0 = 1e-6
    """learning rate of all parameters without a learning rate of their own; the schedule scales all learning rates"""
    matrix_lr: Above0 | None = None
    """learning rate of weight matrices in the layers; required by muon, e.g. 0.001; empty: lr"""
    embedding_lr: Above0 | None = None
    """learning rate of the embedding and of a tied head; empty: lr"""
    head_lr: Above0 | None = None
    """learning rate of an untied head; empty: lr"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup: Count = 0
    """steps of linear warm-up"""
    min_lr_ratio: Fraction = 0.0
    """final learning rate of linear and cosine schedules, as a fraction of the peak"""
    lr_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """factor applied to all learning rates"""
    weight_decay: NonNegative = 0.0
    """decoupled; not applied to vectors (norms and biases)"""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """AdamW betas"""
    momentum: Below1 = 0.95
    """Muon momentum"""
    eps: Above0 = 1e-8
    """AdamW epsilon"""
    max_grad_norm: NonNegative = 1.0
    """maximum gradient norm; 0: no clipping"""
    precision: Literal["float32", "8bit", "bfloat16"] = "float32"
    """of weights, gradients and moments. float32: 16 bytes per parameter. 8bit: 8 bytes, with weights as exact as
    float32, gradients in bfloat16 and moments in 8 bits. bfloat16: 6 bytes; as 8bit, but weights are rounded to
    bfloat16 at random. 8bit and bfloat16 need adamw, dtype bfloat16 and one process"""
    offload: bool = False
    """keep the moments of optim.precision 8bit or bfloat16 in CPU memory: 2 bytes per parameter"""


class LoopConfig(Section):
    """The training loop."""

    alternatives = ("steps", "epochs", "budget")

    steps: Count = 100
    """number of training steps; each samples one batch of rollouts and trains on it"""
    epochs: NonNegative = 0.0
    """length of the run in passes over the train split, instead of train.steps; 0: use train.steps"""
    budget: Count = 0
    """length of run and schedule in sampled answers, including those of dropped groups; 0: use train.steps"""
    prompts: Positive = 16
    """prompts per step"""
    samples: Positive = 8
    """answers per prompt (group size)"""
    passes: Positive = 1
    """training passes over each batch of rollouts"""
    token_budget: Count = 0
    """maximum tokens per micro-batch; affects memory, not the result; 0: 16384, or fewer on a CPU with little memory"""
    activation_checkpointing: bool | Literal["partial", "offload"] = False
    """recompute activations in the backward pass. true: all but the inputs of layers, a third more time; offload: the
    same, with these inputs in CPU memory; partial: the cheaper half, 7 % more time; needs compiled layers"""
    compile: Literal["auto", "on", "off"] = "auto"
    """compile the layers with torch.compile; auto: on one GPU, for models of 100 million parameters or more"""
    offload_reference: bool = False
    """keep the reference model in CPU memory and move it to the GPU only while it computes log-probabilities"""
    deterministic: bool = False
    """the same weights, bit for bit, in every run with the same seed, also on a GPU. CPU runs have this anyway.
    What cannot be repeated is refused"""
    process: Literal["same", "separate"] = "same"
    """separate: run each update in its own process, which frees all of its GPU memory; takes seconds to start"""
    stop_early: Count = 0
    """stop if N evaluations in a row are not above the 95 % interval of the last one that was; 0: never"""
    max_train_prompts: Count = 0
    """use only the first N prompts of the train split; 0: all"""
    max_prompt_tokens: Count = 0
    """drop problems of the train split whose prompt has more tokens, and report their number; 0: drop none"""
    max_skipped: Count = 5
    """stop after this many consecutive steps with a non-finite loss or gradient; 0: never"""


class SftConfig(Section):
    """Supervised fine-tuning on worked solutions before reinforcement learning (warm start)."""

    steps: Count = 0
    """optimizer steps; 0: no warm start"""
    batch: Positive = 64
    """solutions per step"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """as in optim.name; muon needs fewer steps to train a model from scratch"""
    lr: Above0 = 1e-5
    """peak learning rate; decays linearly to 0"""
    matrix_lr: Above0 | None = None
    """peak learning rate of weight matrices in the layers; required by muon, e.g. 0.001; empty: lr"""
    warmup: Count = 10
    """steps of linear warm-up"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay, as in optim.weight_decay"""
    args: Args = Field(default_factory=dict)
    """task arguments that differ for the worked solutions, e.g. sft.args.noise = 0.3"""


BUILT_IN_ENGINES = ("auto", "native", "hf", "assay", "vllm", "sglang", "openai")


class SamplingConfig(Section):
    """How answers are sampled during training."""

    temperature: Above0 = 1.0
    """sampling temperature; 1: the policy's own distribution"""
    top_k: Count = 0
    """sample from the k most likely tokens; 0: off. Truncation makes importance ratios inexact"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the most likely tokens of this total probability; 1: off. Makes importance ratios inexact"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """exclude tokens less likely than this fraction of the most likely token; 0: off"""
    max_new_tokens: Positive = 256
    """maximum tokens per answer; for an episode, of all policy turns together"""
    min_new_tokens: Count = 0
    """end tokens are excluded until an answer has this many tokens"""
    stop: list[str] = Field(default_factory=list)
    """strings that end an answer, in addition to the model's end tokens"""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled, which changes the distribution of the policy."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.min_new_tokens)


class EvalConfig(Section):
    """How models are evaluated."""

    every: Count = 0
    """evaluate on eval.split every N steps; 0: only before and after training"""
    split: Split = "validation"
    """split for periodic evaluation and for choosing the best checkpoint"""
    final_split: Literal["train", "validation", "test", "all"] = "test"
    """split for the evaluations before and after training; all: every row of one file (as in assay eval --data)"""
    examples: Count = 200
    """number of problems of periodic evaluations; 0: all"""
    final_examples: Count = 0
    """number of problems of the evaluations before and after training; 0: all"""
    samples: Positive = 1
    """answers per problem"""
    temperature: NonNegative = 0.0
    """sampling temperature; 0: greedy"""
    top_k: Count = 0
    """as sampling.top_k"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """as sampling.top_p"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """as sampling.min_p"""
    max_new_tokens: Count = 0
    """maximum tokens per answer; 0: as in training (512 without a training run)"""
    stop: list[str] = Field(default_factory=list)
    """strings that end an answer; empty: as in training"""

    def split_of(self, label: str) -> str:
        """The split of an evaluation: `eval` during training; `start`, `before` and `after` around it."""
        return self.split if label == "eval" else self.final_split


class SaveConfig(Section):
    """Checkpoints and rollout files."""

    every: Count = 50
    """save a checkpoint every N steps; 0: only at the end"""
    keep: Count = 2
    """number of latest checkpoints to keep, in addition to the best one and the initial one; 0: keep all"""
    best: bool = True
    """also save when a periodic evaluation is the best so far; false: choose among the regular checkpoints"""
    rollouts: Annotated[int, Field(ge=-1)] = -1
    """number of latest steps whose rollout files are kept; -1: all, 0: none"""
    grace_s: NonNegative = 30.0
    """seconds to wait for the current step after Ctrl-C or SIGTERM before sampling or evaluation is interrupted"""


class LogConfig(Section):
    """Metric trackers in addition to the run directory."""

    wandb: Host = ""
    """Weights & Biases project, or ENTITY/PROJECT; empty: off"""
    trackio: str = ""
    """Trackio project; empty: off"""
    mlflow: Host = ""
    """MLflow tracking URI, e.g. http://localhost:5000 or sqlite:///mlflow.db; empty: off"""
    tensorboard: bool = False
    """write TensorBoard files into the run directory"""
    rollouts: Count = 0
    """rollouts of each step that the trackers get as a table: prompt, completion, answer, reward, status"""


class ParallelConfig(Section):
    """Distribution of a run over the processes that torchrun starts."""

    tp: Positive = 1
    """tensor-parallel size; the remaining processes are data parallel"""
    mode: Literal["auto", "ddp", "fsdp"] = "auto"
    """data parallelism. ddp: replicated weights; fsdp: sharded weights; auto: fsdp on GPUs from 1e9 parameters on"""
    heartbeat_timeout_s: NonNegative = 300.0
    """end the run if a process sends no heartbeat for this many seconds; 0: report it and keep waiting"""


def check_engine_name(name: str) -> str:
    if name not in BUILT_IN_ENGINES and ":" not in name.strip(":"):
        choices = ", ".join(f"'{engine}'" for engine in BUILT_IN_ENGINES)
        raise PydanticCustomError(
            "engine_name", "should be {choices} or your own as file.py:function", {"choices": choices}
        )
    return name


class EngineConfig(Section):
    """The generation engine. `engine = "NAME"` is short for `engine.name`."""

    short_form: ClassVar = "name"

    name: Annotated[Code, AfterValidator(check_engine_name)] = "auto"
    """auto: native for the families it has, hf for others; assay, vllm, sglang, openai: servers; own: file.py:name"""
    max_batch: Count = 0
    """maximum number of sequences decoded at once; 0: 1,024 on CUDA, 256 elsewhere"""
    kv_cache_gib: NonNegative = 0.0
    """GiB for the KV cache; 0: enough for max_batch sequences, at most 40 % (CUDA) or 25 % of the free memory"""
    sleep_while_training: bool = False
    """release the memory of the KV cache while the trainer works (CUDA); captured CUDA graphs stay valid"""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of running sequences when weights are updated: recompute it with the new weights, or keep it"""
    prefill_tokens: Count = 0
    """maximum prompt tokens per prefill batch; 0: 8,192 on CUDA, 1,024 elsewhere"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: the device's preferred dtype; float64: see the dtype of the run"""
    quantize: Literal["", "fp8", "fp8_head"] = ""
    """fp8: matrix products of the layers in 8 bits (Hopper, Ada); fp8_head: also of the output head; native only"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """auto: that of the engine; fp8: 8 bits, on the same GPUs, which rounds keys and values coarsely; native only"""
    verify: Literal["auto", "fingerprint", "probe", "off"] = "auto"
    """proof of weight sync: bit by bit, or scores of probe sequences; auto: the first that the engine supports"""
    verify_every: Positive = 1
    """verify every N-th weight sync"""


def check_trains(name: str) -> str:
    if name == "openai":
        needed = "should be an engine that loads the policy's weights and reports log-probabilities"
        raise PydanticCustomError("cannot_train", f"{needed} (an endpoint does neither: it is for assay eval and chat)")
    return name


class TrainingEngineConfig(EngineConfig):
    """The generation engine. `engine = "NAME"` is short for `engine.name`."""

    name: Annotated[Code, AfterValidator(check_engine_name), AfterValidator(check_trains)] = "auto"
    """auto: native for the families it has, hf for others; assay, vllm, sglang: servers; own: file.py:function"""


class ReferenceServerConfig(EndpointConfig):
    """A server that computes the log-probabilities of the reference model, instead of algo.reference."""

    server: Literal["assay", "vllm"] = "assay"
    """assay: `assay serve MODEL`; vllm: `vllm serve MODEL`, only with sampling.temperature = 1"""


class OpenAIConfig(EndpointConfig):
    """An OpenAI-compatible endpoint, for engine.name = "openai" in `assay eval` and `assay chat`."""

    api: Literal["chat", "completions"] = "chat"
    """chat: messages to /chat/completions; completions: plain text to /completions (prompt.style = "raw")"""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """name of the field with the token limit; reasoning models of OpenAI need max_completion_tokens"""
    seeds: bool = False
    """send a seed with every request; endpoints may ignore or reject it"""


class RemoteEngineConfig(Section):
    """Servers of an engine: running ones, or servers that the run starts."""

    urls: Annotated[list[str], Resource.HOST] = Field(default_factory=list)
    """running servers, e.g. ["http://127.0.0.1:8000"]; empty: start servers on this host and stop them at the end"""
    servers: Positive = 1
    """number of servers to start"""
    devices: list[str] = Field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of each server to start, e.g. ["1", "2,3"]; empty: the trainer's GPU"""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """port of the first server to start; the next ones follow; 0: any free port"""
    start_timeout_s: Above0 = 600.0
    """time limit in seconds for the start of a server"""
    api_key_env: Variable = ""
    """environment variable with the API key of the servers in urls"""
    timeout_s: NonNegative = 0.0
    """time limit in seconds for the whole answer to a request; 0: none"""
    health_timeout_s: NonNegative = 60.0
    """with several servers: one that is silent for this many seconds is not used until it answers again; 0: no limit"""
    recover_s: NonNegative = 300.0
    """if all servers fail: save and stop after this many seconds without any of them; 0: stop at once"""
    transport: Literal["auto", "folder", "ipc", "nccl"] = "auto"
    """how weights reach the servers. ipc: on the trainer's GPU; folder: files; auto: ipc if possible, else folder"""
    folder: FilePath = ""
    """folder for weights that trainer and servers share; empty: a temporary one on this host"""


class ServerConfig(RemoteEngineConfig):
    """`assay serve` processes, for engine.name = "assay"."""

    devices: list[str] = Field(default_factory=list)
    """device of each server to start, e.g. ["cuda:1", "cuda:2"]; empty: the trainer's device"""
    start_timeout_s: Above0 = 300.0
    """time limit in seconds for the start of a server"""
    timeout_s: NonNegative = 0.0
    """time limit in seconds for the whole answer to a request, or for each sample of a request; 0: none"""
    transport: Literal["auto", "folder", "ipc"] = "auto"
    """how weights reach the servers. ipc: on the trainer's GPU; folder: files; auto: ipc if possible, else folder"""


class InferenceServerConfig(RemoteEngineConfig):
    """Servers of another package, such as vLLM, which may have an environment of its own."""

    python: Annotated[str, Resource.PROGRAM] = ""
    """Python interpreter of an environment with the servers' package, to start servers; empty: the current one"""
    args: Annotated[list[str], Resource.PROGRAM] = Field(default_factory=list)
    """more arguments of the servers to start, e.g. ["--tensor-parallel-size", "2"]"""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.4
    """fraction of GPU memory of each server to start, for its weights and its KV cache"""
    nccl_host: Host = "127.0.0.1"
    """address of the trainer's host, as seen by the servers, for the transport nccl"""


class VLLMConfig(InferenceServerConfig):
    """vLLM servers, for engine.name = "vllm"."""

    model: str = ""
    """name of the policy on the servers in urls; empty: the first model that they list"""
    seeds: bool = True
    """send a seed with every sample; false: faster on GPUs, where vLLM draws the noise of seeded samples one by one"""
    sleep_level: Literal[1, 2] = 1
    """for engine.sleep_while_training. 1: move weights to CPU memory; 2: drop them, until the next weight update"""


class SGLangConfig(InferenceServerConfig):
    """SGLang servers, for engine.name = "sglang"."""

    api_key_env: Variable = ""
    """environment variable with the API key of the servers in urls (their --admin-api-key, if they have one)"""
    deterministic: bool = False
    """start servers with deterministic inference, in which seeds have an effect; slower"""
    keep_weights: bool = True
    """for engine.sleep_while_training: keep a copy in CPU memory; false: drop weights until the next weight update"""


CLUSTER_MEMBER = "ASSAY_RAY"  # environment variable of the processes of a run on a cluster, which describes it as JSON


class ClusterConfig(Section):
    """Processes of a run on the machines of a Ray cluster (extra: ray)."""

    kind: Literal["none", "ray"] = "none"
    """ray: Ray starts and places training processes and engine servers; none: this process, torchrun or Slurm"""
    address: Host = ""
    """a running cluster as host:port; auto: that of RAY_ADDRESS or of this machine; empty: a Ray of this run alone"""
    learners: Positive = 1
    """training processes, which share each batch"""
    cpus_per_learner: Above0 = 1.0
    """cores of each training process"""
    gpus_per_learner: Annotated[int, Field(ge=-1, le=1)] = -1
    """GPUs of each training process, 0 or 1; -1: 1 if the cluster has GPUs"""
    engines: Count = 0
    """engine servers, for the engines assay, vllm and sglang; changes in the run's config.toml apply while it runs"""
    cpus_per_engine: Above0 = 1.0
    """cores of each engine server"""
    gpus_per_engine: Annotated[int, Field(ge=-1)] = -1
    """GPUs of each engine server; -1: 1 if the cluster has GPUs"""
    place: Literal["apart", "colocated"] = "apart"
    """colocated: server k uses the GPUs of training process k, as engine.sleep_while_training needs"""
    spread: bool = False
    """place processes on as many nodes as possible, instead of as few as possible"""
    restarts: Count = 3
    """how often training processes are started again from the last checkpoint after one of them has died"""
    start_timeout_s: Above0 = 300.0
    """time limit in seconds until the cluster has the resources"""


class CommandConfig(Section):
    """Settings of all commands that load a model."""

    runs_dir: str = "runs"
    """folder that holds the runs"""
    device: str = "auto"
    """cuda, cuda:N, mps, cpu, or auto: the first of cuda, mps and cpu that is available"""
    threads: Count = 0
    """CPU threads; 0: OMP_NUM_THREADS or, on a CPU, one per 5 million parameters, at most the number of cores"""
    model: ModelConfig = Field(default_factory=ModelConfig)
    prompt: PromptConfig = Field(default_factory=PromptConfig)


class ProblemsConfig(CommandConfig):
    """Settings of commands that sample and judge answers to problems."""

    seed: Seed = 0
    """seed of sampling"""
    task: TaskConfig = Field(default_factory=TaskConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    vllm: VLLMConfig = Field(default_factory=VLLMConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)


class TrainConfig(ProblemsConfig):
    """A training run."""

    name: str = ""
    """name of the run; empty: the name of the config file"""
    seed: Seed = 0
    """seed of data order, sampling and new weights"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """dtype of computation in training; master weights are float32. float64 applies to both; slow, for comparisons"""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    reference: ReferenceServerConfig = Field(default_factory=ReferenceServerConfig)
    source: SourceConfig = Field(default_factory=SourceConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: LoopConfig = Field(default_factory=LoopConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    engine: TrainingEngineConfig = Field(default_factory=TrainingEngineConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)


class MeasureConfig(ProblemsConfig):
    """Settings of an evaluation: the sections of a training run that apply to it."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    openai: OpenAIConfig = Field(default_factory=OpenAIConfig)


class HttpConfig(Section):
    """The HTTP server of `assay serve`."""

    host: Host = "127.0.0.1"
    """address to listen on; other addresses than those of this machine need http.api_key_env"""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """port to listen on; 0: any free one, which is printed"""
    api_key_env: Variable = ""
    """environment variable with the API key that clients must send; empty: no key"""
    name: str = ""
    """name of the model in requests; empty: the model as given on the command line"""
    allow_updates: bool = False
    """enable the endpoints with which a trainer replaces the weights (engine.name = "assay")"""
    frontends: Annotated[int, Field(ge=-1)] = -1
    """processes that handle HTTP beside the engine's process; 0: none; -1: up to 4 with CUDA, otherwise none"""
    queue: Count = 2048
    """answers that may wait in addition to engine.max_batch running ones; more are rejected with status 429"""
    max_samples: Positive = 128
    """maximum number of answers per request: prompts times n"""
    max_prompt_tokens: Count = 0
    """maximum number of tokens per prompt; 0: what the model's context allows"""
    max_body_mb: Above0 = 4.0
    """maximum size of a request in MiB"""
    body_timeout_s: Above0 = 30.0
    """seconds within which the body of a request must arrive"""
    drain_s: Positive = 30
    """seconds to finish running requests after Ctrl-C or SIGTERM"""


class ServeConfig(CommandConfig):
    """Settings of `assay serve`: the sections of an evaluation that apply to it, and the HTTP server."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
