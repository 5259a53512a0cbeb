"""Judging completions: answer extraction, equality, judges, and a pool of judge processes."""

from assay.rewards.code import CodeJudge
from assay.rewards.functions import FunctionJudge, load_object
from assay.rewards.judge import Judge, RewardMix, check_verdicts
from assay.rewards.numeric import Unreadable
from assay.rewards.pool import JudgePanel, JudgePool, Judging
from assay.rewards.verifiers import EXTRACTORS, CountdownJudge, MathJudge, MathVerifyJudge, extract

__all__ = [
    "EXTRACTORS",
    "CodeJudge",
    "CountdownJudge",
    "FunctionJudge",
    "Judge",
    "JudgePanel",
    "JudgePool",
    "Judging",
    "MathJudge",
    "MathVerifyJudge",
    "RewardMix",
    "Unreadable",
    "check_verdicts",
    "extract",
    "load_object",
]
