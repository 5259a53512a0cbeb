"""Work by parts that fit into memory: where they do not, once more by smaller ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from assay.mesh import Mesh
from assay.models import PolicyModel
from assay.train.pack import Row
from assay.train.parallel import in_lockstep
from assay.types import UserError

Result = TypeVar("Result")


class Budgeted(Protocol):
    token_budget: int  # of a micro-batch; halved, for good, whenever one does not fit
    mesh: Mesh


def fitted(owner: Budgeted, model: PolicyModel, rows: Sequence[Row], work: Callable[[], Result]) -> Result:
    """What `work` gives, which goes through the rows by micro-batches of the owner's budget and may be begun anew.

    Where memory does not suffice, on this rank or another, all of them go on with a smaller budget.
    """
    while True:
        failure = None
        try:
            result = work()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if in_lockstep(model, owner.mesh):  # the others wait in the middle of a pass: there is no way back
                raise UserError(
                    f"rank {owner.mesh.rank} ran out of memory: lower train.token_budget, now {owner.token_budget}, "
                    "or spread the model over more devices"
                ) from error
            failure = error.with_traceback(None)  # its frames would hold on to what did not fit
        if not owner.mesh.any(failure is not None):
            return result
        shrink(owner, rows, failure)


def shrink(owner: Budgeted, rows: Sequence[Row], failure: BaseException | None) -> None:
    """Halve the budget, unless a single sequence is already all there is in a micro-batch."""
    longest = max(len(row.ids) for row in rows)
    if owner.token_budget <= longest:
        where = "out of memory" if failure else "another rank ran out of memory"
        raise UserError(
            f"{where} with a single sequence, of up to {longest} tokens: set train.recompute = true or "
            "engine.lend = true, lower engine.memory, or ask for shorter answers (sampling.max_new_tokens)"
        ) from failure
    owner.token_budget = max(min(owner.token_budget, sum(len(row.ids) for row in rows)) // 2, longest)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warnings.warn(f"out of memory: going on with train.token_budget = {owner.token_budget}", stacklevel=2)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
