"""A plan's forward and backward are, operation for operation, those of the plain loop, on tensors laid out alike.

Kernels choose the order of their additions by the shapes, strides and alignment of what they are given.  Equal losses
on one processor are therefore no proof for another one; equal operations on tensors laid out alike are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protwin.runtime import carry_out
from protwin.shared.layout import layout
from protwin.shared.schema.plan import Plan
from protwin.shared.verify import steps
from tests.proof_size import some_quick
from tests.runtime.families import family_cases
from tests.runtime.models import SEED, Case, adamw, cases, uncached

ALIGNMENT_BYTES = 64
"""Of every tensor that torch's CPU allocator gives, and as much as any kernel of a CPU asks for."""
LAYOUT_ONLY = ("aten.detach.", "aten.alias.", "aten.empty", "aten.lift_fresh.")
"""Operations that compute nothing."""

CHUNK_BYTES = 8_000

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


class Operations(TorchDispatchMode):
    """Lists what runs on this thread, with the layout of every tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Layout]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not function.is_view and not str(function).startswith(LAYOUT_ONLY):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.found.append((str(function), [layout_of(tensor) for tensor in given]))
        return function(*args, **(kwargs or {}))


def layout_of(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT_BYTES


def of_first_step(case: Case, model: nn.Module, operations: Operations) -> list[tuple[str, list[Layout]]]:
    """What forward and backward run."""
    torch.manual_seed(SEED)
    operations.found.clear()
    case.loss(model, case.batches[0]).backward()
    return list(operations.found)


def plainly(case: Case, model: nn.Module) -> list[tuple[str, list[Layout]]]:
    with Operations() as operations:
        return of_first_step(case, model, operations)


def by_a_plan(case: Case) -> list[tuple[str, list[Layout]]]:
    """Every chunk that a block owns is offloaded, nothing is recomputed."""
    model, workload = case.build(), case.workload
    found = layout.build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    n_buffer = found.min_buffers(0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=CHUNK_BYTES, n_persist=0, n_buffer=n_buffer)
    with Operations() as operations, carry_out(model, plan, workload, optimizer=adamw) as training:
        ran = of_first_step(case, model, operations)
        training.step()
        assert training.num_gathers >= workload.num_blocks
    return ran


def chosen() -> dict[str, Case]:
    """An encoder and a decoder, images, experts, dropout, narrow parameters, a model without transformers."""
    others = ["gpt2 with dropout, tied", "llama in bfloat16", "hand-written, batch statistics"]
    return {name: family_cases(2)[name] for name in ("t5", "vit", "mixtral")} | {name: cases()[name] for name in others}


@some_quick("name", chosen(), quick=2)
def test_a_plan_runs_the_operations_of_the_plain_loop(name: str) -> None:
    """The model that the plan trains has its caches on, as transformers builds it."""
    case = chosen()[name]
    ran = by_a_plan(case)
    assert len(ran) > 50
    assert ran == plainly(case, uncached(case.build()))


@pytest.mark.parametrize("name", ["t5", "gpt2 with dropout, tied"])
def test_a_plain_loop_with_caches_runs_other_operations(name: str) -> None:
    """Why it is no oracle: its batched products are given transposed keys, the plan's are given copies of them."""
    case = chosen()[name]
    ran, expected = plainly(case, case.build()), by_a_plan(case)
    products = [[given for name, given in found if name == "aten.bmm.default"] for found in (ran, expected)]
    shapes = [[[shape for shape, *_ in given] for given in of_loop] for of_loop in products]
    assert shapes[0] == shapes[1] != []
    assert products[0] != products[1]


def test_parameters_closer_than_an_allocator_puts_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = chosen()["hand-written, batch statistics"]
    monkeypatch.setattr(layout, "ALIGNMENT_BYTES", 4)
    monkeypatch.setattr(steps, "_ALIGNMENT_BYTES", 4)  # the verifier's own
    ran, expected = by_a_plan(case), plainly(case, uncached(case.build()))
    assert [name for name, _ in ran] == [name for name, _ in expected]
    assert ran != expected
