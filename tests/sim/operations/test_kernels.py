"""Arithmetic of single kernels: tiles and waves worked out by hand, what can never be, and published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sheet_predictions import limited_exponent
from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.hardware import Device, DeviceKind
from protwin.shared.schema.workload import DType, Operation, OperationClass, Phase
from protwin.sim.operations.attention import attention_s
from protwin.sim.operations.efficiency import (
    KERNEL_FIXED_S,
    POWER_LIMITED_FRAC,
    PRODUCTS_ALONE_FRAC,
    power_slowdown,
    sustained_flop_per_s,
)
from protwin.sim.operations.kernels import alignment_of, kernel_s, product_s
from protwin.sim.operations.roofline import operation_s, roofline_s

from .kernel_cases import attention, device, product

SHEETS = Path(__file__).parents[3] / "benchmarks" / "results" / "sheets-2026-11-27-h100.json"
SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))


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


@given(st.floats(1e12, 1e16), st.floats(1, 20), st.sampled_from((DType.FLOAT32, DType.BFLOAT16)))
def test_a_higher_peak_never_sustains_less(peak: float, growth: float, dtype: DType) -> None:
    a100 = device_part("a100-80gb")
    assert sustained_flop_per_s(a100, peak * growth, dtype) >= sustained_flop_per_s(a100, peak, dtype)
    assert POWER_LIMITED_FRAC * peak <= sustained_flop_per_s(a100, peak, dtype) <= peak


@pytest.mark.parametrize(
    ("name", "dtype", "tflop_per_s"),
    [
        ("v100-32gb", DType.FLOAT16, 89 / 130 * 125),  # of a V100S
        ("a100-40gb", DType.BFLOAT16, 247),
        ("a100-80gb", DType.BFLOAT16, 265),
        ("l40s", DType.BFLOAT16, 269),
        ("rtx-a6000", DType.BFLOAT16, 123),
        ("rtx-3090", DType.BFLOAT16, 76),
        ("rtx-4090", DType.BFLOAT16, 165),
        ("rtx-5090", DType.BFLOAT16, 238),
        ("h100-80gb", DType.BFLOAT16, 787),
        ("b200-180gb", DType.BFLOAT16, 1696),
        ("mi300x-192gb", DType.BFLOAT16, 725),  # 668 and 782
        ("mi325x-256gb", DType.BFLOAT16, 785),
        ("a100-80gb", DType.FLOAT32, 19.1),
        ("rtx-3090", DType.FLOAT32, 24.8),
        ("rtx-4090", DType.FLOAT32, 54.8),
        ("rtx-5090", DType.FLOAT32, 68.4),
        ("rtx-a6000", DType.FLOAT32, 23.9),
    ],
)
def test_largest_products_sustain_what_was_measured(name: str, dtype: DType, tflop_per_s: float) -> None:
    """github.com/zzc0721/torch-performance-test-data, and for AMD github.com/stas00/ml-engineering."""
    part = device_part(name)
    found = sustained_flop_per_s(part, part.peak_flop_per_s[dtype], dtype)
    assert found == pytest.approx(tflop_per_s * 1e12, rel=0.13)


def test_float32_on_hopper_sustains_what_was_measured() -> None:
    """52.1 TFLOP/s in largest products, 80 % of 67 in the float32 training of ``make bench-sheets``."""
    h100 = device_part("h100-80gb")
    assert sustained_flop_per_s(h100, 66.9e12, DType.FLOAT32) == pytest.approx(52.1e12, rel=0.03)


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((1, 4096, 50257, 768), 1),  # a head forward, for its input, for its weight
        ((1, 4096, 768, 50257), 1),
        ((1, 50257, 768, 4096), 1),
        ((1, 4095, 768, 768), 8),  # tokens are rows, and no rows begin at multiples of them
        ((1, 768, 768, 4095), 8),
        ((1, 4096, 30522, 1024), 2),
        ((1, 30522, 1024, 4096), 2),
        ((1, 4096, 50260, 768), 4),
        ((16, 511, 511, 64), 1),  # scores of attention with 511 keys
    ],
)
def test_rows_of_operands_and_results_tell_the_alignment(shape: tuple[int, ...], elements: int) -> None:
    assert alignment_of(shape) == elements


@pytest.mark.parametrize(
    ("name", "shape", "tflop_per_s", "rel"),
    [
        ("h100-80gb", (1, 4096, 50257, 1600), 440 * 132 * 1.98e9 / 1e12, 0.2),
        ("h100-80gb", (1, 6144, 30522, 1024), 950 * 132 * 1.98e9 / 1e12, 0.2),
        ("rtx-4090", (1, 2055, 2055, 2055), 115.6, 0.2),
    ],
)
def test_unaligned_products_take_as_long_as_was_measured(
    name: str, shape: tuple[int, ...], tflop_per_s: float, rel: float
) -> None:
    part = device_part(name)
    _, m, n, k = shape
    seconds = kernel_s(product(m, n, k), part, part.peak_flop_per_s[DType.FLOAT16])
    assert seconds is not None
    assert 2 * m * n * k / seconds / 1e12 == pytest.approx(tflop_per_s, rel=rel)


def test_a_compiled_product_is_padded_where_that_is_faster() -> None:
    """A head forward, for its input and for its weight: the wider operands are read and written in full, no more."""
    part = device_part("a100-80gb")
    peak = part.peak_flop_per_s[DType.BFLOAT16]
    sustained = sustained_flop_per_s(part, peak, DType.BFLOAT16)
    tokens, words, wider, width = 8192, 50257, 50264, 768
    for shape, padded, copied in (
        ((tokens, words, width), (tokens, wider, width), width * wider),
        ((tokens, width, words), (tokens, width, wider), tokens * wider + wider * width),
        ((words, width, tokens), (wider, width, tokens), wider * tokens),
    ):
        eager, compiled = (kernel_s(product(*shape), part, peak, is_compiled=told) for told in (False, True))
        by_hand = product_s((1, *padded), part, sustained) + 2 * 2 * copied / (0.85 * 2.039e12)
        assert compiled == pytest.approx(by_hand)
        assert eager is not None
        assert eager > 2 * by_hand
        # A graph's operations are compiled, those of its neighbours are not.
        of_phases = [roofline_s(Phase(operations=(product(*shape),), num_graphs=graphs), part) for graphs in (None, 0)]
        assert of_phases[0] - of_phases[1] == pytest.approx(eager - by_hand)


@given(SHAPES)
def test_compiling_never_slows_a_product(shape: tuple[int, ...]) -> None:
    part, peak = device_part("h100-80gb"), 989e12
    _, m, n, k = shape
    eager, compiled = (kernel_s(product(m, n, k), part, peak, is_compiled=told) for told in (False, True))
    assert eager is not None
    assert compiled is not None
    assert compiled == eager if n % 8 == 0 else compiled <= eager


@given(SHAPES)
def test_aligning_a_product_never_takes_much_longer(shape: tuple[int, ...]) -> None:
    """Rows that are padded to multiples of 8 are faster, or cost what is computed more."""
    part, peak = device_part("h100-80gb"), 989e12
    _, m, n, k = shape
    padded = -(-n // 8) * 8
    before, after = (kernel_s(product(m, columns, k), part, peak) for columns in (n, padded))
    assert before is not None
    assert after is not None
    assert after <= before * padded / n * 1.01


@pytest.mark.parametrize("name", ["h100-80gb", "a100-80gb", "v100-32gb", "mi300x-192gb"])
def test_a_power_limit_slows_products_and_attention(name: str) -> None:
    """On Hopper as much as an H100's board tells, and by the cube root before; float32 is far from any limit."""
    part = device_part(name)
    assert part.power_w is not None
    limited = Device.model_validate(part.model_dump() | {"power_limit_w": part.power_w / 8})
    slower = 8 ** limited_exponent(json.loads(SHEETS.read_text())) if name.startswith("h100") else 2
    slow, fast = (sustained_flop_per_s(of, 989e12, DType.BFLOAT16) for of in (limited, part))
    assert fast / slow == pytest.approx(slower, rel=0.01)
    assert sustained_flop_per_s(limited, 67e12, DType.FLOAT32) == sustained_flop_per_s(part, 67e12, DType.FLOAT32)
    flash = attention(256, 8192, 128)
    slow_s, fast_s = (attention_s(flash, of, 989e12) for of in (limited, part))
    assert slow_s / fast_s == pytest.approx(slower, rel=0.01)
    assert (limited.drawn_w, part.drawn_w) == (part.power_w / 8, part.power_w)


@pytest.mark.parametrize("changes", [{"power_limit_w": 701.0}, {"power_limit_w": 500.0, "power_w": None}])
def test_a_limit_is_below_what_the_board_draws(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"power_limit_w is \d+ W, but power_w"):
        Device.model_validate(device_part("h100-80gb").model_dump() | changes)


def test_a_stated_share_counts_in_16_bits_alone() -> None:
    half = device_part("a100-80gb").model_copy(update={"sustained_frac": 0.5})
    assert sustained_flop_per_s(half, 100.0, DType.BFLOAT16) == 50
    assert sustained_flop_per_s(half, 100.0, DType.FLOAT32) == 90


def test_a_stated_efficiency_replaces_what_power_allows() -> None:
    stated = device(efficiency={OperationClass.MATMUL: 0.25})
    assert sustained_flop_per_s(stated, 1.0, DType.BFLOAT16) == 0.25
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
    # For seconds, at the clock that a mixture of kernels leaves it too.
    seconds = operation_s(product(m, n, k, dtype=DType.BFLOAT16), device_part(measured.device))
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


def test_what_runs_nothing_but_products_is_held_back_by_its_power() -> None:
    """Random numbers, 20 seconds long, on an H100 of 700 W (``make bench-sheets``): 682 TFLOP/s."""
    operation = product(8192, 8192, 8192, dtype=DType.BFLOAT16).model_copy(update={"count": 100})
    h100 = device_part("h100-80gb")
    seconds = roofline_s(Phase(operations=(operation,)), h100) / 100
    assert operation.flops / seconds / 1e12 == pytest.approx(682, rel=0.05)
    # Beside as much of other work it has its full rate.
    copies = Operation(
        name="copy",
        operation_class=OperationClass.ELEMENTWISE,
        dtype=DType.BFLOAT16,
        flops=0,
        bytes_moved=round(3.35e12 * 0.85 * seconds),
        count=100,
    )
    mixed_s = roofline_s(Phase(operations=(operation, copies)), h100)
    assert mixed_s == pytest.approx(operation_s(operation, h100) + operation_s(copies, h100))


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_of_products_never_speeds_them_up(one: float, other: float) -> None:
    h100 = device_part("h100-80gb")
    low, high = sorted((one, other))
    assert 1 <= power_slowdown(h100, low) <= power_slowdown(h100, high) <= POWER_LIMITED_FRAC / PRODUCTS_ALONE_FRAC
    for name in ("a100-80gb", "rtx-4090", "l40s"):
        assert power_slowdown(device_part(name), high) == 1
    stated = h100.model_copy(update={"efficiency": {OperationClass.MATMUL: 0.7}})
    assert power_slowdown(stated, high) == 1
