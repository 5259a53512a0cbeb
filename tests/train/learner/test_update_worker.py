"""The worker of `SubprocessUpdater`, called in this process: what it loads and what it reports."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from train_parts import tiny_decoder

from assay.algos import make_algorithm
from assay.train.learner.optim import make_adamw
from assay.train.learner.subprocess_updater import WEIGHTS, SubprocessUpdater
from assay.train.learner.update import Updater
from assay.train.learner.update_worker import NameUnpickler, UpdateWorker
from assay.types import UserError


@pytest.fixture
def begin_arguments() -> tuple[Any, ...]:
    policy = tiny_decoder()
    updater = SubprocessUpdater.of(Updater(policy, make_adamw(policy, 1e-2)))
    content = updater._pickled(make_algorithm("grpo"), None)
    files = {name: (os.dup(shared.file.fileno()), shared.slots) for name, shared in updater.shared.items()}
    return content, files, torch.device("cpu"), torch.get_num_threads()


def test_begin_copies_weights_and_keeps_tied_ones_tied(begin_arguments: tuple[Any, ...]) -> None:
    worker = UpdateWorker()
    worker.begin(*begin_arguments)
    policy = worker.updater.policy
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    for name, weight in tiny_decoder().named_parameters():
        loaded = dict(policy.named_parameters())[name]
        assert loaded.equal(weight) and loaded.requires_grad
        assert loaded.data_ptr() != worker.shared[WEIGHTS].tensors()[name].data_ptr()


def test_end_writes_changed_weights_back(begin_arguments: tuple[Any, ...]) -> None:
    worker = UpdateWorker()
    worker.begin(*begin_arguments)
    with torch.no_grad():
        worker.updater.policy.model.norm.weight.fill_(7.0)
    assert worker.end() == {}  # no step was made: there is no optimizer state
    assert bool((worker.shared[WEIGHTS].tensors()["model.norm.weight"] == 7.0).all())


def test_weights_that_do_not_fit_on_the_device_are_reported(
    begin_arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: NameUnpickler, key: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NameUnpickler, "persistent_load", out_of_memory)
    with pytest.raises(UserError, match=r"do not fit.*sleep_while_training"):
        UpdateWorker().begin(*begin_arguments)
