"""Packed batches under plans: the plain loop's bits, and what each sample gives by itself."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import OperationClass, Phase
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import random_plans, trained
from tests.runtime.models import Case, gpt2, llama, uncached
from tests.runtime.packed import ends_of, packed_batch

LENGTHS = (5, 9, 10)
BATCHES = tuple(packed_batch(lengths, seed) for seed, lengths in enumerate((LENGTHS, (10, 5, 9), (3, 20, 1), (12, 12))))
BUILDS: dict[str, Any] = {
    "llama, sdpa": partial(llama, num_layers=3),
    "llama, eager": partial(llama, num_layers=3, attn_implementation="eager"),
    "gpt2, sdpa": partial(gpt2, num_layers=2, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0),
}


@cache
def case_of(name: str) -> Case:
    return Case(BUILDS[name], BATCHES)


@some_quick(("name", "seed"), [(name, seed) for name in BUILDS for seed in (1, 2)], quick=2)
def test_random_plans_equal_the_plain_loop(name: str, seed: int) -> None:
    case = case_of(name)
    for plan in random_plans(case.workload, 3, seed=seed):
        outcome = trained(case, plan, CpuDevice())
        assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
        assert outcome.different == []


@pytest.mark.parametrize(("mixture", "residency"), [("mixed", "offloaded"), ("inputs offloaded", "mixed")])
def test_the_peak_is_the_account(mixture: str, residency: str) -> None:
    """With the mask, which the trace of the packed row has."""
    case = case_of("llama, sdpa")
    plan = plan_of(case, mixture, residency)
    assert abs(error_frac(measured_peak_bytes(case, plan), eager_peak(compile_schedule(plan, case.workload)))) <= BAR


@some_quick("name", BUILDS, quick=1)
def test_samples_give_what_they_give_by_themselves(name: str) -> None:
    """Sums of token losses; float32 sums of a few hundred terms differ by their order, 1e-5 of the largest gradient.

    A row whose samples see each other is far off.
    """
    batch = BATCHES[0]
    model = uncached(BUILDS[name]()).train()
    workload = trace(model, batch, repeats=0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=9000, n_persist=0, n_buffer=8, n_checkpoint=1)
    twin = copy.deepcopy(model)
    expected = gradients_of_samples(copy.deepcopy(model), batch)
    optimizer = partial(torch.optim.SGD, lr=1.0)
    with carry_out(model, plan, workload, optimizer=optimizer) as training:
        summed(model, batch).backward()
        training.step()
    weights = zip(twin.named_parameters(), model.parameters(), strict=True)
    found = {name: (before - after).detach() for (name, before), after in weights}
    assert difference(found, expected) <= 1e-5
    assert difference(gradients_of(twin, {**batch, "position_ids": torch.arange(24)[None]}), expected) > 1e-2


def summed(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of the losses of all tokens that have one."""
    return model(**batch, num_items_in_batch=1).loss


def gradients_of(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    summed(model, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients_of_samples(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tokens, labels in zip(*(batch[name][0].split(LENGTHS) for name in ("input_ids", "labels")), strict=True):
        summed(model, {"input_ids": tokens[None], "labels": labels[None]}).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest, relative to the largest gradient."""
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


def test_a_batch_that_mixes_samples_is_refused_and_the_next_one_trains() -> None:
    case = case_of("llama, sdpa")
    model = case.build()
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=9000, n_persist=0, n_buffer=8)
    with carry_out(model, plan, case.workload) as training:
        with pytest.raises(WorkloadError, match="takes each row for one sample"):
            model(**case.batches[0], attention_mask=torch.ones(1, 24))
        model(**case.batches[0]).loss.backward()
        training.step()


@some_quick("attention", ["sdpa", "eager"], quick=1)
def test_a_model_without_weights_is_traced_with_the_mask_that_trains(attention: str) -> None:
    model = llama(num_layers=3, attn_implementation=attention)
    real, fake = (trace(copy.deepcopy(model).to(device), BATCHES[0], repeats=0) for device in ("cpu", "meta"))
    assert real.packing == fake.packing
    assert fake.packing is not None
    assert fake.packing.is_masked
    for ours, theirs in zip(fake.profiles, real.profiles, strict=True):
        assert ours.phases == theirs.phases


def test_lengths_for_flash_attention_need_no_mask_and_their_squares_alone() -> None:
    """A row's attention is the sum of the samples', each traced by itself; what is kept is the whole row's."""
    model = llama(num_layers=2).to("meta")
    batch = packed_batch(LENGTHS)
    told = trace(model, batch | ends_of(LENGTHS), repeats=0)
    assert told.packing is not None
    assert not told.packing.is_masked
    alone = [trace(model, packed_batch((length,)), repeats=0) for length in LENGTHS]
    whole = trace(model, packed_batch((sum(LENGTHS),)), repeats=0)
    for phase in ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward"):
        for operation_class in (OperationClass.ATTENTION, OperationClass.MATMUL):
            of_row, *of_samples = [
                flops_of(getattr(found.profiles[1], phase), operation_class) for found in (told, *alone)
            ]
            assert of_row == sum(of_samples)
        assert getattr(told.profiles[1], phase).net_bytes == getattr(whole.profiles[1], phase).net_bytes
    of_whole = flops_of(whole.profiles[1].forward, OperationClass.ATTENTION)
    of_row = flops_of(told.profiles[1].forward, OperationClass.ATTENTION)
    assert of_row * 24**2 == of_whole * sum(length**2 for length in LENGTHS)


def flops_of(phase: Phase, operation_class: OperationClass) -> int:
    return sum(op.flops * op.count for op in phase.operations if op.operation_class is operation_class)
