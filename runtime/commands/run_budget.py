"""Whether a plan fits the budget of a run, and its model this machine, before any work is done.  Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from ...shared.basics.errors import PlanError, ProtwinError, WorkloadError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import layout_of
from ...shared.optimizers.state import state_tensors
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Memory
from ...shared.schema.workload import DType, Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...shared.workloads.dtypes import TRAINABLE
from ...shared.workloads.source import WorkloadRequest, untraced_workload
from ..devices.machine import host_memory_bytes

RANDOM_WEIGHTS_REMEDY: Final = (
    "Use a smaller configuration or another machine; protwin trace without --real needs no weights."
)
_WIDENED_BYTES: Final = 4
"""Of a trained scalar's gradient on its way, in float32."""


class Weight(NamedTuple):
    """One that lies on the host while a model is built."""

    dtype: DType
    shape: tuple[int, ...]
    is_trained: bool


def check_weights_held(
    weights: Sequence[Weight], name: str, remedy: str, optimizer: Optimizer, *, memory_bytes: int, num_processes: int
) -> None:
    """Raise WorkloadError if a machine cannot hold these with what ``optimizer`` keeps of them, in each process."""
    need_bytes = 0
    for dtype, shape, is_trained in weights:
        need_bytes += math.prod(shape) * (dtype.item_bytes + _WIDENED_BYTES * is_trained)
        if is_trained:
            need_bytes += sum(tensor.size_bytes for tensor in state_tensors((dtype, shape), optimizer))
    need_bytes *= num_processes
    if need_bytes > memory_bytes:
        times = f" in each of {num_processes} processes" if num_processes > 1 else ""
        raise WorkloadError(
            f"{name} with its optimizer state{times} needs about {format_bytes(need_bytes)} but this machine has "
            f"{format_bytes(memory_bytes)}. {remedy}"
        )


def check_random_weights(plan: Plan, asked: WorkloadRequest, name: str) -> None:
    """Raise WorkloadError if this machine cannot hold the model that ``plan`` trains alone, with random weights.

    The weights are the parameters of the workload that is asked for, where that takes no trace and is the plan's.
    Whatever this cannot tell is told when the model is there: it spares importing torch.
    """
    known = _planned_workload(plan, asked) if plan.num_ranks == 1 else None
    if known is None or any(of.quantized is not None for of in known.parameters):
        return
    weights = [Weight(of.dtype, of.shape, of.trainable) for of in known.parameters]
    memory_bytes = host_memory_bytes()
    check_weights_held(weights, name, RANDOM_WEIGHTS_REMEDY, plan.optimizer, memory_bytes=memory_bytes, num_processes=1)


def _planned_workload(plan: Plan, asked: WorkloadRequest) -> Workload | None:
    """The one of a model of the catalogue that the plan is for; None where that takes a trace, or a mistake is made."""
    for dtype in (asked.dtype,) if asked.dtype is not None else (None, *TRAINABLE):
        with suppress(ProtwinError):  # the trace says it with its reason
            found = untraced_workload(replace(asked, dtype=dtype))
            if found is not None and found.identity == plan.workload_id:
                return found
    return None


def check_budget(plan: Plan, workload: Workload, budget_bytes: int | None) -> None:
    """Raise PlanError if some timing of the plan exceeds the budget."""
    if budget_bytes is None:
        return
    schedule = compile_schedule(plan, workload)
    peak = guaranteed_device_peak(schedule)
    if peak.size_bytes > budget_bytes:
        raise PlanError(
            f"the plan's device memory may reach {format_bytes(peak.size_bytes)}, during "
            f"{schedule.tasks[peak.task].name}, but --device-budget is {format_bytes(budget_bytes)}. Search a plan for "
            f"this budget, or raise it to {format_enough_bytes(peak.size_bytes)}."
        )


def check_host(plan: Plan, workload: Workload, memory_bytes: int, *, num_processes: int, is_cpu: bool) -> None:
    """Raise PlanError if this machine cannot hold what the plan keeps on the host, in each process.

    A model that is read into its chunks takes that and one chunk, loading included.  ``is_cpu``: the device's memory
    is the host's too.
    """
    layout = layout_of(workload, plan.chunk_bytes)
    schedule = compile_schedule(plan, workload, layout)
    need_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    need_bytes += max((chunk.size_bytes for chunk in layout.chunks), default=0)
    need_bytes += guaranteed_device_peak(schedule).size_bytes if is_cpu else 0
    need_bytes *= num_processes
    if need_bytes > memory_bytes:
        times = f" in each of {num_processes} processes" if num_processes > 1 else ""
        raise PlanError(
            f"the plan needs {format_bytes(need_bytes)} of host memory{times}, with the chunk that is being read, but "
            f"this machine has {format_bytes(memory_bytes)}. Search a plan for this machine, with --host-budget or a "
            f"disk, or use a machine with more memory."
        )
