"""Every rank has a device of its own: that of its number on its machine, which no other rank trains on."""

from __future__ import annotations

import torch

from ...shared.basics.errors import PlanError, RanksError
from ..devices.cpu_device import CpuDevice
from ..devices.cuda_device import CudaDevice
from ..devices.device import TrainingDevice
from .world import World, exchanged


def device_of_rank(
    named: torch.device | str, local_rank: int, *, budget_bytes: int | str | None = None
) -> TrainingDevice:
    """The device that is ``named`` as torch has it; "cuda" without a number is that of the rank's number.

    Raises PlanError if it is neither the CPU nor a CUDA device, RanksError if there are fewer CUDA devices than that,
    and HardwareError as the devices themselves do.
    """
    found = torch_device_of(named)
    if found.type == "cpu":
        return CpuDevice(budget_bytes)
    if ":" in str(found):
        return CudaDevice(found.index, budget_bytes=budget_bytes)
    num_devices = torch.cuda.device_count()
    if 0 < num_devices <= local_rank:
        raise RanksError(
            f"there is no device for LOCAL_RANK {local_rank}: its process sees {num_devices} CUDA "
            f"device{'s' if num_devices > 1 else ''}. Start at most {num_devices} rank"
            f"{'s' if num_devices > 1 else ''} on this machine (torchrun --nproc-per-node {num_devices}), or let "
            f"CUDA_VISIBLE_DEVICES show more."
        )
    return CudaDevice(local_rank, budget_bytes=budget_bytes)


def torch_device_of(named: object) -> torch.device:
    """What torch calls so.  Raises PlanError if it is neither the CPU nor a CUDA device."""
    try:
        found = torch.device(named) if isinstance(named, str) else named
    except RuntimeError:
        found = None
    if not isinstance(found, torch.device) or found.type not in ("cpu", "cuda"):
        raise PlanError(f'device is {named!r}; it must be "cpu", "cuda", "cuda:1", CpuDevice(...) or CudaDevice(...).')
    return found


def check_own_device(world: World, device: TrainingDevice) -> None:
    """Raise RanksError, on all ranks alike, if two of them train on one device; to be called on all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(exchanged(world, device.identity)):
        if identity is not None:
            ranks.setdefault(identity, []).append(rank)
    for identity, sharing in ranks.items():
        if len(sharing) > 1:
            raise RanksError(
                f"ranks {', '.join(map(str, sharing))} would train on one GPU ({identity}), but each needs its own. "
                f'Pass device="cuda" to carry_out(), which takes that of LOCAL_RANK, or move the model of each rank to '
                f'f"cuda:{{LOCAL_RANK}}"; one process per GPU is started by torchrun --nproc-per-node.'
            )
