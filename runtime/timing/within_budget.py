"""From a model that does not fit on its device to a Workload with times, within the device's budget.

What every section does, and what it needs, is traced without memory: a twin of the model on the meta device.  How long
it takes is measured on the model itself, whose parameters stay on the host and visit the device section by section
([Note: Visits]): blocks checkpointed first, then a few of them kept, as many at a time as the budget allows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import torch
from torch import nn

from ...shared.basics.errors import InfeasibleError, WorkloadError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import layout_of
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ActivationMode, Plan
from ...shared.schema.workload import DType, Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..chunks.saved_weights import SavedWeights
from ..devices.device import TrainingDevice, device_description
from ..model.batches import Batch, Loss
from ..model.ownership import check_untaken
from ..model.snapshot import left_as_found
from ..quantized.states import relink, with_states
from ..tiles.fused_loss import loss_as
from ..tracing.stopwatch import WARM_UP_ITERATIONS
from ..tracing.tracing import trace
from ..training.initial_values import check_values, fill_buffers, values_for
from ..training.module_buffers import buffers_on
from .phase_times import with_seconds
from .visits import VisitingModel

_KEPT_OF_A_KIND: Final = 2
"""Blocks of one profile that are timed while they keep their activations: the first and the last."""


@with_states
def trace_within(
    model: nn.Module,
    batch: Batch,
    device: TrainingDevice,
    *,
    loss: Loss | None = None,
    blocks: str | Sequence[str] | None = None,
    repeats: int = 5,
    name: str | None = None,
    autocast: DType | None = None,
    loss_head: LossHead | str = LossHead.EAGER,
    weights: str | Path | SavedWeights | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Trace one training iteration of ``model`` on ``batch`` and time it on ``device``, within its budget.

    For a model whose parameters are on the host, or on the meta device with their values in the folder ``weights``, as
    ``carry_out`` takes them.  The device never holds more of it than one section's parameters, and the host one copy.
    ``batch`` is on the device.  ``autocast``: the element type that forward computes in; the rest is as in ``trace``.
    Kept activations are timed of as many blocks as the budget allows at a time; where not even one fits, a block takes
    what its recomputation takes.  Parameters, buffers, gradients, settings and random states are bit for bit what they
    were afterwards, and parameters are where they were.

    Raises InfeasibleError, which says what the least is, if the budget is too small; WorkloadError if the model cannot
    be traced, FileError if ``weights`` cannot be read.
    """
    check_untaken(model)
    saved = SavedWeights(Path(weights)).for_model(model) if isinstance(weights, str | Path) else weights
    check_values(model, saved, None)
    twin = meta_twin(model)
    kind = DeviceKind.CUDA if device.torch_device.type == "cuda" else DeviceKind.CPU
    # The twin's tensors are the CPU's; what CUDA casts is the trace's affair.
    with autocast_on("cpu", autocast):
        workload = trace(twin, batch, loss=loss, blocks=blocks, name=name, device_kind=kind, loss_head=loss_head)
    del twin
    check_enough(workload, device.limit_bytes)
    rows = tuple(mode_rows(workload, device.limit_bytes))
    seconds: list[tuple[tuple[ActivationMode, ...], dict[PhaseKey, float]]] = []
    total = len(rows) * (WARM_UP_ITERATIONS + repeats)
    with ExitStack() as undo:
        undo.enter_context(left_as_found(model))
        undo.callback(fill_buffers(model, saved, None))
        undo.enter_context(buffers_on(device.torch_device, model))
        visiting = VisitingModel(model, workload, device, values_for(model, saved, None))
        undo.callback(visiting.close)
        undo.enter_context(loss_as(model, workload.loss_head))
        for turn in range(WARM_UP_ITERATIONS + repeats):
            # Modes take turns: a slow moment of a shared machine must not make one look dearer.
            for place, modes in enumerate(rows):
                with autocast_on(device.torch_device.type, autocast):
                    found = visiting.run(batch, loss, modes, is_metered=turn == 0)
                if turn >= WARM_UP_ITERATIONS:
                    seconds.append((modes, found))
                if on_progress is not None:
                    on_progress(turn * len(rows) + place + 1, total)
    return with_seconds(workload, seconds, measured_on=device_description(device.torch_device))


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters are on the meta device: not even for a moment are there two of them.

    Raises WorkloadError if the model cannot be copied.
    """
    made: dict[int, object] = {}
    for parameter in model.parameters():
        other = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        other.__class__ = type(parameter)
        made[id(parameter)] = other
    try:
        twin = copy.deepcopy(model, made)
    except RuntimeError as error:
        raise WorkloadError(
            f"{type(model).__name__} cannot be copied without its weights: {str(error).splitlines()[0]}. Drop what it "
            f"keeps of earlier iterations in attributes."
        ) from error
    relink(twin)
    return twin


def least_plan(workload: Workload) -> tuple[Plan, int]:
    """A plan that checkpoints every block and keeps no chunk, and the device bytes that it may need.

    Every parameter is a chunk by itself, so that nothing is on the device that its section does not need.
    """
    plan = _plan(workload, (ActivationMode.CHECKPOINT,) * workload.num_blocks)
    return plan, guaranteed_bytes(plan, workload)


def check_enough(workload: Workload, budget_bytes: int | None) -> None:
    """Raise InfeasibleError if the budget is below what ``least_plan`` needs."""
    if budget_bytes is None:
        return
    _, least_bytes = least_plan(workload)
    if least_bytes > budget_bytes:
        raise InfeasibleError(
            f"a device budget of {format_bytes(budget_bytes)} is too small to measure {workload.model_name} in: with "
            f"every block checkpointed and nothing kept on the device, a step needs {format_bytes(least_bytes)}. Raise "
            f"it to {format_enough_bytes(least_bytes)}, or take a smaller batch."
        )


def guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    """Device bytes that no timing of ``plan`` exceeds."""
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def _plan(workload: Workload, modes: tuple[ActivationMode, ...]) -> Plan:
    """One that keeps no chunk on the device and prefetches as little as can be."""
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=1,
        n_persist=0,
        n_buffer=layout_of(workload, 1).min_buffers(0),
        n_checkpoint=modes.count(ActivationMode.CHECKPOINT),
        activation_modes=modes,
    )


def mode_rows(workload: Workload, budget_bytes: int | None) -> Iterator[tuple[ActivationMode, ...]]:
    """Modes of all blocks, row by row, that between them time every profile both ways as far as the budget allows.

    First all blocks checkpointed; then rows that keep some blocks, of every profile the first and the last, as many in
    a row as fit.
    """
    again = (ActivationMode.CHECKPOINT,) * workload.num_blocks
    yield again

    def keeping(kept: Sequence[int]) -> tuple[ActivationMode, ...]:
        return tuple(ActivationMode.KEEP if block in kept else mode for block, mode in enumerate(again))

    def fits(kept: Sequence[int]) -> bool:
        return budget_bytes is None or guaranteed_bytes(_plan(workload, keeping(kept)), workload) <= budget_bytes

    kept: list[int] = []
    for block in _examples(workload):
        if fits([*kept, block]):
            kept.append(block)
        elif kept and fits([block]):
            yield keeping(kept)
            kept = [block]
    if kept:
        yield keeping(kept)


def _examples(workload: Workload) -> list[int]:
    """Blocks that stand for all: of every profile the first and the last, in order."""
    members: dict[int, list[int]] = {}
    for block, described in enumerate(workload.blocks):
        members.setdefault(described.profile, []).append(block)
    return sorted({block for of_profile in members.values() for block in _ends(of_profile)})


def _ends(members: Sequence[int]) -> Sequence[int]:
    return members if len(members) <= _KEPT_OF_A_KIND else (members[0], members[-1])


def autocast_on(device_type: str, dtype: DType | None) -> AbstractContextManager[object]:
    """What forward runs within on a device of that type; None: nothing."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=getattr(torch, dtype))
