"""Workloads that hold kernels of GPUs, asked about on CPUs, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import T5ForConditionalGeneration

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.basics.units import format_bytes, format_count
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Operation, OperationClass, Phase, QuadraticMemory, Workload
from protwin.shared.workloads.check import has_kernels_of_gpus, quadratic_words, unpacked_words
from protwin.shared.workloads.untraced import resolve_family
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search
from tests.sim.hand_made import machine

OPERATION: dict[str, Any] = {
    "name": "native_dropout",
    "operation_class": OperationClass.ELEMENTWISE,
    "dtype": DType.BFLOAT16,
    "flops": 8,
    "bytes_moved": 40,
}


def shipped(name: str) -> Workload:
    family = resolve_family(name)
    assert family is not None
    target_length = 64 if name.startswith("t5") else None
    return family.at(batch_size=2, sequence_length=64, target_length=target_length)


def test_no_kernel_is_advised_that_transformers_lacks_for_the_model() -> None:
    found = QuadraticMemory(kept_bytes=1, has_kernel=True)
    workload = shipped("t5-small").model_copy(update={"quadratic": found})
    words = quadratic_words(workload)
    assert words is not None
    assert T5ForConditionalGeneration._supports_flash_attn is False
    assert "flash_attention_2" not in words
    other = quadratic_words(workload.model_copy(update={"model_name": "one's own"}))
    assert other is not None
    assert "flash_attention_2" in other, "nobody knows of a model of one's own"


def test_shipped_models_with_dropout_hold_fused_kernels() -> None:
    """OPT and T5 have none in fused attention; Llamas and vision transformers have none at all."""
    for name in ("gpt2", "bert-large", "opt-1.3b", "t5-small"):
        workload = shipped(name)
        assert has_kernels_of_gpus(workload), name
        phases = [workload.prologue_forward, workload.epilogue_forward]
        phases += [phase for profile in workload.profiles for phase in profile.phases]
        assert "bernoulli_" not in {one.name for phase in phases for one in phase.operations}, name
    assert not has_kernels_of_gpus(shipped("llama-3.2-1b"))


def test_dropout_is_found_wherever_it_is() -> None:
    """In the sections before and behind the blocks too."""
    plain, kernel = shipped("llama-3.2-1b"), Operation(**OPERATION)
    assert not has_kernels_of_gpus(plain)
    for section in ("prologue_forward", "epilogue_forward"):
        phase = Phase(operations=(kernel,))
        assert has_kernels_of_gpus(plain.model_copy(update={section: phase})), section
        assert not has_kernels_of_gpus(plain.model_copy(update={section: phase, "traced_with": "real"})), section


def test_a_shipped_gpt2_saves_no_probabilities() -> None:
    """Bytes saved for each token do not grow with the length of the sequence."""
    family = resolve_family("gpt2-xl")
    assert family is not None
    per_token = [
        family.at(batch_size=1, sequence_length=length).profile_of(1).forward.net_bytes / length
        for length in (128, 1024)
    ]
    assert per_token[1] == pytest.approx(per_token[0], rel=1e-3)


def test_a_cpu_refuses_them() -> None:
    workload = shipped("gpt2")
    CostModel.of(workload, machine())
    with pytest.raises(WorkloadError, match="holds dropout, attention or norms as GPUs run them"):
        CostModel.of(workload, machine(kind=DeviceKind.CPU))
    # Real tensors ran the kernels of the machine that they were on.
    CostModel.of(workload.model_copy(update={"traced_with": "real"}), machine(kind=DeviceKind.CPU))
    CostModel.of(shipped("llama-3.2-1b"), machine(kind=DeviceKind.CPU))


def test_a_search_for_a_cpu_refuses_them_too() -> None:
    with pytest.raises(WorkloadError, match="holds dropout, attention or norms as GPUs run them"):
        search(SearchRequest(workload=shipped("gpt2"), hardware=machine(kind=DeviceKind.CPU)))


@pytest.mark.parametrize("experts", [None, 4])
def test_packing_that_leaves_most_weights_is_told(experts: int | None) -> None:
    """Experts are three matrices each, in two stacks of a block; a model without them has linear maps alone."""
    blocks, hidden, width = 2, 64, 128
    shape = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": blocks, "vocab_size": 64}
    config = shape | {"num_attention_heads": 2, "num_key_value_heads": 2, "model_type": "llama"}
    if experts is not None:
        config |= {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": 2}
    workload = workload_of_configuration(
        config,
        name="mine",
        batch_size=1,
        sequence_length=8,
        dtype=DType.BFLOAT16,
        options=TrainingOptions(
            lora=LoraOptions(rank=2, targets=("q_proj",)),
            quantized=QuantizationOptions(how=Quantization(type=QuantizedType.NF4, blocksize=64)),
        ),
    )
    words = unpacked_words(workload)
    if experts is None:
        assert words is None
        return
    left = blocks * experts * 3 * hidden * width
    assert words is not None
    assert f"has {format_count(left)} weights in stacks" in words
    assert f"stay in bfloat16, {format_bytes(2 * left)}, beside {format_count(blocks * 4 * hidden**2)}" in words
