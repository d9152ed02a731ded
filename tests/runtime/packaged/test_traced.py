"""Models of transformers traced by the kernels of packages: what is called, what results, what is refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, BambaConfig, MambaConfig

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.packaged.substitution import missing_packages
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.phases.operations import left_out_words
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import KernelPackage, Workload
from protwin.shared.tables.workloads import workload_tables
from tests.runtime.packaged.test_reference_kernels import MAMBA, QWEN, built
from tests.runtime.resuming import kept

FLA, SSM, CONV = KernelPackage.FLASH_LINEAR_ATTENTION, KernelPackage.MAMBA_SSM, KernelPackage.CAUSAL_CONV1D
FIRST = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, intermediate_size=64)
HYBRID = BambaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    attn_layer_indices=[1],
    num_attention_heads=2,
    num_key_value_heads=1,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_chunk_size=8,
)


def bytes_of_blocks(workload: Workload) -> int:
    return sum(workload.profiles[block.profile].swappable_bytes for block in workload.blocks)


@pytest.mark.parametrize(
    ("config", "kernels", "left_out"),
    [(QWEN, (FLA, CONV), ()), (QWEN, (FLA,), (CONV,)), (MAMBA, (SSM,), ()), (FIRST, (SSM,), ()), (HYBRID, (SSM,), ())],
    ids=["qwen3-next", "qwen3-next-fla", "mamba2", "mamba", "bamba"],
)
def test_less_is_kept_than_by_the_reference(config: Any, kernels: tuple[KernelPackage, ...], left_out: Any) -> None:
    model, batch = built(config, is_meta=True)
    functions = dict(vars(sys.modules[type(model).__module__]))
    plain, found = trace(model, batch), trace(model, batch, kernels=kernels)
    assert functions == vars(sys.modules[type(model).__module__])
    assert found.kernels_taken == tuple(sorted(kernels))
    assert found.kernels_left_out == left_out
    assert set(plain.kernels_left_out) >= {*kernels, *left_out}
    assert bytes_of_blocks(found) < bytes_of_blocks(plain)
    assert {p.name: p.num_elements for p in found.parameters} == {p.name: p.num_elements for p in plain.parameters}
    assert [block.profile for block in found.blocks] == [block.profile for block in plain.blocks]
    assert [p.output_bytes for p in found.profiles] == [p.output_bytes for p in plain.profiles]
    assert Workload.from_mapping(json.loads(found.to_json()), origin="test") == found
    told = " ".join(str(row) for row in workload_tables(found)[0].rows)  # type: ignore[union-attr]
    assert f"of {', '.join(found.kernels_taken)}" in told


def test_fused_layers_call_the_convolution_themselves() -> None:
    model, batch = built(MAMBA, is_meta=True)
    assert trace(model, batch, kernels=(SSM, CONV)).kernels_taken == (SSM,)
    with pytest.raises(WorkloadError, match="calls none of them"):
        trace(model, batch, kernels=(SSM, FLA))


def test_adapters_and_frozen_weights_go_with_them() -> None:
    options = TrainingOptions(lora=LoraOptions(rank=4), kernels=(FLA, CONV))
    found = workload_of_configuration(
        QWEN.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]},
        name="tiny",
        batch_size=2,
        sequence_length=70,
        dtype="bfloat16",
        options=options,
    )
    assert found.kernels_taken == (CONV, FLA)


@pytest.mark.parametrize(
    ("config", "is_meta", "kernels", "kind", "said"),
    [
        (QWEN, True, (SSM,), DeviceKind.CUDA, "Qwen3NextForCausalLM calls none of them. Leave --kernels mamba-ssm out"),
        (QWEN, True, ("triton",), DeviceKind.CUDA, "known are those of flash-linear-attention, mamba-ssm"),
        (QWEN, True, "flash-linear-attention", DeviceKind.CPU, "they run on GPUs, and this is a CPU"),
        (QWEN, False, (FLA,), DeviceKind.CUDA, "the model has weights, and runs as it is"),
    ],
)
def test_what_no_kernel_is_known_of_is_refused(
    config: Any, is_meta: bool, kernels: Any, kind: DeviceKind, said: str
) -> None:
    model, batch = built(config, is_meta=is_meta)
    with pytest.raises(WorkloadError, match=said):
        trace(model, batch, kernels=kernels, device_kind=kind, repeats=0)


def test_a_machine_without_the_package_carries_no_plan_of_it_out() -> None:
    model, batch = built(QWEN, is_meta=True)
    workload = trace(model, batch, kernels=(FLA,))
    assert missing_packages((FLA,)) == (FLA,)
    real = AutoModelForCausalLM.from_config(QWEN)
    with pytest.raises(PlanError, match="Install flash-linear-attention, or trace the model without"):
        carry_out(real, kept(workload), workload, device=CpuDevice())


def test_what_is_left_out_names_the_option() -> None:
    words = left_out_words((CONV, FLA), "mine")
    assert words is not None
    assert "add --kernels causal-conv1d --kernels flash-linear-attention if the machine that trains has them" in words
