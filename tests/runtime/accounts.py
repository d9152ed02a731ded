"""Plans of every mode and residency, and the peak that each is measured to have with settled lanes."""

from __future__ import annotations

import gc
from typing import Any

import torch

from protwin.runtime import CpuDevice, carry_out
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.eager_lanes import WATCHED, AccountedPeak, settled_lanes
from tests.runtime.models import SEED, Case, held, snapshot

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
OFFLOAD_INPUT = ActivationMode.OFFLOAD_INPUT
MIXTURES = {
    "kept": (KEEP,),
    "checkpointed": (CHECKPOINT,),
    "swapped": (SWAP,),
    "mixed": (SWAP, CHECKPOINT, KEEP),
    "inputs offloaded": (OFFLOAD_INPUT,),
    "mixed inputs": (KEEP, OFFLOAD_INPUT, SWAP, OFFLOAD_INPUT),
}
RESIDENCIES = ("persistent", "host-stepped", "offloaded", "mixed")
CHUNK_BYTES = 9_000
BAR = 0.005


def plan_of(case: Case, mixture: str, residency: str, *, micro_batches: int = 1) -> Plan:
    """Every block in a mode of the mixture; all chunks in one residency, or in equal parts in each."""
    workload = case.workload
    modes = tuple(MIXTURES[mixture][block % len(MIXTURES[mixture])] for block in range(workload.num_blocks))
    layout = layout_of(workload, CHUNK_BYTES)
    num_chunks = len(layout.chunks)
    n_persist = {"persistent": num_chunks, "mixed": num_chunks // 3}.get(residency, 0)
    n_host_stepped = {"host-stepped": num_chunks, "mixed": num_chunks // 3}.get(residency, 0)
    counts: dict[str, Any] = mode_counts(modes)
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=layout.min_buffers(n_persist + n_host_stepped) + (residency != "persistent"),
        prefetch_depth=2,
        **counts,
        activation_modes=modes,
        micro_batches=micro_batches,
    )


def carried_out(case: Case, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights, on a device with the memory that the plan is guaranteed to need and no more."""
    model, losses = case.build(), []
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice(limit_bytes)
    ) as training:
        torch.manual_seed(SEED)
        for batches in case.steps(plan.micro_batches):
            for batch in held(case, batches):
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
                # A loss that is kept counts beside the next forward.
                del loss
            training.step()
    return losses, snapshot(model)


def measured_peak_bytes(case: Case, plan: Plan) -> int:
    """With settled lanes; afterwards nothing is left."""
    device, model = CpuDevice(), case.build()
    torch.manual_seed(SEED)
    with carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=device,
    ) as training:
        with settled_lanes(training):
            for batches in case.steps(plan.micro_batches)[:WATCHED]:
                for batch in held(case, batches):
                    case.loss(model, batch).backward()
                training.step()
        peak_bytes = training.peak_device_bytes
    # Buffers, and what the model keeps besides, live as long as the model.
    del batch, model, training
    gc.collect()
    assert device.ledger.named_bytes == device.ledger.watched_bytes == 0
    return peak_bytes


def error_frac(measured_bytes: int, accounted: AccountedPeak) -> float:
    """How far a measured peak is outside what is accounted for; negative below it."""
    if measured_bytes < accounted.low_bytes:
        return measured_bytes / accounted.low_bytes - 1
    return max(0.0, measured_bytes / accounted.high_bytes - 1)
