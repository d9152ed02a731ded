"""Batches whose tensors lie within mappings and lists, beside the same tensors by name."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.runtime.model.batches import batch_tensors, on_device

Pair = namedtuple("Pair", ("masks", "scale"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Flat(nn.Module):
    """Takes each tensor by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, labels: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * mask
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Nested(Flat):
    """Takes them as mappings and lists hold them."""

    def forward(self, labels: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(labels, inputs["input_ids"], inputs["extra"].masks[0])


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_within_a_batch_count_as_those_by_name(device: str, kind: Callable[[Any], Any]) -> None:
    labels, ids, mask = torch.randint(0, 32, (2, 6)), torch.randint(0, 32, (2, 6)), torch.ones(2, 6, 1)
    flat = trace(Flat().to(device), {"labels": labels, "input_ids": ids, "mask": mask}, repeats=0)
    batch = {"labels": labels, "inputs": kind({"input_ids": ids, "extra": Pair([mask], 3)})}
    nested = trace(Nested().to(device), batch, repeats=0)
    assert nested.batch_shapes == {"labels": (2, 6), "inputs.input_ids": (2, 6), "inputs.extra.0.0": (2, 6, 1)}
    for name in ("num_samples", "num_tokens", "resident_bytes", "profiles", "epilogue_forward", "prologue_backward"):
        assert getattr(nested, name) == getattr(flat, name), name


def test_a_moved_batch_has_the_form_that_it_had() -> None:
    batch = {"inputs": UserDict(ids=torch.zeros(1), pair=Pair((torch.ones(2), "word"), None)), "text": ["a"]}
    moved: Any = on_device(batch, torch.device("meta"))
    assert [tensor.device.type for tensor in batch_tensors(moved).values()] == ["meta", "meta"]
    assert [tensor.device.type for tensor in batch_tensors(batch).values()] == ["cpu", "cpu"]
    assert type(moved["inputs"]) is UserDict
    assert type(moved["inputs"]["pair"]) is Pair
    assert (moved["inputs"]["pair"].masks[1], moved["text"]) == ("word", ["a"])
