"""No routing takes more memory than is guaranteed, and the guarantee is near what the worst routing takes."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
import torch

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.distillation.distil import distil
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.engine.simulator import simulate
from tests.proof_size import examples, some_quick
from tests.runtime.distillation.cases import adamw, mse
from tests.runtime.models import llama, token_batches
from tests.runtime.routing.mixtures import batch_of, built, random_plan, skewed, workload_of
from tests.shared.full_machine import full_hardware

SKEWS = (0.0, 1.0, 100.0)
MOST_ABOVE_FRAC = 0.25


def peaks(name: str, plan: Plan, seed: int) -> list[int]:
    """Measured, by skew of the routers."""
    found = []
    for skew in SKEWS:
        device, model = CpuDevice(), skewed(name, skew, seed)
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        with carry_out(model, plan, workload_of(name), optimizer=adamw, device=device) as training:
            for step in range(2):
                for micro_batch in range(plan.micro_batches):
                    training.model(**batch_of(seed + 2 * step + micro_batch))["loss"].backward()
                training.step()
            found.append(training.peak_device_bytes)
    return found


def guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def check(name: str, seeds: range) -> None:
    workload = workload_of(name)
    assert all(profile.seen is not None and profile.seen.is_forced for profile in workload.profiles)
    num_above_seen = 0
    plans = [random_plan(workload, random.Random(seed)) for seed in seeds]
    for seed, plan in enumerate((offloaded(workload), *plans), start=seeds.start):
        verify_schedule(compile_schedule(plan, workload), plan, workload)
        measured, most_bytes = max(peaks(name, plan, seed)), guaranteed_bytes(plan, workload)
        # What timing alone may take is no matter of routing.
        timing_bytes = guaranteed_bytes(plan, workload.as_seen)
        assert measured <= most_bytes <= (1 + MOST_ABOVE_FRAC) * max(measured, timing_bytes), (plan, measured)
        num_above_seen += measured > timing_bytes
    # The wrong variant: what the traced batch took is no guarantee.
    assert num_above_seen > 0


def offloaded(workload: Workload) -> Plan:
    """Everything on the host, nothing checkpointed: the peak is in the blocks."""
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=20_000,
        n_persist=0,
        n_buffer=layout_of(workload, 20_000).min_buffers(0),
        prefetch_depth=1,
    )


def on_device(workload: Workload) -> Plan:
    """Everything persistent, all blocks checkpointed."""
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=20_000,
        n_persist=len(layout_of(workload, 20_000).chunks),
        n_buffer=0,
        n_checkpoint=workload.num_blocks,
    )


@some_quick("name", ["mixtral", "masks", "threshold"], quick=["mixtral"])
def test_no_routing_takes_more_than_is_guaranteed(name: str) -> None:
    check(name, range(examples(2, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "masks", "threshold", "olmoe"])
def test_no_routing_takes_more_than_is_guaranteed_in_many_cases(name: str) -> None:
    check(name, range(100, 150))


def test_predictions_come_from_what_was_seen_and_guarantees_from_the_worst() -> None:
    machine = full_hardware()
    workload = workload_of("mixtral")
    plan = on_device(workload).model_copy(update={"micro_batches": 3})
    worst, seen = (simulate(plan, one, machine) for one in (workload, workload.as_seen))
    assert worst.peak_device_bytes == seen.peak_device_bytes <= seen.guaranteed_peak_device_bytes
    assert seen.guaranteed_peak_device_bytes < worst.guaranteed_peak_device_bytes
    assert worst.iteration_s == seen.iteration_s
    assert workload.identity == workload.as_seen.identity
    assert Workload.from_mapping(json.loads(workload.to_json()), origin="a file") == workload


def test_a_model_whose_memory_depends_on_no_values_has_one_set_of_figures() -> None:
    workload = trace(llama(num_layers=2), token_batches(1)[0], repeats=0)
    assert workload.as_seen is workload
    assert "seen" not in workload.to_json()


def test_pairs_of_mixtures_take_no_more_than_is_guaranteed() -> None:
    batch = {"input_ids": batch_of(0)["input_ids"]}
    workload = trace_distillation(built("mixtral"), built("mixtral"), batch, mse, repeats=0)
    assert all(profile.seen is not None for profile in workload.profiles)
    layout = layout_of(workload, 20_000)
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=20_000,
        n_persist=len(layout.chunks),
        n_buffer=0,
    )
    device = CpuDevice()
    with distil(
        skewed("mixtral", 100.0, 1), skewed("mixtral", 100.0, 1), plan, workload, mse, optimizer=adamw, device=device
    ) as training:
        for _ in range(2):
            training(**batch)
            training.step()
        peak_bytes = training.peak_device_bytes
    assert peak_bytes <= guaranteed_bytes(plan, workload) <= (1 + MOST_ABOVE_FRAC) * peak_bytes
    assert guaranteed_bytes(plan, workload.as_seen) < guaranteed_bytes(plan, workload)
