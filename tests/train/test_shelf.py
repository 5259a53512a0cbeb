"""Tensors that two processes see."""

from __future__ import annotations

import os

import torch

from assay.train.learner.subprocess_updater import ALIGNMENT, SharedTensors

TENSORS = {
    "matrix": torch.arange(15, dtype=torch.float32).view(3, 5).T,  # not contiguous
    "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "double": torch.tensor([[1 / 3]], dtype=torch.float64),
}


def test_what_is_placed_lies_there_as_it_was() -> None:
    shelf = SharedTensors()
    for placed in (shelf.store(TENSORS), shelf.tensors()):
        assert placed.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            found = placed[name]
            assert found.equal(tensor) and found.dtype == tensor.dtype and found.data_ptr() % ALIGNMENT == 0


def test_a_shelf_grows_and_what_was_there_stays_in_its_place() -> None:
    shelf = SharedTensors()
    first = shelf.store({"a": torch.ones(3)})["a"]
    offset = shelf.slots["a"].offset
    shelf.store({"b": torch.full((5000,), 2.0)})
    assert shelf.slots["a"].offset == offset and shelf.tensors()["a"].equal(torch.ones(3))
    first.fill_(4.0)  # an earlier view is a view still
    assert shelf.tensors()["a"].equal(torch.full((3,), 4.0)) and bool((shelf.tensors()["b"] == 2.0).all())
    shelf.store({"a": torch.zeros(3)})
    assert first.equal(torch.zeros(3))


def test_who_is_handed_the_file_sees_and_changes_the_same_memory() -> None:
    shelf = SharedTensors()
    mine = shelf.store({"a": torch.arange(1000.0)})["a"]
    other = SharedTensors(os.dup(shelf.file.fileno()), shelf.slots)  # what a process has that the file was handed to
    other.tensors()["a"].mul_(2)
    placed = other.store({"b": torch.ones(3)})["b"]
    assert mine.equal(2 * torch.arange(1000.0)) and shelf.tensors().keys() == {"a"}
    shelf.slots = other.slots
    assert shelf.tensors()["b"].equal(placed) and shelf.tensors()["b"].data_ptr() != placed.data_ptr()


def test_a_parameter_can_live_on_a_shelf() -> None:
    shelf = SharedTensors()
    layer = torch.nn.Linear(4, 2)
    before = layer.weight.detach().clone()
    layer.weight.data = shelf.store({"w": layer.weight})["w"]
    layer(torch.ones(4)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert shelf.tensors()["w"].equal(before - 1.0)
