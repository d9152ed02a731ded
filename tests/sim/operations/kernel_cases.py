"""Round devices and single operations for tests of kernels."""

from __future__ import annotations

from protwin.shared.schema.hardware import Device, DeviceKind
from protwin.shared.schema.workload import DType, Operation, OperationClass


def device(num_multiprocessors: int | None = 4, **changes: object) -> Device:
    """Round figures: 1 FLOP/s and 1 byte/s in everything, 4 multiprocessors, nothing that limits power."""
    figures = {
        "name": "round figures",
        "kind": DeviceKind.CUDA,
        "memory_bytes": 10**9,
        "memory_bandwidth_bytes_per_s": 1e30,
        "peak_flop_per_s": {DType.FLOAT16: 1.0, DType.BFLOAT16: 1.0},
        "vector_flop_per_s": 1.0,
        "launch_overhead_s": 0.0,
        "num_multiprocessors": num_multiprocessors,
    }
    return Device.model_validate(figures | changes)


def product(m: int, n: int, k: int, batch: int = 1, dtype: DType = DType.FLOAT16) -> Operation:
    return Operation(
        name="mm",
        operation_class=OperationClass.MATMUL,
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes_moved=2 * batch * (m * k + k * n + m * n),
        shape=(batch, m, n, k),
    )


def attention(heads: int, length: int, width: int, *, causal: bool = False, backward: bool = False) -> Operation:
    products = 5 if backward else 2
    flops = 2 * products * heads * length * length * width // (2 if causal else 1)
    return Operation(
        name="_scaled_dot_product_flash_attention" + ("_backward" if backward else ""),
        operation_class=OperationClass.ATTENTION,
        dtype=DType.FLOAT16,
        flops=flops,
        bytes_moved=8 * heads * length * width,
        shape=(heads, length, length, width),
    )
