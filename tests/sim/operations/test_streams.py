"""Seconds of kernels that stream, against the ones of an H100 that were measured one by one and inside trainings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.hardware import DeviceKind, Hardware
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Operation, OperationClass, Phase
from protwin.shared.workloads.source import load_workload
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.operations.roofline import operation_s, roofline_s
from protwin.sim.operations.streams import goes_by_elements, launched, moved_bytes

from .kernel_cases import device

A100 = machine("a100-80gb")
ON_CPU = A100.model_copy(update={"device": A100.device.model_copy(update={"kind": DeviceKind.CPU})})
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "sheets-2026-11-27-h100.json"
SHEETS = json.loads(RESULTS.read_text(encoding="utf-8"))
H100 = device_part("h100-80gb")


def operation(name: str, elements: int, dtype: DType, size_bytes: int, **changes: object) -> Operation:
    fields = {
        "name": name,
        "operation_class": OperationClass.ELEMENTWISE,
        "dtype": dtype,
        "flops": elements,
        "bytes_moved": size_bytes,
    }
    return Operation.model_validate(fields | changes)


def measured_us(part: str, model: str = "llama-3.2-1b, 4 x 2048, bfloat16") -> float:
    """Microseconds of all kernels of one training whose names hold ``part``."""
    step = next(step for step in SHEETS["steps"] if step["name"] == model)
    found = [microseconds for name, _, microseconds in step["kernels"] if part in name]
    assert found
    return sum(found)


# 8,192 tokens of 2,048 in 16 blocks with two norms each, and one after the last; 8,192 wide MLPs.
_TOKENS = 8192 * 2048
_LOGITS = 8192 * 128256


def test_widening_casts_go_element_by_element() -> None:
    """Of two norms a block and one behind, and of the logits: at 57 % of the bandwidth.  Narrowing ones stream."""

    def seconds(dtype: DType) -> float:
        of_norms = operation("_to_copy", _TOKENS, dtype, 6 * _TOKENS, count=66)
        of_logits = operation("_to_copy", _LOGITS, dtype, 6 * _LOGITS)
        return operation_s(of_norms, H100) + operation_s(of_logits, H100)

    widening = measured_us("unrolled_elementwise_kernel<at::native::direct_copy")
    assert seconds(DType.FLOAT32) * 1e6 == pytest.approx(widening, rel=0.1)
    assert seconds(DType.BFLOAT16) * 1e6 == pytest.approx(measured_us("bfloat16_copy_kernel"), rel=0.1)


def test_operands_that_are_broadcast_go_element_by_element() -> None:
    whole = operation("mul", _TOKENS, DType.BFLOAT16, 6 * _TOKENS)
    by_weight = operation("mul", _TOKENS, DType.BFLOAT16, 4 * _TOKENS + 2 * 2048)
    by_scalar = operation("mul", _TOKENS, DType.BFLOAT16, 4 * _TOKENS)
    assert [goes_by_elements(one) for one in (whole, by_weight, by_scalar)] == [False, True, False]
    # 322 elements per ns measured, of 8 million elements and more.
    assert _TOKENS / operation_s(by_weight, H100) / 1e9 == pytest.approx(322, rel=0.15)
    # Less to move, and yet no faster than the whole.
    assert operation_s(by_weight, H100) > 0.9 * operation_s(whole, H100)
    # What has less bandwidth for each multiprocessor waits for it all the same.
    rtx_4090 = device_part("rtx-4090")
    assert operation_s(by_weight, rtx_4090) == pytest.approx(4 * _TOKENS / (0.85 * 1008e9), rel=0.1)


def test_casts_on_other_boards_and_to_other_types_take_what_was_published() -> None:
    """Before these kernels were vectorized.  An A100 took 362 µs for 2**26 elements from bfloat16 to float32
    (github.com/pytorch/pytorch/pull/195542), an H100 331 to 336 µs for 10**8 from float32 to eight bits (pull/110251:
    vectorized, it moves 2.2 TB/s, which no A100 does)."""
    widened = operation("_to_copy", 2**26, DType.FLOAT32, 6 * 2**26)
    assert operation_s(widened, device_part("a100-40gb")) == pytest.approx(362e-6, rel=0.1)
    narrowed = operation("_to_copy", 10**8, DType.INT8, 5 * 10**8)
    assert operation_s(narrowed, H100) == pytest.approx(333e-6, rel=0.1)


def test_weights_of_four_bits_are_unpacked_at_the_pace_that_was_published() -> None:
    """Before a kernel that takes 1.36 to 2.07 times less: (seconds, weights), on boards of 108 multiprocessors."""
    a100 = device_part("a100-80gb")
    product_s = 2 * 2048 * 14336 * 4096 / (0.8 * 312e12)
    for least_s, most_s, count in (
        (0.3 * product_s, 0.5 * product_s, 14336 * 4096),
        ((5544 - 4807) / 20_000, (5544 - 4807) / 20_000, 2 * 16 * 12 * 4096**2),
    ):
        packed = operation("bitsandbytes::dequantize_4bit", count, DType.BFLOAT16, count * 41 // 16)
        found = operation_s(packed, a100)
        assert 1.36 * found < most_s
        assert 2.07 * found > least_s
        # As a stream it would be out of that range.
        assert 2.07 * count * 41 / 16 / (0.85 * 2039e9) < 0.8 * least_s
    # Where memory sets the pace it is a stream.
    rtx_4090 = device_part("rtx-4090")
    packed = operation("bitsandbytes::dequantize_4bit", 2**26, DType.BFLOAT16, 2**26 * 41 // 16)
    assert operation_s(packed, rtx_4090) == pytest.approx(2**26 * 41 / 16 / (0.85 * 1008e9), rel=0.01)


def test_a_chain_that_unpacks_whole_numbers_goes_element_by_element_but_for_the_mask() -> None:
    """GPTQ's (``runtime/quantized/gptq.py``), of four bits in groups of 128 to float16."""
    count = 4096 * 4096
    chain = [
        operation("bitwise_right_shift", count, DType.INT32, 9 * count // 2 + 32),
        operation("_to_copy", count, DType.INT8, 5 * count),
        operation("bitwise_and_", count, DType.INT8, 2 * count),
        operation("sub", count, DType.INT8, 2 * count + count // 128),
        operation("mul", count, DType.FLOAT16, 3 * count + count // 64),
    ]
    assert [goes_by_elements(one) for one in chain] == [True, True, False, True, True]
    a100 = device_part("a100-80gb")
    by_elements, mask = 4 * count / (1.2 * 1.41e9 * 108), 2 * count / (0.85 * 2039e9)
    assert sum(operation_s(one, a100) for one in chain) == pytest.approx(by_elements + mask, rel=0.05)
    # What has as many bytes as its result is no chain of few bits.
    assert not goes_by_elements(operation("bitwise_right_shift", count, DType.INT32, 8 * count))
    assert not goes_by_elements(operation("_to_copy", count, DType.INT8, 2 * count))


def test_a_loss_reads_one_logit_of_a_row() -> None:
    """Softmax forward and backward, and the likelihood around it: 5.56, 5.70 and 1.27 ms of 128,256 words."""
    logits = _LOGITS
    kinds = [
        ("_log_softmax", OperationClass.REDUCTION, 8 * logits, "SoftMaxForward"),
        ("_log_softmax_backward_data", OperationClass.ELEMENTWISE, 12 * logits, "SoftMaxBackward"),
        ("nll_loss_backward", OperationClass.REDUCTION, 8 * logits, "FillFunctor<float>"),
    ]
    for name, kind, size_bytes, kernel in kinds:
        one = operation(name, logits, DType.FLOAT32, size_bytes, operation_class=kind)
        assert operation_s(one, H100) * 1e6 == pytest.approx(measured_us(kernel), rel=0.2), name
    forward = operation("nll_loss_forward", 8192, DType.FLOAT32, 4 * logits, operation_class=OperationClass.REDUCTION)
    assert moved_bytes(forward) == 0


@pytest.mark.parametrize(
    "model", ["gpt2-xl, 4 x 1024, float32, autocast bfloat16", "bert-large, 16 x 384, float32, autocast float16"]
)
def test_layer_norms_inside_trainings(model: str) -> None:
    tokens, width, number = (4096, 1600, 97) if "gpt2" in model else (6144, 1024, 50)
    size = tokens * width * 4
    fields = {"operation_class": OperationClass.NORMALIZATION, "count": number}
    forward = operation("native_layer_norm", tokens * width, DType.FLOAT32, 2 * size, **fields)
    backward = operation("native_layer_norm_backward", tokens * width, DType.FLOAT32, 3 * size, **fields)
    assert operation_s(forward, H100) * 1e6 == pytest.approx(measured_us("::vectorized_layer_norm", model), rel=0.15)
    both = measured_us("layer_norm_grad_input", model) + measured_us("GammaBetaBackward", model)
    assert operation_s(backward, H100) * 1e6 == pytest.approx(both, rel=0.15)


@pytest.mark.parametrize(
    ("model", "scalars", "optimizer", "bytes_each"),
    [
        ("llama-3.2-1b, 4 x 2048, bfloat16", 1_235_814_400, Optimizer.ADAMW_BF16, 14),
        ("gpt2-xl, 4 x 1024, float32, autocast bfloat16", 1_557_611_200, Optimizer.ADAMW, 28),
        ("t5-large, 8 x 512, float32", 737_668_096, Optimizer.ADAMW, 28),
        ("bert-large, 16 x 384, float32, autocast float16", 335_174_458, Optimizer.ADAMW, 28),
    ],
)
def test_fused_optimizers_step_at_seven_tenths_of_the_bandwidth(
    model: str, scalars: int, optimizer: Optimizer, bytes_each: int
) -> None:
    costs = CostModel(machine("h100-80gb"), optimizer=optimizer)
    seconds = costs.adam_s(scalars, bytes_each * scalars, 1, TaskKind.DEVICE_ADAM)
    assert seconds * 1e6 == pytest.approx(measured_us("FusedOptimizer", model), rel=0.15)


def test_clocks_are_those_of_the_boards() -> None:
    """NVIDIA's data sheets and white papers: boost clocks in MHz."""
    boosts = {"h100-80gb": 1980, "a100-80gb": 1410, "v100-16gb": 1530, "t4": 1590, "rtx-3090": 1695, "rtx-4090": 2520}
    for name, mega_hz in boosts.items():
        assert device_part(name).told_clock_hz / 1e6 == pytest.approx(mega_hz, rel=0.01), name


@given(st.sampled_from(("mul", "add", "_to_copy", "gelu")), st.integers(1, 10**9), st.floats(1, 4), st.floats(1, 4))
def test_a_faster_part_never_makes_a_stream_slower(name: str, elements: int, memory: float, vector: float) -> None:
    slow = device(108, memory_bandwidth_bytes_per_s=2e12, vector_flop_per_s=19.5e12, launch_overhead_s=5e-6)
    fast = slow.model_copy(
        update={
            "memory_bandwidth_bytes_per_s": slow.memory_bandwidth_bytes_per_s * memory,
            "vector_flop_per_s": slow.vector_flop_per_s * vector,
        }
    )
    one = operation(name, elements, DType.FLOAT32, 9 * elements)
    assert operation_s(one, fast) <= operation_s(one, slow) * (1 + 1e-9)


def test_stated_efficiencies_replace_all_of_it() -> None:
    stated = device(memory_bandwidth_bytes_per_s=100.0, efficiency={OperationClass.NORMALIZATION: 0.5})
    norm = operation("native_layer_norm_backward", 0, DType.FLOAT32, 1000, operation_class=OperationClass.NORMALIZATION)
    assert operation_s(norm, stated) == pytest.approx(1000 / 50)


def noise(name: str, elements: int, count: int) -> Operation:
    return Operation(
        name=name,
        operation_class=OperationClass.ELEMENTWISE,
        dtype=DType.BFLOAT16,
        flops=elements,
        bytes_moved=4 * elements,
        count=count,
    )


def test_dropout_of_a_cpus_trace_is_one_kernel_on_a_cuda_device() -> None:
    """What a CPU does in three operations; a division of something else, and by itself, stays."""
    mul = noise("mul", 100, 3)
    operations = (noise("bernoulli_", 100, 3), noise("div_", 100, 5), mul, noise("div_", 70, 2))
    assert tuple(launched(operations)) == (noise("div_", 100, 2), mul, noise("div_", 70, 2))
    assert launched((mul,)) == (mul,)
    phase = Phase(operations=(noise("bernoulli_", 10**8, 1), noise("div_", 10**8, 1), noise("mul", 10**8, 1)))
    a100 = device_part("a100-80gb")
    assert roofline_s(phase, a100) == roofline_s(Phase(operations=phase.operations[2:]), a100)
    cpu = a100.model_copy(update={"kind": DeviceKind.CPU})
    assert roofline_s(phase, cpu) > 2 * roofline_s(Phase(operations=phase.operations[2:]), cpu)


def test_dropout_that_cuda_does_in_pieces_is_priced_in_pieces() -> None:
    """In place, and of whole features, whose noise is smaller than what it multiplies."""
    drawn = (noise("bernoulli_", 100, 1), noise("div_", 100, 1))
    for last in (noise("mul_", 100, 1), noise("mul", 6400, 1)):
        assert tuple(launched((*drawn, last))) == (*drawn, last)
    one_of_two = (noise("bernoulli_", 100, 2), noise("div_", 100, 2), noise("mul", 100, 1), noise("mul_", 100, 1))
    assert sum(one.count for one in launched(one_of_two)) == 4


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_both_forms_of_dropout_take_the_same_but_for_the_mask(dtype: DType) -> None:
    """A CPU's trace has noise of the element's type where the kernel has a mask of one byte."""
    a100, count, itemsize = device_part("a100-80gb"), 10**8, dtype.item_bytes
    on_cpu = Phase(
        operations=(
            operation("bernoulli_", count, dtype, 2 * count * itemsize),
            operation("div_", count, dtype, 2 * count * itemsize),
            operation("mul", count, dtype, 3 * count * itemsize),
        )
    )
    kernel = Phase(operations=(operation("native_dropout", count, dtype, count * (2 * itemsize + 1)),))
    mask_s = (itemsize - 1) * count / (0.85 * a100.memory_bandwidth_bytes_per_s)
    assert roofline_s(on_cpu, a100) - roofline_s(kernel, a100) == pytest.approx(mask_s, rel=1e-3)


@pytest.mark.slow
def test_a_dropout_is_traced_as_what_is_spared() -> None:
    """PyTorch draws, divides and multiplies on a CPU, in tensors of one size and type."""

    def names(part: float, hardware: Hardware) -> Counter[str]:
        workload = load_workload(
            "qwen2.5-0.5b",
            batch_size=1,
            sequence_length=64,
            hardware=hardware,
            options=TrainingOptions(lora=LoraOptions(rank=4, dropout=part)),
        )
        found: Counter[str] = Counter()
        for one in launched(workload.profile_of(1).forward.operations):
            found[one.name] += one.count
        return found

    plain, for_gpu, for_cpu = names(0.0, A100), names(0.1, A100), names(0.1, ON_CPU)
    assert for_gpu - plain == {"native_dropout": 7}
    assert for_cpu - plain == {"mul": 7}
