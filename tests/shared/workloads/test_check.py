"""Workloads that hold kernels of GPUs, asked about on CPUs."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.check import has_fused_dropout
from protwin.shared.workloads.source import resolve_family
from protwin.sim.costs.task_costs import CostModel
from tests.sim.hand_made import machine


def shipped(name: str) -> Workload:
    family = resolve_family(name)
    assert family is not None
    return family.at(batch_size=2, sequence_length=64)


def test_shipped_models_with_dropout_in_attention_hold_fused_kernels() -> None:
    for name, has_dropout in (("gpt2", True), ("bert-large", True), ("llama-3.2-1b", False), ("opt-1.3b", False)):
        assert has_fused_dropout(shipped(name)) == has_dropout, name


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
    with pytest.raises(WorkloadError, match="dropout in attention"):
        CostModel.of(workload, machine(kind=DeviceKind.CPU))
    # Real tensors ran the kernels of the machine that they were on.
    CostModel.of(workload.model_copy(update={"traced_with": "real"}), machine(kind=DeviceKind.CPU))
    CostModel.of(shipped("llama-3.2-1b"), machine(kind=DeviceKind.CPU))
