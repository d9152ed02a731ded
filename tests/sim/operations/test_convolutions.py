"""Seconds of convolutions: tiles worked out by hand, and the units that float32 is multiplied on."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.workload import DType, Operation, OperationClass
from protwin.sim.operations.convolutions import convolution_s
from protwin.sim.operations.efficiency import tensor_float_flop_per_s
from protwin.sim.operations.roofline import matrix_flop_per_s, operation_s


def convolution(*shape: int, dtype: DType = DType.FLOAT32, bytes_moved: int = 0, backward: bool = False) -> Operation:
    groups, places, channels, inner, _ = shape
    return Operation(
        name="convolution_backward" if backward else "convolution",
        operation_class=OperationClass.MATMUL,
        dtype=dtype,
        flops=(4 if backward else 2) * groups * places * channels * inner,
        bytes_moved=bytes_moved,
        shape=shape,
    )


def test_float32_runs_in_tf32_where_a_board_has_it() -> None:
    wide = convolution(1, 2**18, 256, 2304, 1)
    for name, rate in (("a100-80gb", 156e12), ("h100-80gb", 494.7e12), ("rtx-4090", 82.6e12)):
        assert tensor_float_flop_per_s(device_part(name)) == pytest.approx(rate, rel=2e-3)
        assert matrix_flop_per_s(device_part(name), wide) == pytest.approx(rate, rel=2e-3)
    for name in ("v100-16gb", "t4", "mi300x-192gb", "mi250x-64gb"):
        device = device_part(name)
        assert tensor_float_flop_per_s(device) is None
        assert matrix_flop_per_s(device, wide) == device.matrix_flop_per_s(DType.FLOAT32)
    product = wide.model_copy(update={"name": "mm", "shape": (1, 2**18, 256, 2304)})
    a100 = device_part("a100-80gb")
    assert matrix_flop_per_s(a100, product) == 19.5e12
    assert operation_s(product, a100) > 6 * operation_s(wide, a100)


def test_a_wide_one_takes_what_its_product_takes() -> None:
    """Channels last: of many tiles, all multiprocessors multiply all the time."""
    a100, wide = device_part("a100-80gb"), convolution(1, 2**18, 256, 2304, 1, dtype=DType.FLOAT16)
    share = wide.flops / convolution_s(wide, a100, 312e12) / 312e12
    assert 0.7 < share < 0.8
    backward = convolution(1, 2**18, 256, 2304, 1, dtype=DType.FLOAT16, backward=True)
    assert convolution_s(backward, a100, 312e12) == pytest.approx(2 * convolution_s(wide, a100, 312e12))


def test_channels_that_do_not_lie_last_are_laid_out_anew() -> None:
    a100, bytes_moved = device_part("a100-80gb"), 2**32
    stream_s = bytes_moved / (0.85 * a100.memory_bandwidth_bytes_per_s)

    def seconds(groups: int, channels: int, is_last: int, dtype: DType, name: str = "a100-80gb") -> float:
        shape = (groups, 2**12, channels, 64, is_last)
        return convolution_s(convolution(*shape, dtype=dtype, bytes_moved=bytes_moved), device_part(name), 1e15)

    for dtype in (DType.FLOAT16, DType.FLOAT32):
        assert seconds(1, 64, 1, dtype) == pytest.approx(stream_s)
        assert seconds(1, 64, 0, dtype) == pytest.approx(3 * stream_s)
        assert seconds(32, 1, 0, dtype) == pytest.approx(stream_s)
    v100 = device_part("v100-16gb")
    assert seconds(1, 64, 0, DType.FLOAT32, "v100-16gb") == pytest.approx(
        bytes_moved / (0.85 * v100.memory_bandwidth_bytes_per_s)
    )


def test_groups_of_few_channels_fill_a_part_of_a_tile() -> None:
    """As many multiplications in 32 groups of 4 channels take longer than in one of 128 by 4."""
    a100 = device_part("a100-80gb")
    whole = convolution(1, 2**18, 128, 36, 1, dtype=DType.FLOAT16)
    grouped = convolution(32, 2**18, 4, 36, 1, dtype=DType.FLOAT16)
    assert whole.flops == grouped.flops
    assert convolution_s(grouped, a100, 312e12) > 4 * convolution_s(whole, a100, 312e12)


def test_nothing_takes_no_arithmetic() -> None:
    assert convolution_s(convolution(1, 0, 8, 8, 1), device_part("a100-80gb"), 156e12) == 0
