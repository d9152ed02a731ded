"""Arithmetic of single kernels: tiles and waves worked out by hand, what can never be, and published measurements."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.hardware import Device, DeviceKind
from protwin.shared.schema.workload import DType, Operation, OperationClass, Phase
from protwin.sim.costs.efficiency import KERNEL_FIXED_S, POWER_LIMITED_FRAC, sustained_flop_per_s
from protwin.sim.costs.kernels import attention_s, has_mask, kernel_s, product_s, runs_flash
from protwin.sim.costs.task_costs import roofline_s

SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))


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


# -- matrix products -------------------------------------------------------------------------------------------------


def test_whole_waves_of_the_largest_tile_lose_nothing() -> None:
    # 512 x 256 are four tiles of 256 x 128, one for each multiprocessor.
    assert product_s((1, 512, 256, 4096), device(), 1.0) == pytest.approx(2 * 512 * 256 * 4096)
    assert product_s((3, 512, 256, 4096), device(), 1.0) == pytest.approx(3 * 2 * 512 * 256 * 4096)


def test_a_tile_too_many_takes_another_wave() -> None:
    # Five tiles of 256 x 128: two waves.  Smaller tiles fill the second one better: of the 40 of 64 x 64, 10 each,
    # whose fetches take 1 + 8 * 128 / 4096 = 1.25 of a multiplication, over 1.09375 of the largest tile's.
    shape = (1, 256, 640, 4096)
    ideal_s = 2 * 256 * 640 * 4096
    two_waves_s = ideal_s * 8 / 5
    assert ideal_s < product_s(shape, device(), 1.0) < two_waves_s
    assert product_s(shape, device(), 1.0) <= ideal_s * 1.25 / 1.09375


def test_what_sticks_out_of_the_matrix_is_computed_too() -> None:
    whole, one_more = product_s((1, 512, 256, 4096), device(), 1.0), product_s((1, 513, 256, 4096), device(), 1.0)
    assert one_more > whole * 513 / 512


def test_the_shared_dim_is_split_where_tiles_are_too_few() -> None:
    # One tile of 32 x 32 on four multiprocessors: a quarter of the shared dim each, the fetches at 1.5 over 1.09375.
    split_s = 2 * 32 * 32 * 4096 * (1.5 / 1.09375)
    assert product_s((1, 32, 32, 4096), device(), 1.0) == pytest.approx(split_s)
    # With memory as slow as arithmetic the partial sums cost more than they save.
    slow = device(memory_bandwidth_bytes_per_s=1e-9)
    assert product_s((1, 32, 32, 4096), slow, 1.0) == pytest.approx(4 * split_s)


@pytest.mark.parametrize(("batch", "columns", "launch_s"), [(1, 32, 0.0), (1, 16, 1.0), (2, 16, 1e-6)])
def test_partial_sums_are_written_and_read_again(batch: int, columns: int, launch_s: float) -> None:
    # A tile of 32 x 32 for each product, its shared dim in four parts, one for each of the multiprocessors.  Four bytes
    # of every element and part go to memory and back at 0.85 of 4e10 bytes/s, and a kernel adds them up.
    card = device(4 * batch, memory_bandwidth_bytes_per_s=4e10, launch_overhead_s=launch_s)
    multiplying_s = batch * 2 * 32 * 32 * 4096 * (1.5 / 1.09375) / 1e12
    sums_s = 2 * 4 * (batch * 32 * columns) * 4 / (0.85 * 4e10)
    expected_s = multiplying_s + sums_s + min(KERNEL_FIXED_S, launch_s)
    assert product_s((batch, 32, columns, 4096), card, 1e12) == pytest.approx(expected_s)


@given(SHAPES, st.integers(1, 200))
def test_a_product_takes_no_less_than_its_flops(shape: tuple[int, int, int, int], num_multiprocessors: int) -> None:
    batch, m, n, k = shape
    assert product_s(shape, device(num_multiprocessors), 1.0) >= 2 * batch * m * n * k * (1 - 1e-12)


@given(SHAPES, st.integers(0, 3), st.integers(1, 300))
def test_a_larger_product_never_takes_less(shape: tuple[int, int, int, int], dim: int, more: int) -> None:
    larger = tuple(size + more * (index == dim) for index, size in enumerate(shape))
    assert product_s(larger, device(82), 1.0) >= product_s(shape, device(82), 1.0) * (1 - 1e-12)


@given(SHAPES, st.floats(1, 10), st.floats(1, 10), st.floats(1, 10), st.integers(0, 100))
def test_a_faster_part_never_makes_a_product_slower(
    shape: tuple[int, int, int, int], matrix: float, vector: float, bandwidth: float, more: int
) -> None:
    slow, operation = device_part("a100-80gb"), product(*shape[1:], batch=shape[0])
    assert slow.num_multiprocessors is not None
    # More multiprocessors of the same kind: the peak grows with them.
    growth = 1 + more / slow.num_multiprocessors
    fast = slow.model_copy(
        update={
            "peak_flop_per_s": {dtype: peak * matrix * growth for dtype, peak in slow.peak_flop_per_s.items()},
            "vector_flop_per_s": slow.vector_flop_per_s * vector * growth,
            "memory_bandwidth_bytes_per_s": slow.memory_bandwidth_bytes_per_s * bandwidth,
            "num_multiprocessors": slow.num_multiprocessors + more,
        }
    )
    phase = Phase(operations=(operation, attention(shape[0], shape[1], 128)))
    assert roofline_s(phase, fast) <= roofline_s(phase, slow) * (1 + 1e-9)


@given(st.floats(1e12, 1e16), st.floats(1, 20))
def test_a_higher_peak_never_sustains_less(peak: float, growth: float) -> None:
    a100 = device_part("a100-80gb")
    assert sustained_flop_per_s(a100, peak * growth) >= sustained_flop_per_s(a100, peak)
    assert POWER_LIMITED_FRAC * peak <= sustained_flop_per_s(a100, peak) <= peak


def test_a_stated_efficiency_replaces_what_power_allows() -> None:
    stated = device(efficiency={OperationClass.MATMUL: 0.25})
    assert sustained_flop_per_s(stated, 1.0) == 0.25
    assert kernel_s(product(512, 256, 4096), stated, 1.0) == pytest.approx(4 * 2 * 512 * 256 * 4096)


def test_without_a_shape_or_multiprocessors_nothing_is_known_of_tiles() -> None:
    bare = product(512, 256, 4096).model_copy(update={"shape": ()})
    assert kernel_s(bare, device(), 1.0) is None
    assert kernel_s(product(512, 256, 4096), device(None), 1.0) is None
    # The flat share of the peak counts, and on a CPU always.
    flat_s = bare.flops / 0.75
    assert roofline_s(Phase(operations=(bare,)), device()) == pytest.approx(flat_s)
    assert roofline_s(Phase(operations=(product(512, 256, 4096),)), device(None)) == pytest.approx(flat_s)
    cpu = device(kind=DeviceKind.CPU)
    assert roofline_s(Phase(operations=(product(512, 256, 4096),)), cpu) == pytest.approx(bare.flops / 0.8)


def test_a_narrow_product_streams_its_matrix() -> None:
    """One row times a large matrix: memory binds, at the rate of streams and not of products."""
    card = device_part("rtx-3090")
    operation = product(1, 4096, 4096)
    expected_s = operation.bytes_moved / (936e9 * 0.85) + KERNEL_FIXED_S  # 44 µs, more than the host needs
    phase = Phase(operations=(operation.model_copy(update={"count": 100}),))
    assert roofline_s(phase, card) == pytest.approx(100 * expected_s)


def test_what_only_moves_bytes_takes_its_share_of_the_bandwidth() -> None:
    """Copies and embeddings count no operations; their class still has an efficiency."""
    halved = device(memory_bandwidth_bytes_per_s=100.0, efficiency={OperationClass.ELEMENTWISE: 0.5})
    copy = Operation(
        name="copy",
        operation_class=OperationClass.ELEMENTWISE,
        dtype=DType.FLOAT16,
        flops=0,
        bytes_moved=1000,
        count=3,
    )
    assert roofline_s(Phase(operations=(copy,)), halved) == pytest.approx(3 * 1000 / (100 * 0.5))


# -- attention -------------------------------------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    # Two heads of 256 queries: 4 rows of 2 tiles, one row for each multiprocessor.  A tile has 2 products of 128 x 128
    # x 64 multiply-adds and 10 instructions for each score, at a quarter of the device each.
    tile = 2 * 2 * 128 * 128 * 64 + 2 * 10 * 128 * 128
    assert attention_s(attention(2, 256, 64), device(), 1.0) == pytest.approx(4 * 2 * tile)
    # Under the causal mask the longest row still has 2 tiles.
    assert attention_s(attention(2, 256, 64, causal=True), device(), 1.0) == pytest.approx(4 * 2 * tile)
    # Many rows share out evenly: of 8 columns 4.5 on average.
    many = attention_s(attention(64, 1024, 64, causal=True), device(), 1.0)
    assert many == pytest.approx(64 * 8 * 4.5 * tile)
    backward = 2 * 5 * 128 * 128 * 64 + 2 * 14 * 128 * 128
    assert attention_s(attention(2, 256, 64, backward=True), device(), 1.0) == pytest.approx(4 * 2 * backward)


def test_attention_reaches_what_flash_attention_2_measured_on_an_a100() -> None:
    a100 = device_part("a100-80gb")
    for backward, low, high in ((False, 0.5, 0.73), (True, 0.44, 0.66)):
        operation = attention(16 * 16, 8192, 128, backward=backward)
        share = operation.flops / attention_s(operation, a100, 312e12) / 312e12
        assert low <= share <= high


def test_flash_attention_2_reaches_a_third_of_an_h100() -> None:
    operation = attention(16 * 16, 8192, 128)
    share = operation.flops / attention_s(operation, device_part("h100-80gb"), 989.4e12) / 989.4e12
    assert 0.33 <= share <= 0.45  # "only 35 % utilization", arXiv 2407.08608


def test_which_kernel_runs() -> None:
    flash = attention(2, 256, 64)
    assert runs_flash(flash, device_part("rtx-3090"))
    assert not runs_flash(flash, device_part("v100-32gb"))
    assert not runs_flash(flash.model_copy(update={"dtype": DType.FLOAT32}), device_part("rtx-3090"))
    assert not runs_flash(attention(2, 256, 512), device_part("rtx-3090"))
    a100 = device_part("a100-80gb")
    wide = attention(2, 4096, 257)
    assert attention_s(wide, a100, 312e12) > 1.3 * attention_s(attention(2, 4096, 256), a100, 312e12)


@pytest.mark.parametrize(
    ("model", "length", "is_masked"),
    [("mistral-7b", 8192, True), ("mistral-7b", 4000, False), ("llama-3-8b", 8192, False), ("gpt2", 512, False)],
)
def test_a_mask_shows_in_what_is_moved_and_rules_flash_attention_out(model: str, length: int, is_masked: bool) -> None:
    """Mistral's window is 4,096 tokens; GPT-2 has dropout, whose generator's state is moved too."""
    workload = load_workload(model, batch_size=2, sequence_length=length, dtype="bfloat16")
    assert (workload.quadratic is not None) == is_masked
    phases = [phase for profile in workload.profiles for phase in profile.phases]
    found = [op for phase in phases for op in phase.operations if op.operation_class is OperationClass.ATTENTION]
    assert {operation.name.endswith("_backward") for operation in found} == {False, True}
    for operation in found:
        assert has_mask(operation) == is_masked
        assert runs_flash(operation, device_part("a100-80gb")) != is_masked


@given(st.integers(1, 64), st.integers(1, 3000), st.sampled_from((32, 64, 128, 256)), st.booleans(), st.booleans())
def test_attention_takes_no_less_than_its_flops(
    heads: int, length: int, width: int, causal: bool, backward: bool
) -> None:
    operation = attention(heads, length, width, causal=causal, backward=backward)
    a100 = device_part("a100-80gb")
    seconds = kernel_s(operation, a100, 312e12)
    assert seconds is not None
    assert seconds >= operation.flops / 312e12
    longer = kernel_s(attention(heads, length + 100, width, causal=causal, backward=backward), a100, 312e12)
    assert longer is not None
    assert longer >= seconds * (1 - 1e-12)
    whole = kernel_s(attention(heads, length, width, backward=backward), a100, 312e12)
    assert whole is not None
    assert whole >= seconds * (1 - 1e-12)


# -- published measurements of single products -----------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """TFLOP/s of one product in 16 bit, with what launching it takes."""

    device: str
    shape: tuple[int, int, int]
    tera_flop_per_s: float
    tolerance_frac: float = 0.15


MEASURED = [
    # github.com/mli/transformers-benchmarks, micro_bench.
    Measured("rtx-3090-ti", (2048, 2048, 2048), 71.5),
    Measured("rtx-3090-ti", (8192, 8192, 8192), 81.3),
    Measured("rtx-3090-ti", (8192, 4096, 1024), 74.3),
    # github.com/zzc0721/torch-performance-test-data: issue 78 and database; bfloat16.
    Measured("rtx-4090", (1024, 1024, 1024), 126.8),
    Measured("rtx-4090", (2048, 2048, 2048), 164.8),
    Measured("rtx-4090", (4096, 4096, 4096), 151.5),
    Measured("rtx-4090", (8192, 8192, 8192), 160.2),
    Measured("rtx-3090", (10240, 10240, 10240), 76.5),
    Measured("rtx-a6000", (10240, 10240, 10240), 123.3),
    Measured("l40s", (10240, 10240, 10240), 269.2),
    Measured("a100-80gb", (10240, 10240, 10240), 264.5),
    Measured("h100-80gb", (10240, 10240, 10240), 785.0),
    Measured("b200-180gb", (10240, 10240, 10240), 1696.0),
    # Boards of this generation clock up to 15 % above their stated boost, which no data sheet says.
    Measured("rtx-5090", (2048, 2048, 2048), 172.0),
    Measured("rtx-5090", (8192, 8192, 8192), 235.0, tolerance_frac=0.2),
]


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: f"{m.device}-{m.shape[0]}")
def test_products_come_near_published_measurements(measured: Measured) -> None:
    m, n, k = measured.shape
    operation = product(m, n, k, dtype=DType.BFLOAT16).model_copy(update={"count": 10})
    # A bare product takes the host half as long as one within a model, and less than the device.
    card = device_part(measured.device).model_copy(update={"launch_overhead_s": KERNEL_FIXED_S})
    seconds = roofline_s(Phase(operations=(operation,)), card) / 10
    assert 2 * m * n * k / seconds / 1e12 == pytest.approx(measured.tera_flop_per_s, rel=measured.tolerance_frac)


def test_waves_of_one_large_tile_alone_would_miss_them() -> None:
    """The wrong variant: the largest tile for every product."""

    def largest_tile_alone_s(m: int, n: int, k: int, card: Device) -> float:
        assert card.num_multiprocessors is not None
        waves = ceil(ceil(m / 256) * ceil(n / 128) / card.num_multiprocessors)
        return waves * 2 * 256 * 128 * k * card.num_multiprocessors / card.peak_flop_per_s[DType.BFLOAT16]

    worst = min(
        2
        * m.shape[0]
        * m.shape[1]
        * m.shape[2]
        / largest_tile_alone_s(*m.shape, device_part(m.device))
        / 1e12
        / m.tera_flop_per_s
        for m in MEASURED
        if m.device == "rtx-4090"
    )
    assert worst < 0.5
