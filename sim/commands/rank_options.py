"""How many ranks a command asks about, what they do together, and what each of them has of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode, Plan
from ..space.space import LARGEST_KNOB
from ..space.step_spec import MOST_RANKS, check_ranks

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
Shards = Annotated[
    int | None,
    typer.Option(
        "--n-shard",
        metavar="N",
        min=0,
        help="Chunks, after the persistent ones, that are sharded over the devices; with --parallel sharded.",
    ),
]
AllowedShards = Annotated[
    list[int] | None,
    typer.Option(
        "--n-shard",
        metavar="N",
        min=0,
        max=LARGEST_KNOB,
        help="Allow this number of chunks that are sharded over the devices, in mode sharded (repeatable).",
    ),
]
AllowedModes = Annotated[
    list[ParallelMode] | None,
    typer.Option("--parallel", help="Allow this way of training together (repeatable); all unless given."),
]


def with_ranks(
    plan: Plan,
    hardware: Hardware,
    num_ranks: int | None,
    parallel: ParallelMode | None,
    n_shard: int | None = None,
) -> Plan:
    """``plan`` for so many ranks, in this mode and with so many chunks sharded, each the plan's own if None.

    A mode of several ranks alone takes all devices of the machine, one rank alone is single.
    Raises PlanError if ranks and mode do not agree; whether mode and shards do, compiling the plan says.
    """
    if n_shard is not None:
        plan = plan.model_copy(update={"n_shard": n_shard})
    if num_ranks is None and parallel is None:
        return plan
    if parallel is None:
        parallel = ParallelMode.SINGLE if num_ranks == 1 else plan.parallel
    if num_ranks is None:
        num_ranks = 1 if parallel is ParallelMode.SINGLE else max(plan.num_ranks, hardware.num_devices)
    check_ranks(num_ranks, parallel)
    return plan.model_copy(update={"num_ranks": num_ranks, "parallel": parallel})


def ranks_to_search(hardware: Hardware, num_ranks: int | None, parallel: Sequence[ParallelMode]) -> int:
    """Ranks that a search asks about: as many as are named, all devices if only modes are, else one.

    Raises PlanError if the modes do not go with them.
    """
    if num_ranks is None:
        num_ranks = hardware.num_devices if any(mode is not ParallelMode.SINGLE for mode in parallel) else 1
    for mode in parallel:
        check_ranks(num_ranks, mode)
    return num_ranks


def unused_devices(hardware: Hardware, num_ranks: int) -> str | None:
    """A note on devices that nobody uses; None if all are used."""
    if num_ranks >= hardware.num_devices:
        return None
    number = "one is used" if num_ranks == 1 else f"{num_ranks} are used"
    return f"{hardware.name} has {hardware.num_devices} devices and {number}. Without --ranks, --parallel takes all."
