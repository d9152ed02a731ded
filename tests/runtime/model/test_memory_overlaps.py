"""Two parameters over the same memory: a plain loop steps that memory twice, chunks cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import protwin.runtime.model.ownership as taken_over_module
import protwin.runtime.tracing.traceable as tracing_module
from protwin.runtime import carry_out, trace
from protwin.runtime.optimizers.chunk_optimizer import default_optimizer
from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.models import differences, llama, token_batches, uncached
from tests.runtime.watchdog import ends_in_time


def by_another_parameter(model: nn.Module) -> None:
    """What looks like tying."""
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight)


def by_a_buffer(model: nn.Module) -> None:
    model.register_buffer("view", model.model.layers[1].mlp.up_proj.weight.detach()[3:5])


def by_a_part(model: nn.Module) -> None:
    """Columns that two parameters have in common."""
    memory = torch.randn(32, 60)
    model.first, model.second = nn.Parameter(memory[:, :40]), nn.Parameter(memory[:, 39:])


def side_by_side(model: nn.Module) -> None:
    """Views of one matrix without a byte in common."""
    attention, memory = model.model.layers[0].self_attn, torch.randn(32, 32) * 0.1
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(memory[:16]), nn.Parameter(memory[16:])
    wide = torch.randn(64, 32).t() * 0.1
    attention.q_proj.weight, attention.o_proj.weight = nn.Parameter(wide[:, :32]), nn.Parameter(wide[:, 32:])


def tied(model: nn.Module) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def traced(model: nn.Module) -> Workload:
    return trace(model, token_batches(1)[0], repeats=0)


def trained(model: nn.Module, workload: Workload) -> None:
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**16, n_persist=0, n_buffer=4, n_checkpoint=2)
    with ends_in_time(), carry_out(model, plan, workload) as training:
        for batch in token_batches():
            model(**batch).loss.backward()
            training.step()


def trained_plainly(model: nn.Module) -> nn.Module:
    uncached(model)
    optimizer = default_optimizer([{"params": list(model.parameters())}])
    for batch in token_batches():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


SHARED = [
    (by_another_parameter, "embed_tokens.weight and parameter lm_head.weight are two tensors over the same memory"),
    (by_a_buffer, "up_proj.weight and buffer view are two tensors over the same memory"),
    (by_a_part, "first and parameter second are two tensors over the same memory"),
]


@pytest.mark.parametrize(("share", "message"), SHARED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_two_have_is_refused_by_a_trace(
    share: Callable[[nn.Module], None], message: str, device: str
) -> None:
    model = llama().to(device)
    with torch.device(device):
        share(model)
    with pytest.raises(WorkloadError, match=message):
        traced(model)


def test_memory_that_came_together_after_the_trace_is_refused() -> None:
    model = llama()
    workload = traced(model)
    by_another_parameter(model)
    with pytest.raises(PlanError, match="assign the parameter itself"):
        trained(model, workload)


@some_quick("share", [side_by_side, tied], quick=1)
def test_views_side_by_side_and_tied_parameters_train_like_the_plain_loop(share: Callable[[nn.Module], None]) -> None:
    model = llama()
    share(model)
    plain = trained_plainly(copy.deepcopy(model))
    trained(model, traced(model))
    assert differences(model, plain.state_dict()) == []


def test_unrefused_the_two_would_have_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant."""
    monkeypatch.setattr(tracing_module, "overlap_of", lambda _: None)
    monkeypatch.setattr(taken_over_module, "overlap_of", lambda _: None)
    model, plain = llama(), llama()
    by_another_parameter(model)
    by_another_parameter(plain)
    trained_plainly(plain)
    assert torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)
    trained(model, traced(model))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
