"""Liger's fused loss, which forms no whole logits, under a plan: its kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import adamw, differences, llama, snapshot, token_batches, uncached
from tests.runtime.resuming import plan_of

pytestmark = pytest.mark.filterwarnings("default")  # Triton's and transformers' own


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton reads the variable when it is imported; neither package comes with what tests install."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    return pytest.importorskip("liger_kernel.transformers").apply_liger_kernel_to_llama


def with_fused_loss(apply: Any) -> nn.Module:
    model = uncached(llama())
    apply(model=model, rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True)
    return model


def test_the_fused_loss_trains_by_a_plan_as_in_the_plain_loop(apply: Any) -> None:
    model, plain, batches = with_fused_loss(apply), with_fused_loss(apply), token_batches(3)
    assert plain(**batches[0]).logits is None
    workload = trace(model, batches[0], repeats=0)
    plan = plan_of(workload, chunk_bytes=9_000, n_persist=0, n_checkpoint=2)
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    optimizer = adamw([{"params": list(plain.parameters())}])
    with carry_out(model, plan, workload, optimizer=adamw, device=CpuDevice(limit_bytes)) as training:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            expected = plain(**batch).loss
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(loss.detach(), expected.detach())
        assert training.num_gathers > 0
    assert differences(model, snapshot(plain)) == []


def test_its_loss_has_no_tiles_of_ours(apply: Any) -> None:
    with pytest.raises(PlanError, match=r"loss_tiles is 2, but LlamaForCausalLM computes its loss by Liger's kernel"):
        trace(with_fused_loss(apply), token_batches(1)[0], repeats=0, loss_tiles=2)
