"""A Ray cluster of this machine for tests that run in a connected process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
KEY, SECRET = "ASSAY_TEST_JUDGE_KEY", "secret-9c1f55d0"


class Nodes:
    """A cluster with two nodes that have CPUs. Each has its number in the variable PLACE."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.added = 0
        self.two = [self.add(), self.add()]

    def add(self, **variables: str) -> Any:
        self.added += 1
        variables = variables or {KEY: SECRET}
        return self.cluster.add_node(num_cpus=1, env_vars={"PLACE": str(self.added), **variables})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = nodes.cluster.address
    yield nodes
    import ray

    ray.shutdown()
    nodes.cluster.shutdown()
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
