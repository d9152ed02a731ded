"""Attention with dropout on fake tensors: what it saves and does is what CUDA's fused kernels save and do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime import trace
from protwin.runtime.tracing.fake_kernels import fused_dropout
from protwin.runtime.tracing.operations import describe_operation
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Operation, OperationClass, Workload
from protwin.shared.workloads.check import has_fused_dropout
from tests.runtime.models import gpt2, token_batches

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 96, 16
NO_OTHER_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
GENERATOR_BYTES = 64
"""The state of the generator that a fused kernel saves, at most."""


class Operations(TorchDispatchMode):
    """Lists what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = describe_operation(func, args, kwargs or {}, result)
        if operation is not None:
            self.found.append(operation)
        return result


@contextmanager
def fake_operands(dtype: torch.dtype, width: int = WIDTH, groups: int = 1) -> Iterator[list[torch.Tensor]]:
    """Query, key and value."""
    with FakeTensorMode():
        yield [
            torch.empty(BATCH, heads, LENGTH, width, dtype=dtype, requires_grad=True)
            for heads in (HEADS, HEADS // groups, HEADS // groups)
        ]


def attended(operands: list[torch.Tensor], **options: Any) -> tuple[int, list[Operation]]:
    """Bytes that attention saves besides its operands, and what runs forward and backward."""
    saved: dict[int, int] = {}
    own = {tensor.untyped_storage()._cdata for tensor in operands}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with Operations() as operations, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        functional.scaled_dot_product_attention(*operands, **options).sum().backward()
    return sum(saved.values()), operations.found


def attention(operations: list[Operation]) -> list[Operation]:
    return [one for one in operations if one.operation_class is OperationClass.ATTENTION]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_saves_its_output_and_the_sums_of_its_rows(dtype: torch.dtype, is_causal: bool) -> None:
    rows = BATCH * HEADS * LENGTH
    expected_bytes = rows * WIDTH * dtype.itemsize + rows * 4
    with fake_operands(dtype) as operands, fused_dropout():
        saved_bytes, operations = attended(operands, dropout_p=0.1, is_causal=is_causal)
    assert expected_bytes <= saved_bytes <= expected_bytes + GENERATOR_BYTES
    forward, backward = attention(operations)
    products = 2 * rows * LENGTH * WIDTH // (2 if is_causal else 1)
    assert (forward.flops, backward.flops) == (2 * products, 5 * products)
    # The CPU, which has no such kernel, saves the probabilities at least.
    with fake_operands(dtype) as operands:
        saved_bytes, operations = attended(operands, dropout_p=0.1, is_causal=is_causal)
    assert saved_bytes > expected_bytes + rows * LENGTH * dtype.itemsize
    assert not attention(operations)


def test_a_mask_is_left_as_the_cpu_has_it() -> None:
    with fake_operands(torch.bfloat16) as operands, fused_dropout():
        mask = torch.empty(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)
        _, operations = attended(operands, attn_mask=mask, dropout_p=0.1)
        assert not attention(operations)
        _, operations = attended(operands, attn_mask=mask)
        assert attention(operations)


def test_kernels_differ_in_where_they_are_told_to_be_causal() -> None:
    """The fifth argument of the memory-efficient kernel says whether it keeps sums of rows."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    products = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    for is_causal in (False, True):
        with fake_operands(torch.float32) as operands, Operations() as operations:
            operator(*operands, None, True, 0.1, is_causal)[0].sum().backward()
        forward, backward = attention(operations.found)
        whole = products // (2 if is_causal else 1)
        assert (forward.flops, backward.flops) == (2 * whole, 5 * whole)


def test_groups_of_heads_stay_fused_where_cuda_can() -> None:
    for dtype, is_fused in ((torch.bfloat16, True), (torch.float32, False)):
        with fake_operands(dtype, groups=2) as operands, fused_dropout():
            _, operations = attended(operands, dropout_p=0.1, enable_gqa=True)
        assert bool(attention(operations)) == is_fused


def test_odd_widths_are_padded() -> None:
    with fake_operands(torch.bfloat16, width=12) as operands, fused_dropout():
        result = functional.scaled_dot_product_attention(*operands, dropout_p=0.1)
        _, operations = attended(operands, dropout_p=0.1)
    assert result.shape == (BATCH, HEADS, LENGTH, 12)
    assert attention(operations)[0].shape[-1] == 16


def test_other_attention_is_left_alone() -> None:
    with fake_operands(torch.float32) as operands, fused_dropout():
        _, operations = attended(operands, is_causal=True)
    assert attention(operations)[0].name == "_scaled_dot_product_flash_attention_for_cpu"
    real = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(functional.scaled_dot_product_attention(*real, dropout_p=0.5))
        with fused_dropout():
            torch.manual_seed(0)
            results.append(functional.scaled_dot_product_attention(*real, dropout_p=0.5))
    assert all(torch.equal(results[0], result) for result in results)
    with fake_operands(torch.float32) as operands:
        _, operations = attended(operands, dropout_p=0.1)
    assert not attention(operations), "nothing of it stays"


# -- whole models ----------------------------------------------------------------------------------------------------


def traced(device_kind: DeviceKind, **changes: Any) -> Workload:
    with torch.device("meta"):
        model = gpt2(n_positions=LENGTH, **changes)
    batch = {name: torch.empty(2, LENGTH, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    return trace(model, batch, device_kind=device_kind)


@pytest.mark.slow
def test_a_model_for_a_gpu_saves_what_it_saves_without_dropout() -> None:
    with_dropout, without = (
        traced(DeviceKind.CUDA, attn_pdrop=rate, **NO_OTHER_DROPOUT).profile_of(1) for rate in (0.1, 0.0)
    )
    for ours, theirs in zip(with_dropout.phases, without.phases, strict=True):
        # Saved tensors come and go: two states of generators in a block.
        assert abs(ours.net_bytes - theirs.net_bytes) <= GENERATOR_BYTES
        assert 0 <= ours.peak_bytes - theirs.peak_bytes <= GENERATOR_BYTES
        assert ours.flops == theirs.flops
    scores = 2 * 2 * LENGTH * LENGTH
    unfused = traced(DeviceKind.CPU, attn_pdrop=0.1, **NO_OTHER_DROPOUT).profile_of(1)
    assert unfused.forward.net_bytes - with_dropout.forward.net_bytes > scores * 4


@pytest.mark.slow
def test_a_model_for_a_cpu_is_what_real_tensors_do() -> None:
    batch = token_batches(1)[0]
    with torch.device("meta"):
        model = gpt2(num_layers=6, **NO_OTHER_DROPOUT)
    fake_batch = {name: tensor.to("meta") for name, tensor in batch.items()}
    fake = trace(model, fake_batch, device_kind=DeviceKind.CPU)
    real = trace(gpt2(num_layers=6, **NO_OTHER_DROPOUT), batch, repeats=0)
    for block in range(6):
        for ours, theirs in zip(fake.profile_of(block).phases, real.profile_of(block).phases, strict=True):
            assert (ours.net_bytes, ours.peak_bytes) == (theirs.net_bytes, theirs.peak_bytes)
    assert not has_fused_dropout(fake)
    assert not has_fused_dropout(real)
    assert has_fused_dropout(trace(model, fake_batch))
