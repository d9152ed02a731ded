"""What the runtime costs on a GPU where nothing has to move, and what memory it takes in every activation mode."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from gpu_subject import Clock, Machine, Section
from torch import nn

from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.subject import Subject
from protwin.runtime.model.batches import loss_of
from protwin.runtime.model.snapshot import without_cache
from protwin.runtime.training.carry_out import carry_out
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Memory

OVER_PLAIN: Final = 1.05
PEAK_ERROR: Final = 0.02
"""The allocator rounds every tensor up to 512 bytes, and kernels have workspaces that no dispatch mode sees."""
LEFT_BYTES: Final = 2**20
_ROUNDS: Final = 5
_STEPS: Final = 6
_MODES: Final = {
    "kept": (ActivationMode.KEEP,),
    "checkpointed": (ActivationMode.CHECKPOINT,),
    "swapped": (ActivationMode.SWAP,),
    "mixed": (ActivationMode.SWAP, ActivationMode.CHECKPOINT, ActivationMode.KEEP),
}


def compare_with_plain(section: Section, clock: Clock, machine: Machine, subject: Subject) -> None:
    """Everything persistent and kept does what the plain loop does; in turns, medians of rounds."""
    clock.check(30)
    plan = bootstrap_plans(subject.workload)[0]
    plain = copy.deepcopy(subject.model).to(machine.target)
    optimizer = subject.make_optimizer([{"params": list(plain.parameters())}])

    def plain_step() -> None:
        loss_of(plain, subject.batch, None).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    ratios = []
    device = subject.make_device()
    ours = copy.deepcopy(subject.model)
    options = {"optimizer": subject.make_optimizer, "device": device}
    with without_cache(plain), carry_out(ours, plan, subject.workload, **options) as training:  # type: ignore[arg-type]

        def our_step() -> None:
            loss_of(ours, subject.batch, None).backward()  # type: ignore[no-untyped-call]
            training.step()

        for step in (plain_step, our_step):
            _seconds(step, machine)
        for turn in range(_ROUNDS):
            clock.check(5)
            order = [plain_step, our_step] if turn % 2 else [our_step, plain_step]
            seconds = {step: _seconds(step, machine) for step in order}
            ratios.append(seconds[our_step] / seconds[plain_step])
    section.found["ratios"] = ratios
    section.check("step time over the plain loop's", statistics.median(ratios), OVER_PLAIN)


def _seconds(step: Callable[[], None], machine: Machine) -> float:
    """Of one step, over a row of them."""
    _wait(machine)
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    _wait(machine)
    return (time.perf_counter() - start) / _STEPS


def _wait(machine: Machine) -> None:
    if machine.target.type == "cuda":
        torch.cuda.synchronize(machine.target)


def account(section: Section, clock: Clock, machine: Machine, subject: Subject) -> None:
    """Measured peaks against the schedule's, pinned bytes against the schedule's, and what is left afterwards."""
    rows: list[dict[str, Any]] = []
    section.found["plans"] = rows
    offloading = bootstrap_plans(subject.workload)[2]
    blocks = subject.workload.num_blocks
    for name, modes in _MODES.items():
        clock.check(15)
        chosen = tuple(modes[block % len(modes)] for block in range(blocks))
        plan = offloading.model_copy(
            update={
                "activation_modes": chosen,
                "n_swap": chosen.count(ActivationMode.SWAP),
                "n_checkpoint": chosen.count(ActivationMode.CHECKPOINT),
            }
        )
        row = {"name": name} | _account_of(plan, machine, subject)
        rows.append(row)
        error = abs(row["measured_peak_bytes"] / row["guaranteed_peak_bytes"] - 1)
        section.check(f"error of the peak, {name}", error, PEAK_ERROR)
        section.check(f"bytes left after closing, {name}", row["left_bytes"], LEFT_BYTES)
        if machine.target.type == "cuda":
            section.check(f"pinned bytes beyond the schedule's, {name}", row["pinned_beyond_bytes"], 0)
            section.check(f"pinned bytes left, {name}", row["pinned_left_bytes"], 0)


def _account_of(plan: Plan, machine: Machine, subject: Subject) -> dict[str, Any]:
    model: nn.Module = copy.deepcopy(subject.model)
    device = subject.make_device()
    pinned = getattr(device, "pinned", None)
    # Once without looking: libraries make their workspaces.
    _train(model, plan, subject, device, steps=1)
    other_bytes = machine.other_bytes(subject.batch)
    peak_bytes, guaranteed, pinned_beyond = _train(model, plan, subject, device, steps=6)
    gc.collect()
    return {
        "measured_peak_bytes": peak_bytes - other_bytes,
        "guaranteed_peak_bytes": guaranteed,
        "left_bytes": machine.other_bytes(subject.batch) - other_bytes,
        "pinned_beyond_bytes": pinned_beyond,
        "pinned_left_bytes": 0 if pinned is None else pinned.size_bytes,
    }


def _train(model: nn.Module, plan: Plan, subject: Subject, device: Any, *, steps: int) -> tuple[int, int, int]:
    with carry_out(model, plan, subject.workload, optimizer=subject.make_optimizer, device=device) as training:
        for _ in range(steps):
            loss_of(model, subject.batch, None).backward()  # type: ignore[no-untyped-call]
            training.step()
        pinned = getattr(device, "pinned", None)
        pinned_bytes = training.schedule.static_bytes(Memory.PINNED_HOST)
        beyond = 0 if pinned is None else pinned.size_bytes - pinned_bytes
        guaranteed = training.record().guaranteed_peak_device_bytes if steps >= 6 else 0
        return training.peak_device_bytes, guaranteed, beyond
