"""The ranks of a run that use the same servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from assay.engine.native.tensor_parallel import NO_TIMEOUT, new_cpu_group
from assay.mesh import waiting
from assay.types import UserError

T = TypeVar("T")


class Ranks:
    """The ranks that use the same servers: all of them, and the tensor-parallel `group` of this one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if several else None
        self.group = new_cpu_group(group) if several and group is not None and group.size() > 1 else None
        self.leads = self.group is None or self.group.rank() == 0
        self.is_main = not several or dist.get_rank() == 0

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank of the tensor-parallel group; all its ranks get the result or `UserError`."""
        return self._shared(work, self.leads, self.group)

    def on_main(self, work: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Call `work` on the main rank and `meanwhile` on all others; all get the result or `UserError`."""
        if not self.is_main:
            meanwhile()
        return self._shared(work, self.is_main, self.world)

    def union_of_leaders(self, values: Iterable[str]) -> set[str]:
        """The values of the first ranks of all groups, on all ranks."""
        own = set(values) if self.leads else set()
        if self.world is None:
            return own
        sets: list[Any] = [None] * self.world.size()
        with waiting():
            dist.all_gather_object(sets, own, group=self.world)
        return set().union(*sets)

    def barrier(self) -> None:
        if self.world is not None:
            self.on_leaders(lambda: None)

    def on_leaders(self, work: Callable[[], None]) -> None:
        """Call `work` on the first rank of every group. A `UserError` is raised on all ranks."""
        error: UserError | None = None
        if self.leads:
            try:
                work()
            except UserError as raised:
                error = raised
        errors: list[Any] = [error]
        if self.world is not None:
            errors = [None] * self.world.size()
            with waiting():
                dist.all_gather_object(errors, error, group=self.world)
        if first := next((one for one in errors if one is not None), None):
            raise first

    def _shared(self, work: Callable[[], T], here: bool, group: dist.ProcessGroup | None) -> T:
        if group is None:
            return work()
        outcome: list[Any] = [None, None]
        if here:
            try:
                outcome[0] = work()
            except UserError as error:
                outcome[1] = error
        with waiting():
            dist.broadcast_object_list(outcome, group=group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
