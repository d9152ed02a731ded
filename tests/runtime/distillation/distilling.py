"""Distillation by a plan beside the reference: the same bits, and what it moved on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from tempfile import TemporaryDirectory

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.distillation.distil import Distilling, distil
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, layout_of
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.distillation.cases import (
    adamw,
    changed,
    expected,
    mse,
    quiet,
    snapshot,
    steps_of,
    unlike,
    unlike_moments,
)
from tests.runtime.distillation.families import families
from tests.runtime.eager_lanes import WATCHED, settled_lanes
from tests.runtime.equality import FAST_FOLDER, different
from tests.strategies.plans import CHUNK_BYTES

CLIPPED_NORM = 1.0
"""Between the norms of the gradients of the families' blocks: some steps are clipped."""


@lru_cache
def workload_of(name: str) -> Workload:
    """A family, traced without times."""
    family = families()[name]
    with quiet():
        return trace_distillation(family.teacher(), family.student(), family.batches(1)[0], mse, repeats=0)


@st.composite
def bypass_plans(draw: DrawFn, workload: Workload) -> tuple[Plan, Layout]:
    """A plan that ``workload`` can follow, and its layout; with chunks on a disk in every other plan."""
    chunk_bytes = draw(st.sampled_from(CHUNK_BYTES[:5]) | st.integers(1_000, 20_000))
    layout = layout_of(workload, chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = draw(st.integers(0, num_chunks))
    n_host_stepped = draw(st.just(0) | st.integers(0, num_chunks - n_persist))
    n_disk_state = draw(st.just(0) | st.integers(0, num_chunks - n_persist - n_host_stepped))
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_disk_state=n_disk_state,
        n_disk=draw(st.integers(0, n_disk_state)),
        n_staging=draw(st.integers(1, 3)) if n_disk_state else 0,
        n_buffer=layout.min_buffers(n_persist + n_host_stepped) + draw(st.integers(0, 5) | st.just(num_chunks)),
        prefetch_depth=draw(st.integers(1, 4)),
        micro_batches=draw(st.sampled_from((2, 1, 3))),
        max_gradient_norm=draw(st.sampled_from((None, CLIPPED_NORM))),
    )
    return plan, layout


def random_bypass_plans(name: str, number: int, seed: int) -> list[Plan]:
    """So many different plans for a family, the same ones for the same seed."""
    return different(bypass_plans(workload_of(name)), number, seed)


@dataclass(frozen=True)
class Outcome:
    """What a distillation by a plan gave."""

    wrong: list[str]
    """What is not, bit for bit, what the reference has."""
    num_gathers: int
    num_cpu_adam_steps: int
    to_device_bytes: int
    to_host_bytes: int
    read_bytes: int
    written_bytes: int


def distilled(name: str, plan: Plan, steps: int, device: CpuDevice | None = None) -> Outcome:
    """Train for so many steps, on ``device`` or on one of just the memory that is guaranteed to be enough."""
    reference = expected(name, plan.micro_batches, steps, plan.max_gradient_norm)
    family, workload = reference.family, workload_of(name)
    teacher, student = family.teacher(), family.student()
    before = snapshot(teacher)
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    losses: list[list[list[float]]] = []
    with beginning(teacher, student, plan, workload, device or CpuDevice(limit_bytes)) as training:
        for batches in reference.steps:
            losses.append([training(**batch).tolist() for batch in batches])
            training.step()
        state = state_by_name(training)
    wrong = [f"teacher.{tensor}" for tensor in changed(teacher, before)]
    for index, (block, alone) in enumerate(zip(family.blocks, reference.learnt, strict=True)):
        if [[of_pairs[index] for of_pairs in step] for step in losses] != alone.losses:
            wrong.append(f"losses of {block}")
        wrong += [f"student.{block}.{tensor}" for tensor in unlike(alone, student.get_submodule(block))]
        prefix = f"student.{block}."
        wrong += unlike_moments(alone, {n.removeprefix(prefix): s for n, s in state.items() if n.startswith(prefix)})
    return outcome_of(training, wrong)


@contextmanager
def beginning(
    teacher: nn.Module, student: nn.Module, plan: Plan, workload: Workload, device: CpuDevice
) -> Iterator[Distilling]:
    """A distillation with a folder for what its plan has on the disk."""
    with (
        quiet(),
        TemporaryDirectory(dir=FAST_FOLDER) as folder,
        distil(teacher, student, plan, workload, mse, optimizer=adamw, device=device, disk_folder=folder) as training,
    ):
        yield training


def state_by_name(training: Distilling) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of every parameter that has one, by its name in the pairs."""
    state = training.optimizer.state_dict()["state"]
    names = [name for name, parameter in training.model.named_parameters() if parameter.requires_grad]
    return {names[index]: moments for index, moments in state.items()}


def outcome_of(training: Distilling, wrong: list[str]) -> Outcome:
    """With what a closed training has counted."""
    return Outcome(
        wrong,
        num_gathers=training.num_gathers,
        num_cpu_adam_steps=training.num_cpu_adam_steps,
        to_device_bytes=training.bytes_host_to_device,
        to_host_bytes=training.bytes_device_to_host,
        read_bytes=training.bytes_read_from_disk,
        written_bytes=training.bytes_written_to_disk,
    )


def miscounted(name: str, plan: Plan, outcome: Outcome, steps: int) -> list[str]:
    """What was not moved or not stepped as the plan says.

    Every chunk that the host has comes at least once per step, those of the teacher in every micro-batch; each
    trainable one leaves in every micro-batch and is stepped once.
    """
    workload = workload_of(name)
    layout = layout_of(workload, plan.chunk_bytes)
    kept = plan.n_persist + plan.n_host_stepped
    on_host = [c for c in layout.chunks[plan.n_persist :] if c.id >= kept or c.is_trainable]
    trainable = [chunk for chunk in on_host if chunk.is_trainable]
    has_gradient = {
        f"student.{block}.{parameter}"
        for block, learnt in zip(families()[name].blocks, expected(name, plan.micro_batches, steps).learnt, strict=True)
        for parameter in learnt.gradients[0]
    }
    leaving = [
        parameter
        for chunk in trainable
        for placed in chunk.parameters
        if (parameter := workload.parameters[placed.index]).name in has_gradient
    ]
    wanted = {
        "CPU Adam steps": (outcome.num_cpu_adam_steps, steps * len(trainable)),
        "bytes to the host": (
            outcome.to_host_bytes,
            steps * plan.micro_batches * sum(parameter.size_bytes for parameter in leaving),
        ),
    }
    found = [f"{ours} {what}, expected {theirs}" for what, (ours, theirs) in wanted.items() if ours != theirs]
    if outcome.num_gathers < steps * len(on_host):
        found.append(f"{outcome.num_gathers} gathers, expected at least {steps * len(on_host)}")
    if outcome.to_device_bytes < steps * sum(chunk.size_bytes for chunk in on_host):
        found.append(f"{outcome.to_device_bytes} bytes to the device are too few")
    if plan.n_disk_state and trainable and layout.chunks[-1].is_trainable and not outcome.written_bytes:
        found.append("nothing was written to the disk")
    return found


def is_offloading(name: str, plan: Plan) -> bool:
    """Whether several chunks are on the host, some of which it steps."""
    layout = layout_of(workload_of(name), plan.chunk_bytes)
    away = layout.chunks[plan.n_persist + plan.n_host_stepped :]
    return len(away) >= 2 and any(chunk.is_trainable for chunk in away)


CHUNK_BYTES_OF_ACCOUNTS = 9_000


def plan_in(name: str, residency: str, *, micro_batches: int = 1, max_gradient_norm: float | None = None) -> Plan:
    """All chunks in one residency, or ("mixed") a third each persistent, host-stepped and offloaded."""
    workload = workload_of(name)
    layout = layout_of(workload, CHUNK_BYTES_OF_ACCOUNTS)
    num_chunks = len(layout.chunks)
    n_persist = {"persistent": num_chunks, "mixed": num_chunks // 3}.get(residency, 0)
    n_host_stepped = {"host-stepped": num_chunks, "mixed": num_chunks // 3}.get(residency, 0)
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=CHUNK_BYTES_OF_ACCOUNTS,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=layout.min_buffers(n_persist + n_host_stepped) + (residency != "persistent"),
        prefetch_depth=2,
        micro_batches=micro_batches,
        max_gradient_norm=max_gradient_norm,
    )


def measured_peak_bytes(name: str, plan: Plan) -> int:
    """With settled lanes; afterwards nothing is left."""
    family, device = families()[name], CpuDevice()
    teacher, student = family.teacher(), family.student()
    with beginning(teacher, student, plan, workload_of(name), device) as training:
        with settled_lanes(training):
            for batches in steps_of(family, plan.micro_batches, WATCHED):
                for batch in batches:
                    losses = training(**batch)
                training.step()
        peak_bytes = training.peak_device_bytes
    del batch, batches, losses, teacher, student, training
    gc.collect()
    assert device.ledger is not None
    assert device.ledger.named_bytes == device.ledger.watched_bytes == 0
    return peak_bytes
