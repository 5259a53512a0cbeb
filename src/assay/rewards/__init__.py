"""How answers are judged: strings in, verdicts out."""

from assay.rewards.countdown import CountdownJudge
from assay.rewards.equality import equal
from assay.rewards.extract import EXTRACTORS, Extraction, extract
from assay.rewards.function import FunctionJudge
from assay.rewards.importing import load_object
from assay.rewards.judge import Judge, check_verdicts
from assay.rewards.limits import Unreadable
from assay.rewards.math_answer import MathJudge, MathVerifyJudge
from assay.rewards.pool import JudgePool
from assay.rewards.shaping import RewardMix

__all__ = [
    "EXTRACTORS",
    "CountdownJudge",
    "Extraction",
    "FunctionJudge",
    "Judge",
    "JudgePool",
    "MathJudge",
    "MathVerifyJudge",
    "RewardMix",
    "Unreadable",
    "check_verdicts",
    "equal",
    "extract",
    "load_object",
]
