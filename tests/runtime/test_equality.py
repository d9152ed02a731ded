"""Every plan trains bit for bit like the plain loop, and really moves what it says it moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.runtime import carry_out, device_steps
from protwin.shared.layout import Layout, build_layout
from protwin.shared.plan import ActivationMode, Plan
from tests.runtime.models import SEED, Case, cases, differences
from tests.strategies import plans


def first(drawn: tuple[Plan, Layout]) -> Plan:
    return drawn[0]


def trained(case: Case, plan: Plan) -> tuple[list[float], list[str], dict[str, int]]:
    """Losses, names of weights that differ from plain training's, and what was counted."""
    model = case.build()
    losses = []
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
    ) as training:
        torch.manual_seed(SEED)
        for batches in case.steps(plan.micro_batches):
            for batch in batches:
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
    counted = {
        "gathers": training.num_gathers,
        "to device": training.bytes_host_to_device,
        "to host": training.bytes_device_to_host,
        "cpu adam": training.num_cpu_adam_steps,
    }
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    return losses, differences(model, plain.weights[-1]), counted


def check_counts(case: Case, plan: Plan, counted: dict[str, int]) -> None:
    """Every offloaded chunk came at least once per step, and each trainable one left and was stepped once."""
    workload = case.workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    offloaded = [chunk for chunk in layout.chunks[plan.n_persist :] if chunk.blocks]
    trainable = [chunk for chunk in offloaded if chunk.is_trainable]
    steps = len(case.batches)
    swapped_bytes = sum(
        workload.profile_of(block).swappable_bytes
        for block, mode in enumerate(plan.modes(workload.num_blocks))
        if mode is ActivationMode.SWAP
    )
    members = [workload.parameters[placed.index] for chunk in trainable for placed in chunk.parameters]
    has_gradient = [p for p in members if p.trainable and not p.name.endswith("unused")]
    assert counted["cpu adam"] == steps * len(trainable)
    forwards = steps * plan.micro_batches
    assert counted["to host"] == forwards * (sum(p.size_bytes for p in has_gradient) + swapped_bytes)
    assert counted["gathers"] >= steps * len(offloaded)
    assert counted["to device"] >= steps * sum(chunk.size_bytes for chunk in offloaded) + forwards * swapped_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_plans_equal_the_plain_loop(name: str, data: st.DataObject) -> None:
    case = cases()[name]
    plan = data.draw(plans(case.workload).map(first))
    losses, different, counted = trained(case, plan)
    assert losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert different == []
    check_counts(case, plan, counted)


def test_narrow_parameters_stepped_in_pieces_equal_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1 000 scalars, so that the parameters of a small model have several, the last one shorter."""
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 1_000)
    case = cases()["llama in bfloat16"]
    assert any(parameter.num_elements > 1_000 for parameter in case.workload.parameters)
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=2**20, n_persist=3, n_buffer=0)
    losses, different, counted = trained(case, plan)
    assert losses == case.plain.losses
    assert different == []
    assert counted["gathers"] == 0
