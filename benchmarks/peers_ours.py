"""Our contestants of the peers' bench: parameters on the host, by a fixed plan and by one that the search found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from peers_subject import LEARNING_RATE, MODEL_NAME, WEIGHT_DECAY, make_batches, make_model

from protwin.calibration.fitting.calibrate import calibrate
from protwin.calibration.fitting.subject import Subject
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.tracing.tracing import trace
from protwin.runtime.training.carry_out import carry_out
from protwin.runtime.training.training import Training
from protwin.shared.basics.units import format_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import largest_block_bytes, layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace

MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def fixed_plan(workload: Workload) -> Plan:
    """Every chunk on the host, those of embedding and head too, nothing recomputed, one buffer more than must be.

    A block's parameters are then gathered for forward and again for backward, as the peers do.
    """
    chunk_bytes = largest_block_bytes(workload)
    layout = layout_of(workload, chunk_bytes)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_buffer=layout.min_buffers(0) + 1,
        prefetch_depth=1,
        n_checkpoint=0,
    )


def make_plans(folder: Path) -> None:
    """Trace, probe and calibrate, then write the workload, the fixed plan and the searched one into ``folder``.

    The searched plan gets as budget what the fixed plan may need, and none of its chunks may stay on the device.
    """
    model = make_model()
    batch = next(make_batches())
    workload = trace(model, batch, name=MODEL_NAME, repeats=3)
    fixed = fixed_plan(workload)
    hardware = probe_hardware(seconds=2.0, device=CpuDevice())
    calibration = calibrate(
        Subject(model, batch, workload, hardware, make_optimizer=MAKE_OPTIMIZER), steps=3, slowdown_seconds=4.0
    )
    space = SearchSpace(n_persist=(0,))
    budget_bytes = guaranteed_bytes(fixed, workload)
    searched = search(
        SearchRequest(
            workload=workload, hardware=hardware, calibration=calibration, device_budget_bytes=budget_bytes, space=space
        )
    ).plan
    folder.mkdir()
    workload.save(folder / "workload.json")
    fixed.save(folder / "fixed.json")
    searched.save(folder / "searched.json")


def guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    """The device peak that no timing exceeds."""
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


class CarriedOut:
    """A contestant that trains by a plan."""

    def __init__(self, training: Training, about: str) -> None:
        self._training = training
        self.about = about

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step; gives its loss."""
        loss: Any = self._training.model(**batch).loss
        loss.backward()
        self._training.step()
        return float(loss.item())

    def synchronize(self) -> None:
        """Wait for the lanes."""
        self._training.synchronize()

    def copied_bytes(self) -> int:
        """Bytes gathered and sent to the host so far."""
        return self._training.bytes_host_to_device + self._training.bytes_device_to_host

    def close(self) -> None:
        """End the lanes."""
        self._training.close()


class Ours(CarriedOut):
    """A model whose plan, ``fixed`` or ``searched``, is carried out."""

    def __init__(self, name: str, folder: Path) -> None:
        """Makes the plans if they are not in ``folder`` yet."""
        if not folder.exists():
            make_plans(folder)
        workload = Workload.load(folder / "workload.json")
        plan = Plan.load(folder / f"{name}.json")
        training = carry_out(make_model(), plan, workload, optimizer=MAKE_OPTIMIZER, device=CpuDevice())
        super().__init__(training, _placing(plan, workload))


def _placing(plan: Plan, workload: Workload) -> str:
    """Where a plan of one rank has parameters, in words."""
    layout = layout_of(workload, plan.chunk_bytes)
    persistent = layout.persistent(0)
    on_host = sum(chunk.size_bytes for chunk in layout.chunks if chunk.id not in persistent)
    total = sum(chunk.size_bytes for chunk in layout.chunks)
    return (
        f"{format_bytes(on_host)} of {format_bytes(total)} of parameters on the host, n_buffer {plan.n_buffer}, "
        f"prefetch_depth {plan.prefetch_depth}, n_checkpoint {plan.n_checkpoint}, chunks of "
        f"{format_bytes(plan.chunk_bytes)}; needs at most {format_bytes(guaranteed_bytes(plan, workload))} of "
        f"device memory"
    )
