"""assay: teach language models to reason by reinforcement learning with verifiable rewards.

    run = assay.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=reward, recipe="grpo", steps=50)

Names are imported when they are used: `import assay` is fast, and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from assay.algos import LossTerm as LossTerm
    from assay.api.evaluation import Evaluation as Evaluation
    from assay.api.evaluation import Evaluations as Evaluations
    from assay.api.evaluation import evaluate as evaluate
    from assay.api.evaluation import score as score
    from assay.api.inspection import Comparison as Comparison
    from assay.api.inspection import Findings as Findings
    from assay.api.inspection import compare as compare
    from assay.api.inspection import doctor as doctor
    from assay.api.models import Generation as Generation
    from assay.api.models import LoadedModel as LoadedModel
    from assay.api.models import ModelServer as ModelServer
    from assay.api.models import generate as generate
    from assay.api.models import load as load
    from assay.api.models import serve as serve
    from assay.api.session import Policy as Policy
    from assay.api.session import Session as Session
    from assay.api.session import Trainer as Trainer
    from assay.api.session import session as session
    from assay.api.training import SavedRun as SavedRun
    from assay.api.training import load_run as load_run
    from assay.api.training import sft as sft
    from assay.api.training import train as train
    from assay.config.sections import LoraConfig as LoraConfig
    from assay.envs import Env as Env
    from assay.rewards import Judge as Judge
    from assay.runs.trackers import Callback as Callback
    from assay.tasks import Task as Task
    from assay.training.sources import ReplayBuffer as ReplayBuffer
    from assay.types import Group as Group
    from assay.types import Prompt as Prompt
    from assay.types import Rollout as Rollout
    from assay.types import Status as Status
    from assay.types import UserError as UserError
    from assay.types import Verdict as Verdict

_MODULES = {  # of the exported names
    "assay.algos": ("LossTerm",),
    "assay.api.evaluation": ("Evaluation", "Evaluations", "evaluate", "score"),
    "assay.api.inspection": ("Comparison", "Findings", "compare", "doctor"),
    "assay.api.models": ("Generation", "LoadedModel", "ModelServer", "generate", "load", "serve"),
    "assay.api.session": ("Policy", "Session", "Trainer", "session"),
    "assay.api.training": ("SavedRun", "load_run", "sft", "train"),
    "assay.config.sections": ("LoraConfig",),
    "assay.envs": ("Env",),
    "assay.rewards": ("Judge",),
    "assay.tasks": ("Task",),
    "assay.runs.trackers": ("Callback",),
    "assay.training.sources": ("ReplayBuffer",),
    "assay.types": ("Group", "Prompt", "Rollout", "Status", "UserError", "Verdict"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'assay' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
