"""Bytes and operations of blocks that are counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from protwin.runtime import trace
from protwin.runtime.tracing.facts import TRACED_MODES
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import OuterSection, Section, TaskKind
from protwin.shared.schema.workload import BlockId, DType, Operation, OperationClass, Phase, Workload
from tests.runtime.models import cases

# -- left as found ---------------------------------------------------------------------------------------------------


class LinearBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class LinearStack(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.entry = nn.Linear(3, width, bias=False)
        self.blocks = nn.ModuleList(LinearBlock(width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


ROWS, WIDTH = 5, 16
HIDDEN = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4
LOSS = 4 + 4
"""A scalar, and the one that its backward starts from."""


@pytest.fixture(scope="module")
def linear() -> Workload:
    return trace(LinearStack(WIDTH, 3), torch.ones(ROWS, 3), repeats=0)


def all_in(workload: Workload, mode: ActivationMode) -> dict[tuple[TaskKind, Section | None], Phase]:
    """Every phase of an iteration whose blocks are all in ``mode``."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2**20)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**20,
        n_persist=len(layout.chunks),
        n_buffer=0,
        n_checkpoint=workload.num_blocks if mode is ActivationMode.CHECKPOINT else 0,
    )
    tasks = compile_schedule(plan, workload).tasks
    return {(task.kind, task.section): task.phase for task in tasks if task.phase is not None}


def test_bytes_of_a_linear_block(linear: Workload) -> None:
    """Its matrix product is dropped once relu has made the output, which relu's backward keeps.

    The middle block's input is the output of the block before, kept by that block and by this one's product.
    """
    profile = linear.profile_of(1)
    assert profile.output_bytes == HIDDEN
    assert profile.forward.net_bytes == HIDDEN
    assert profile.forward.peak_bytes == 2 * HIDDEN
    assert profile.checkpoint_forward.net_bytes == HIDDEN
    assert profile.checkpoint_forward.peak_bytes == 2 * HIDDEN
    assert profile.recompute.net_bytes == HIDDEN  # the output again; the first one went when its gradient came
    assert profile.recompute.peak_bytes == 2 * HIDDEN


def test_bytes_of_a_linear_blocks_backward(linear: Workload) -> None:
    """There when it begins: input, output, and the output's gradient.  When it ends: input, its gradient, the weight's.

    Relu's backward makes a gradient beside the one that it is given, which goes, and the output with it; then come
    those of weight and input.  The first block's input goes too: nobody but this block kept it.
    """
    keep = all_in(linear, ActivationMode.KEEP)
    assert keep[TaskKind.BACKWARD, BlockId(1)].net_bytes == WEIGHT + HIDDEN - 2 * HIDDEN
    assert keep[TaskKind.BACKWARD, BlockId(1)].peak_bytes == WEIGHT
    assert keep[TaskKind.BACKWARD, BlockId(0)].net_bytes == WEIGHT + HIDDEN - 3 * HIDDEN


def test_bytes_outside_the_blocks(linear: Workload) -> None:
    losses_bytes = 4 * 4  # that a loop may hold
    assert linear.resident_bytes == ROWS * 3 * 4 + losses_bytes
    assert linear.prologue_forward.net_bytes == HIDDEN
    assert all_in(linear, ActivationMode.KEEP)[TaskKind.FORWARD, OuterSection.EPILOGUE].net_bytes == LOSS
    assert linear.num_samples == ROWS
    assert [parameter.size_bytes for parameter in linear.parameters] == [WIDTH * 3 * 4, WEIGHT, WEIGHT, WEIGHT]
    assert [parameter.block for parameter in linear.parameters] == [None, 0, 1, 2]


def test_the_whole_iteration_adds_up(linear: Workload) -> None:
    """At the end of backward nothing is left but the gradients and the loss, with its own gradient."""
    gradients = 3 * WEIGHT + WIDTH * 3 * 4
    kept, again = (sum(phase.net_bytes for phase in all_in(linear, mode).values()) for mode in TRACED_MODES)
    # A checkpointed last block does not keep its output.  The phase outside takes it to be kept; backward frees it.
    assert kept == again == gradients + LOSS


def test_every_curve_ends_at_its_net_bytes_or_above(linear: Workload) -> None:
    for workload in (linear, *(cases()[name].workload for name in ("llama", "gpt2 with dropout, tied"))):
        for profile in workload.profiles:
            for phase in profile.phases:
                assert phase.curve[-1][1] >= phase.net_bytes
                assert phase.peak_bytes == max(0, phase.net_bytes, *(level for _, level in phase.curve))


# -- operations by hand ----------------------------------------------------------------------------------------------


def operation(phase: Phase, name: str) -> Operation:
    return next(op for op in phase.operations if op.name == name)


def test_operations_of_a_linear_block(linear: Workload) -> None:
    profile = linear.profile_of(1)
    product = operation(profile.forward, "mm")
    assert product.operation_class is OperationClass.MATMUL
    assert product.dtype is DType.FLOAT32
    assert (product.flops, product.count) == (2 * ROWS * WIDTH * WIDTH, 1)
    assert product.bytes_moved == HIDDEN + WEIGHT + HIDDEN
    relu = operation(profile.forward, "relu")
    assert (relu.flops, relu.bytes_moved) == (ROWS * WIDTH, 2 * HIDDEN)
    assert [op.name for op in profile.forward.operations] == ["mm", "relu"]
    assert profile.recompute.operations == profile.checkpoint_forward.operations == profile.forward.operations
    products = {op.shape: op.flops * op.count for op in profile.backward.operations if op.name == "mm"}
    flops = 2 * ROWS * WIDTH * WIDTH
    assert products == {(1, WIDTH, WIDTH, ROWS): flops, (1, ROWS, WIDTH, WIDTH): flops}
    assert profile.backward.flops == 2 * flops + ROWS * WIDTH


class AttentionBlock(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8, bias=False)
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.scale(x).view(2, 6, 2, 4).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=self.is_causal)
        return mixed.transpose(1, 2).reshape(2, 6, 8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_of_attention(is_causal: bool) -> None:
    """Two products forward, five backward, of 2 * rows * columns * width per batch and head; half of them if causal."""
    model = nn.Sequential(AttentionBlock(is_causal), AttentionBlock(is_causal))
    workload = trace(model, torch.ones(2, 6, 8), loss=lambda output, _: output.sum(), repeats=0)
    one_product = 2 * (2 * 2) * 6 * 6 * 4
    halves = 2 if is_causal else 1
    profile = workload.profile_of(1)
    forward = [op for op in profile.forward.operations if op.operation_class is OperationClass.ATTENTION]
    backward = [op for op in profile.backward.operations if op.operation_class is OperationClass.ATTENTION]
    assert [op.flops for op in forward] == [2 * one_product // halves]
    assert [op.flops for op in backward] == [5 * one_product // halves]


@pytest.mark.parametrize(
    ("compute", "flops"),
    [
        (lambda: torch.addmm(torch.ones(3), torch.ones(5, 4), torch.ones(4, 3)), 2 * 5 * 4 * 3),
        (lambda: torch.bmm(torch.ones(2, 5, 4), torch.ones(2, 4, 3)), 2 * 2 * 5 * 4 * 3),
        (lambda: torch.baddbmm(torch.ones(2, 5, 3), torch.ones(2, 5, 4), torch.ones(2, 4, 3)), 2 * 2 * 5 * 4 * 3),
        (lambda: functional.conv2d(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)), 2 * 2 * 4 * 3 * 9 * 36),
        (lambda: torch.nn.functional.layer_norm(torch.ones(5, 4), (4,)), 20),
        (lambda: torch.embedding(torch.ones(100, 4), torch.tensor([1, 2, 3])), 12),
        (lambda: torch._grouped_mm(torch.ones(8, 4), torch.ones(2, 4, 8), offs=torch.tensor([4, 8]).int()), 512),
        (lambda: torch._grouped_mm(torch.ones(8, 8), torch.ones(8, 4), offs=torch.tensor([4, 8]).int()), 512),
    ],
)
def test_operations_alone(compute: Callable[[], torch.Tensor], flops: int) -> None:
    assert max(op.flops for op in observed(compute)) == flops


def test_views_and_allocations_move_nothing() -> None:
    assert observed(lambda: torch.empty(5).view(5, 1).expand(5, 3).t()[1:].detach()) == []


def test_bytes_of_lookups_and_expanded_tensors() -> None:
    table, places = torch.ones(1000, 4), torch.tensor([1, 2, 3])
    (lookup,) = observed(lambda: torch.embedding(table, places))
    assert lookup.bytes_moved == 3 * 16 + 3 * 16 + 3 * 8  # rows read, rows written, places read
    thin = torch.ones(1, 4).expand(1000, 4)
    (sum_,) = observed(lambda: thin + table)
    assert sum_.bytes_moved == 16 + 16_000 + 16_000


def observed(compute: Callable[[], torch.Tensor]) -> list[Operation]:
    from protwin.runtime.devices.ledger import MemoryLedger
    from protwin.runtime.tracing.operations import describe_operation

    found: list[Operation] = []
    ledger = MemoryLedger()

    def note(*operation: Any) -> None:
        described = describe_operation(*operation)
        if described is not None and not described.name.startswith(("ones", "fill", "lift_fresh", "full", "_to_copy")):
            found.append(described)

    ledger.on_operation = note
    with ledger.metering():
        compute()
    return found
