"""What a step makes of those before it, besides the weights: which prompts to try, how much entropy to ask for.

All of it is kept in the state, so that a run that is resumed goes on with what it knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from assay.algos import Algorithm
from assay.algos.entropy import EntropyControl
from assay.algos.filters import with_results, within_reach
from assay.train.checkpoint import State
from assay.train.data import PromptStream
from assay.types import Group, Prompt


def draw(stream: PromptStream, count: int, algo: Algorithm, state: State) -> list[Prompt]:
    """The next prompts, without those known to be too easy or too hard; after a whole pass of such, whatever comes."""
    if not algo.chooses_prompts:
        return stream.next(count)
    found: list[Prompt] = []
    passed_over = 0
    while len(found) < count:
        (prompt,) = stream.next(1)
        bounds = algo.pass_rate_low, algo.pass_rate_high, algo.pass_rate_retry
        if passed_over >= len(stream.prompts) or within_reach(state.pass_rates, prompt.id, state.step, *bounds):
            found.append(prompt)
        else:
            passed_over += 1
    return found


def adapted(algo: Algorithm, state: State) -> Algorithm:
    """The algorithm as it is in this step: its entropy bonus may follow a target."""
    if algo.entropy_target is None or state.entropy_control is None:
        return algo
    return replace(algo, entropy_coef=EntropyControl(**state.entropy_control).applied(algo.entropy_target))


def remember(algo: Algorithm, state: State, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
    """Put into the state what later steps have to know of this one; gives what is to be logged of that."""
    found: dict[str, float] = {}
    if algo.chooses_prompts:
        state.pass_rates = with_results(state.pass_rates, groups, state.step)
        rates = [rate for rate, _ in state.pass_rates.values()]
        found["prompts/known"] = float(len(rates))
        found["prompts/within_reach"] = sum(algo.pass_rate_low <= r <= algo.pass_rate_high for r in rates) / len(rates)
    if algo.entropy_target is not None and "policy/entropy" in metrics:
        control = EntropyControl(**(state.entropy_control or {"coef": algo.entropy_coef}))
        found["policy/entropy_coef"] = control.applied(algo.entropy_target)
        control = control.after(metrics["policy/entropy"], algo.entropy_target, algo.entropy_delta)
        state.entropy_control = asdict(control)
    return found
