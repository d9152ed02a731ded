"""Fidelity of two ranks: predicted against measured iteration, peak and collectives, in every mode.

Two processes with one thread each, on half of the cores of a machine each.  Their links and what they send each other
are throttled, so that transfers matter and all of them take the time that they took a minute ago.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from protwin.calibration.fitting.subject import Subject
from protwin.calibration.validation.fidelity import Fidelity
from protwin.calibration.validation.validate import Trial, validate
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.model.configurations import build_model
from protwin.runtime.ranks.rank_probe import probe_ranks
from protwin.runtime.ranks.world import join_world
from protwin.runtime.tracing.tracing import trace
from protwin.shared.schema.record import Record
from tests.runtime.ranks.processes import Ranks

NUM_RANKS: Final = 2
LINKS: Final = {
    "host_to_device_bytes_per_s": 2e9,
    "device_to_host_bytes_per_s": 1e9,
    "collective_bytes_per_s": 0.25e9,
}
_TIMEOUT_S: Final = 600.0
_PATIENCE_S: Final = 3600.0


def fidelity_of_ranks(
    name: str, configuration: dict[str, Any], batch_size: int, sequence_length: int, trial: Trial
) -> tuple[Fidelity, dict[str, Record]]:
    """What two processes find, and the records of rank 0."""
    with Ranks(NUM_RANKS) as ranks:
        found = ranks.run(_measured, name, configuration, batch_size, sequence_length, trial, patience_s=_PATIENCE_S)
    assert found[0][0] == found[1][0], "ranks differ in what they found"
    return found[0]


def _measured(
    rank: int, name: str, configuration: dict[str, Any], batch_size: int, sequence_length: int, trial: Trial
) -> tuple[Fidelity, dict[str, Record]]:
    torch.manual_seed(0)
    model = build_model(configuration, name, torch.float32, device="cpu")
    batches = byte_batches(
        python_reference(), batch_size=batch_size, sequence_length=sequence_length, num_batches=NUM_RANKS
    )
    batch = list(batches)[rank]
    make_device = partial(CpuDevice, **LINKS)
    hardware = probe_ranks(NUM_RANKS, seconds=12.0, device=make_device())
    world = join_world(NUM_RANKS, timeout_s=_TIMEOUT_S)
    assert world is not None
    try:
        world.open_lane(torch.device("cpu"))
        subject = Subject(
            model,
            batch,
            trace(model, batch, name=f"{name}, {NUM_RANKS} ranks"),
            hardware,
            make_device,
            partial(torch.optim.AdamW, lr=1e-4, fused=True),
            world=world,
        ).on_workload_of_first()
        return validate(subject, trial)
    finally:
        world.leave()
