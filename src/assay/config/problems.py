"""What is solved, by which model, and how answers are asked for and judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from assay.config.kinds import Above0, Count, Finite, NonNegative, Positive, Section


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
