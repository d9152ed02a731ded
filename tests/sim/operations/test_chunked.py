"""Kernels that go through sequences in chunks beside what others measured, and what they depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime.packaged.substitution import KERNELS
from protwin.runtime.tracing.operations import describe_operation
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.hardware import Device
from protwin.shared.schema.workload import DType, Operation, OperationClass
from protwin.sim.operations.chunked import dispatches_per_launch
from protwin.sim.operations.roofline import operation_s

H100 = load_hardware("h100-80gb").device
B200 = load_hardware("b200-180gb").device
H20 = H100.model_copy(
    update={
        "num_multiprocessors": 78,
        "memory_bandwidth_bytes_per_s": 4e12,
        "peak_flop_per_s": dict.fromkeys(H100.peak_flop_per_s, 148e12),
        "vector_flop_per_s": 44e12,
        "clock_hz": 1.83e9,
    }
)
# Milliseconds of forwards by flash-linear-attention of 2026, heads of 128: (function, samples, tokens, heads of keys,
# of values, device).  Sources: PaddlePaddle/flash-attention pull 133 (H800, which computes as an H100), flashinfer-ai/
# flashinfer pulls 2742 (B200) and 3866 (H100), MoonshotAI/FlashKDA BENCHMARK_H20.md, whose calls normalize queries too.
MEASURED = [
    ("chunk_gated_delta_rule", 1, 8192, 96, 96, H100, 2.033),
    ("chunk_gated_delta_rule", 2, 16384, 16, 16, H100, 1.342),
    ("chunk_gated_delta_rule", 1, 65536, 2, 8, H100, 1.966),
    ("chunk_gated_delta_rule", 1, 8192, 2, 8, H100, 0.259),
    ("chunk_gated_delta_rule", 1, 8192, 64, 64, H20, 2.006),
    ("chunk_gated_delta_rule", 1, 8192, 96, 96, B200, 1.492),
    ("chunk_gated_delta_rule", 9, 1024, 32, 32, B200, 0.553),
    ("chunk_kda", 1, 8192, 96, 96, H100, 3.268),
    ("chunk_kda", 2, 16384, 16, 16, H100, 2.299),
    ("chunk_kda", 1, 8192, 64, 64, H20, 3.166),
]


@contextmanager
def operations() -> Iterator[list[Operation]]:
    """Those that run within the block."""
    found: list[Operation] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            operation = describe_operation(func, args, kwargs or {}, made)
            found.extend([operation] if operation is not None else [])
            return made

    with Noting():
        yield found


def calls(
    function: str, samples: int, tokens: int, keys: int, heads: int, device: Device = H100
) -> tuple[list[Operation], list[Operation]]:
    """Operations of forward and of backward, as they were timed on ``device``."""
    is_kimi = function == "chunk_kda"

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(samples, tokens, *shape, dtype=dtype).requires_grad_()

    with FakeTensorMode():
        gate = new(heads, 128) if is_kimi else new(heads, dtype=torch.float32)
        given = {"q": new(keys, 128), "k": new(keys, 128), "v": new(heads, 128), "g": gate, "beta": new(heads)}
        with operations() as forward:
            result, _ = KERNELS[function](**given, use_gate_in_kernel=is_kimi, use_qk_l2norm_in_kernel=device is H20)
        with operations() as backward:
            result.backward(torch.empty_like(result))
    return forward, backward


def seconds(found: list[Operation], device: Device) -> float:
    return sum(operation_s(operation, device) for operation in found)


@pytest.mark.parametrize(("function", "samples", "tokens", "keys", "heads", "device", "measured_ms"), MEASURED)
def test_forwards_take_as_long_as_measured(
    function: str, samples: int, tokens: int, keys: int, heads: int, device: Device, measured_ms: float
) -> None:
    forward, _ = calls(function, samples, tokens, keys, heads, device)
    assert 1e3 * seconds(forward, device) == pytest.approx(measured_ms, rel=0.25)


def test_backward_takes_two_to_three_forwards() -> None:
    # 2.48, from the speed-ups of another kernel over it, forward, backward and in all (NVIDIA/Megatron-LM pull 5564).
    forward, backward = calls("chunk_gated_delta_rule", 1, 4096, 16, 32)
    assert 2 < seconds(backward, H100) / seconds(forward, H100) < 3


def test_few_heads_wait_for_their_states() -> None:
    few, many = (calls("chunk_gated_delta_rule", *sizes)[0] for sizes in ((1, 65536, 2, 2), (64, 1024, 2, 2)))
    assert sum(one.flops * one.count for one in few) == sum(one.flops * one.count for one in many)
    assert seconds(few, H100) > 1.5 * seconds(many, H100)


def test_launches_from_python_take_the_host_longer() -> None:
    def kernel(name: str, shape: tuple[int, ...]) -> Operation:
        return Operation(
            name=name, operation_class=OperationClass.MATMUL, dtype=DType.BFLOAT16, flops=1, bytes_moved=1, shape=shape
        )

    assert dispatches_per_launch(kernel("chunk_fwd_o", (0,))) > dispatches_per_launch(kernel("mm", (1, 8, 8, 8)))
    assert dispatches_per_launch(kernel("causal_conv1d_fwd", (0,))) == dispatches_per_launch(kernel("mm", ()))
