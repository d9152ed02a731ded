"""How many ranks a command asks about, what they do together, and what each of them has of a machine."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ..shared.errors import PlanError
from ..shared.hardware import Hardware
from ..shared.plan import ParallelMode, Plan
from ..shared.rank_share import machine_of_rank
from .library_workspaces import collective_bytes

MOST_RANKS: Final = 10**6

NumRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        max=MOST_RANKS,
        help="Devices that train together; all of the machine's with --parallel.",
    ),
]
Parallel = Annotated[
    ParallelMode | None,
    typer.Option("--parallel", help="What they do together."),
]


def with_ranks(plan: Plan, hardware: Hardware, num_ranks: int | None, parallel: ParallelMode | None) -> Plan:
    """``plan`` for so many ranks and in this mode, each the plan's own if None.

    A mode of several ranks alone takes all devices of the machine, one rank alone is single.
    Raises PlanError if the two do not agree.
    """
    if num_ranks is None and parallel is None:
        return plan
    if parallel is None:
        parallel = ParallelMode.SINGLE if num_ranks == 1 else plan.parallel
    if num_ranks is None:
        num_ranks = 1 if parallel is ParallelMode.SINGLE else max(plan.num_ranks, hardware.num_devices)
    check_ranks(num_ranks, parallel)
    return plan.model_copy(update={"num_ranks": num_ranks, "parallel": parallel})


def check_ranks(num_ranks: int, parallel: ParallelMode) -> None:
    """Raise PlanError unless so many ranks can be in this mode."""
    if parallel is ParallelMode.SINGLE and num_ranks > 1:
        raise PlanError(f"{num_ranks} ranks do nothing together. Choose --parallel ddp, replicated or sharded.")
    if parallel is not ParallelMode.SINGLE and num_ranks == 1:
        raise PlanError(f"--parallel {parallel} needs 2 ranks at least. Choose a machine with several devices.")


def rank_device_bytes(hardware: Hardware, num_ranks: int) -> int:
    """Device memory that each rank has for training, less what carries collectives (``library_workspaces``)."""
    return max(1, hardware.device.usable_bytes - collective_bytes(hardware, num_ranks))


def rank_host_bytes(hardware: Hardware, num_ranks: int) -> int:
    """Host memory that each rank has: its share of a socket's.  Raises HardwareError as ``machine_of_rank`` does."""
    return hardware.host.memory_bytes if num_ranks == 1 else machine_of_rank(hardware, num_ranks).host.memory_bytes


def unused_devices(hardware: Hardware, num_ranks: int) -> str | None:
    """A note on devices that nobody uses; None if all are used."""
    if num_ranks >= hardware.num_devices:
        return None
    number = "one is used" if num_ranks == 1 else f"{num_ranks} are used"
    return f"{hardware.name} has {hardware.num_devices} devices and {number}. Ask about all with --parallel."
