"""Device memory is what the schedule accounts for, pinned memory what it says, and both are given back."""

from __future__ import annotations

import gc
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from protwin.runtime import CudaDevice, Training, carry_out, trace
from protwin.shared.basics.errors import DeviceOutOfMemoryError, PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.gpu.subject import CHECKPOINT, DEVICE, KEEP, SWAP, make_device, on_device
from tests.runtime.models import VOCABULARY, adamw, llama, token_batches

pytestmark = pytest.mark.gpu

WIDTH = 512
BATCH = token_batches(1, batch=8, length=256)[0]
CHUNK_BYTES = 8 * 2**20
ROUNDING_FRAC = 0.02
"""The allocator rounds every tensor up to 512 bytes, and kernels have workspaces that no dispatch mode sees."""


def build() -> nn.Module:
    """Blocks of 16 MiB, whose tensors are large beside what the allocator rounds."""
    return llama(
        num_layers=6,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )


@cache
def traced() -> Workload:
    """The model's workload on the GPU itself, and what libraries keep for good afterwards."""
    model = build().to(DEVICE)
    return trace(model, on_device(BATCH), repeats=1)


def plan_of(modes: tuple[ActivationMode, ...], *, n_persist: int = 0, micro_batches: int = 1) -> Plan:
    workload = traced()
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    fewest = layout.min_buffers(n_persist)
    chosen = tuple(modes[block % len(modes)] for block in range(workload.num_blocks))
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_buffer=fewest + 1 if fewest else 0,
        activation_modes=chosen,
        n_swap=chosen.count(SWAP),
        n_checkpoint=chosen.count(CHECKPOINT),
        micro_batches=micro_batches,
    )


def step(training: Training, batch: dict[str, torch.Tensor]) -> None:
    for _ in range(training.plan.micro_batches):
        training.model(**batch).loss.backward()
    training.step()


def level() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("modes", [(KEEP,), (CHECKPOINT,), (SWAP,), (SWAP, CHECKPOINT, KEEP)])
@pytest.mark.parametrize("n_persist", [0, 4])
def test_the_allocators_peak_is_the_one_that_the_schedule_guarantees(
    modes: tuple[ActivationMode, ...], n_persist: int
) -> None:
    plan = plan_of(modes, n_persist=n_persist)
    batch = on_device(BATCH)
    model = build()
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    # What cuBLAS keeps for good, for the threads that run forward and backward.
    warm = nn.Linear(WIDTH, WIDTH, device=DEVICE)
    warm(torch.ones(8, WIDTH, device=DEVICE)).sum().backward()
    del warm
    before_bytes = level() - batch_bytes
    with carry_out(model, plan, traced(), optimizer=adamw, device=make_device()) as training:
        for _ in range(6):
            step(training, batch)
        record = training.record()
        curve = record.curve(Memory.DEVICE)
    assert curve is not None
    measured = curve.peak_bytes - before_bytes
    guaranteed = record.guaranteed_peak_device_bytes
    assert 0.9 * guaranteed <= measured <= (1 + ROUNDING_FRAC) * guaranteed
    assert curve.peak_at
    assert curve.levels_bytes
    assert all(earlier <= later for earlier, later in pairwise(curve.times_s))


def test_closing_gives_everything_back_and_steps_grow_nothing() -> None:
    batch, model = on_device(BATCH), build()
    plan = plan_of((SWAP, CHECKPOINT, KEEP), n_persist=4)
    step_levels = []
    before_bytes = level()
    device = CudaDevice()
    with carry_out(model, plan, traced(), optimizer=adamw, device=device) as training:
        assert device.pinned.size_bytes == training.schedule.static_bytes(Memory.PINNED_HOST) > 0
        for number in range(16):
            step(training, batch)
            if number >= 5:
                step_levels.append(level())
    assert max(step_levels) - min(step_levels) <= 2**20
    assert device.pinned.size_bytes == 0
    after_bytes = level()
    # cuBLAS may have made its workspaces meanwhile: at most 32 MiB for each of two threads, and again for cuBLASLt.
    assert after_bytes - before_bytes <= 128 * 2**20
    with carry_out(model, plan, traced(), optimizer=adamw, device=device) as training:
        step(training, batch)
    assert level() == after_bytes


def test_host_buffers_are_pinned_and_of_exact_size() -> None:
    device = CudaDevice()
    buffer = device.host_buffer(5_000_001)
    assert device.pinned.size_bytes == 5_000_001
    assert buffer.is_pinned()
    source = torch.arange(5_000_001, device=DEVICE).to(torch.uint8)
    device.copy(buffer, source, to_device=False)
    device.synchronize()
    assert torch.equal(buffer, source.cpu())
    del buffer
    gc.collect()
    assert device.pinned.size_bytes == 0


def test_a_budget_that_the_plan_may_exceed_is_refused_before_anything_moves() -> None:
    model, device = build(), CudaDevice(budget_bytes=48 * 2**20)
    before_bytes = level()
    with pytest.raises(PlanError, match="device memory may reach"):
        carry_out(model, plan_of((KEEP,)), traced(), optimizer=adamw, device=device)
    assert level() == before_bytes
    assert device.pinned.size_bytes == 0


def test_memory_that_others_hold_runs_out_in_a_step_and_nothing_stays() -> None:
    plan = plan_of((KEEP,))
    batch, model = on_device(BATCH), build()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    before_bytes = level()
    fraction = torch.cuda.get_per_process_memory_fraction(DEVICE)
    peak_bytes = guaranteed_bytes(plan)
    device = CudaDevice(budget_bytes=before_bytes + peak_bytes)
    of_others = torch.empty(peak_bytes // 2, dtype=torch.uint8, device=DEVICE)

    def train() -> None:
        with carry_out(model, plan, traced(), optimizer=adamw, device=device) as training:
            step(training, batch)

    with pytest.raises(torch.OutOfMemoryError):
        train()
    del of_others
    assert torch.cuda.get_per_process_memory_fraction(DEVICE) == fraction
    assert level() - before_bytes <= 128 * 2**20
    assert device.pinned.size_bytes == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    with carry_out(model, plan, traced(), optimizer=adamw, device=make_device()) as training:
        step(training, batch)


def test_persistent_chunks_that_do_not_fit_are_named() -> None:
    everything = plan_of((KEEP,), n_persist=len(chunks()))
    device = CudaDevice(budget_bytes=level() + guaranteed_bytes(everything))
    of_others = torch.empty(guaranteed_bytes(everything) - 24 * 2**20, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(DeviceOutOfMemoryError, match=r"chunk \d+ needs 8"):
        carry_out(build(), everything, traced(), optimizer=partial(adamw), device=device)
    del of_others


def guaranteed_bytes(plan: Plan) -> int:
    return guaranteed_device_peak(compile_schedule(plan, traced())).size_bytes


def chunks() -> tuple[object, ...]:
    workload = traced()
    return tuple(build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES).chunks)
