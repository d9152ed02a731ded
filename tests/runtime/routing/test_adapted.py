"""No routing takes more memory than is guaranteed where a mixture trains adapters alone."""

from __future__ import annotations

import random
from functools import lru_cache, partial

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, add_lora, carry_out, trace
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.proof_size import examples
from tests.runtime.routing.mixtures import batch_of, built, random_plan, skewed
from tests.runtime.routing.test_worst_memory import guaranteed_bytes, offloaded

RANK = 4
SKEWS = (0.0, 100.0)


def adapted(model: nn.Module, *, has_adapters: bool) -> nn.Module:
    if has_adapters:
        torch.manual_seed(0)
        add_lora(model, rank=RANK)
    return model


@lru_cache
def workload_of(name: str, has_adapters: bool) -> Workload:
    return trace(adapted(built(name), has_adapters=has_adapters), batch_of(0), repeats=0)


def peak_bytes(name: str, plan: Plan, workload: Workload, has_adapters: bool, skew: float, seed: int) -> int:
    """Measured over two steps; ``seed``: of routers and batches."""
    model = adapted(skewed(name, skew, 1), has_adapters=has_adapters)
    make = partial(torch.optim.AdamW, lr=1e-3)
    with carry_out(model, plan, workload, optimizer=make, device=CpuDevice()) as training:
        for step in range(2):
            for micro_batch in range(plan.micro_batches):
                training.model(**batch_of(seed + 2 * step + micro_batch))["loss"].backward()
            training.step()
        return training.peak_device_bytes


@pytest.mark.parametrize("name", ["masks", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_no_routing_takes_more_than_is_guaranteed_where_adapters_alone_learn(name: str) -> None:
    workload = workload_of(name, True)
    assert all(profile.seen is not None and profile.seen.is_forced for profile in workload.profiles)
    assert any(not parameter.trainable for parameter in workload.parameters)
    num_above_seen = 0
    plans = [random_plan(workload, random.Random(seed)) for seed in range(examples(50, 1))]
    for plan in (offloaded(workload), *plans):
        measured = max(peak_bytes(name, plan, workload, True, skew, 1) for skew in SKEWS)
        assert measured <= guaranteed_bytes(plan, workload), plan
        num_above_seen += measured > guaranteed_bytes(plan, workload.as_seen)
    # The wrong variant: what the traced batch took is no guarantee.
    assert num_above_seen > 0
