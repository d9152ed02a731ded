"""Seconds of fused attention: tiles worked out by hand, and kernels measured one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.hardware import AttentionKernel, Device
from protwin.shared.schema.workload import DType, OperationClass
from protwin.sim.operations.attention import attention_s, has_mask, kernel_of
from protwin.sim.operations.kernels import kernel_s

from .kernel_cases import attention, device

KERNELS = Path(__file__).parents[3] / "benchmarks" / "results" / "sheets-2026-11-27-h100.json"


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


@pytest.mark.parametrize(("causal", "backward"), [(False, False), (True, False), (False, True), (True, True)])
def test_values_narrower_than_queries_by_hand(causal: bool, backward: bool) -> None:
    # Latent attention of DeepSeek-V3: queries and keys 192 wide, values 128.
    like = attention(256, 1024, 192, causal=causal, backward=backward)
    widths = 3 * 192 + 2 * 128 if backward else 192 + 128
    pairs = 256 * 1024 * 1024
    narrow = like.model_copy(update={"flops": 2 * pairs * widths // (2 if causal else 1)})
    tile = 2 * 128 * 128 * widths + 2 * (14 if backward else 10) * 128 * 128
    columns = 4.5 if causal else 8
    assert attention_s(narrow, device(), 1.0) == pytest.approx(256 * 8 * columns * tile)


def test_attention_reaches_what_flash_attention_2_measured_on_an_a100() -> None:
    a100 = device_part("a100-80gb")
    for backward, low, high in ((False, 0.5, 0.73), (True, 0.44, 0.66)):
        operation = attention(16 * 16, 8192, 128, backward=backward)
        share = operation.flops / attention_s(operation, a100, 312e12) / 312e12
        assert low <= share <= high


def test_flash_attention_2_reaches_a_third_of_an_h100() -> None:
    operation = attention(16 * 16, 8192, 128)
    h100 = device_part("h100-80gb").model_copy(update={"attention_kernel": AttentionKernel.FLASH_2})
    share = operation.flops / attention_s(operation, h100, 989.4e12) / 989.4e12
    assert 0.33 <= share <= 0.45  # "only 35 % utilization", arXiv 2407.08608


def test_which_kernel_runs() -> None:
    flash, wide = attention(2, 256, 64), attention(2, 4096, 257)
    a100, h100 = device_part("a100-80gb"), device_part("h100-80gb")
    flash_2, efficient = AttentionKernel.FLASH_2, AttentionKernel.MEMORY_EFFICIENT
    assert kernel_of(flash, device_part("rtx-3090")) is flash_2
    assert kernel_of(flash, device_part("v100-32gb")) is efficient
    assert kernel_of(flash.model_copy(update={"dtype": DType.FLOAT32}), a100) is efficient
    assert kernel_of(wide, a100) is efficient
    assert attention_s(wide, a100, 312e12) > 1.3 * attention_s(attention(2, 4096, 256), a100, 312e12)
    # Neither boards of another maker nor those without 8-bit types are Hopper's, whatever their matrix units do.
    for name in ("mi300x-192gb", "mi250x-64gb", "a100-40gb", "l40s", "rtx-5090"):
        assert kernel_of(flash, device_part(name)) is flash_2, name
    # Hopper has cuDNN's, up to 128 wide.
    assert kernel_of(flash, h100) is AttentionKernel.CUDNN
    assert kernel_of(attention(2, 256, 192), h100) is flash_2
    assert kernel_of(wide, h100) is efficient
    for stated in AttentionKernel:
        told = a100.model_copy(update={"attention_kernel": stated})
        assert kernel_of(flash, told) is stated
        assert kernel_of(flash.model_copy(update={"dtype": DType.FLOAT32}), told) is efficient


def test_kernels_come_within_a_tenth_of_those_measured_one_by_one() -> None:
    """On an H100: three kernels, both directions, 2,048 to 32,768 tokens, heads of 64 and 128."""
    stated = {
        "flash_attention": AttentionKernel.FLASH_2,
        "cudnn_attention": AttentionKernel.CUDNN,
        "efficient_attention": AttentionKernel.MEMORY_EFFICIENT,
    }
    h100, seen = device_part("h100-80gb"), 0
    for row in json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]:
        found = re.fullmatch(r"attention \((\d+), (\d+), (\d+), (\d+)\), (\w+), (\w+)", row["what"])
        if found is None or found[5] not in stated:
            continue
        batch, heads, length, width = map(int, found.groups()[:4])
        operation = attention(batch * heads, length, width, causal=True, backward=found[6] == "backward")
        told = h100.model_copy(update={"attention_kernel": stated[found[5]]})
        assert attention_s(operation, told, h100.peak_flop_per_s[DType.BFLOAT16]) == pytest.approx(
            row["seconds"], rel=0.1
        ), row["what"]
        seen += 1
    assert seen == 24


def test_older_kernels_take_as_many_times_as_long_as_their_papers_say() -> None:
    """FlashAttention-2 is 1.7 to 3 times as fast as the first one, 1.3 to 2.5 times as Triton's (arXiv 2307.08691)."""
    for name in ("a100-80gb", "h100-80gb"):
        card = device_part(name)
        peak = card.peak_flop_per_s[DType.BFLOAT16]

        def seconds(kernel: AttentionKernel, card: Device = card, peak: float = peak) -> float:
            return attention_s(attention(64, 4096, 128), card.model_copy(update={"attention_kernel": kernel}), peak)

        flash_2 = seconds(AttentionKernel.FLASH_2)
        assert 1.7 <= seconds(AttentionKernel.FLASH_1) / flash_2 <= 3
        assert 1.3 <= seconds(AttentionKernel.TRITON) / flash_2 <= 2.5
    # "1.5 to 2.0 times" FlashAttention-2 forward (arXiv 2407.08608).
    assert 1.5 <= flash_2 / seconds(AttentionKernel.FLASH_3) <= 2.0


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
        assert (kernel_of(operation, device_part("a100-80gb")) is AttentionKernel.FLASH_2) != is_masked


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
