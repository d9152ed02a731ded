"""The machine that a command asks about, and the ranks that take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.units import format_bytes
from ...shared.catalogue.machines import load_hardware, override_hardware
from ...shared.cli.options import (
    CalibrationPath,
    DeviceBudget,
    HardwareChanges,
    HardwareName,
    PriceEntries,
    changes_of,
    warn,
)
from ...shared.cli.options import MethodName as MethodName
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode, Plan
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


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """A machine as options name it; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    hardware: HardwareName
    changes: HardwareChanges = None
    device_budget_bytes: DeviceBudget = None
    calibration: CalibrationPath = None
    prices: PriceEntries = None

    @property
    def files(self) -> dict[str, str | Path | None]:
        """Files that it is read from, by what a message calls them."""
        return {"--hardware": self.hardware, "--calibration": self.calibration, **price_files(self.prices)}

    def machine(self) -> Hardware:
        """The machine, with the changes of ``--set`` and the rent of ``--price``."""
        return machine_of(self.hardware, self.changes, self.prices)

    def factors(self) -> Calibration | None:
        """What was measured of it, if that is named."""
        return None if self.calibration is None else Calibration.load(self.calibration)


@dataclass(frozen=True, kw_only=True)
class RanksOfPlan:
    """Ranks that take a plan in place of its own; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    num_ranks: NumRanks = None
    parallel: Annotated[
        ParallelMode | None,
        typer.Option("--parallel", help="What they do together."),
    ] = None
    n_shard: Annotated[
        int | None,
        typer.Option(
            "--n-shard",
            metavar="N",
            min=0,
            help="Chunks, after the persistent ones, that are sharded over the devices; with --parallel sharded.",
        ),
    ] = None
    shard_ranks: Annotated[
        int | None,
        typer.Option(
            "--shard-ranks",
            metavar="N",
            min=1,
            max=MOST_RANKS,
            help="Neighbouring ranks that share chunks, with replicas across such groups; with --parallel sharded.",
        ),
    ] = None

    @property
    def options(self) -> dict[str, object]:
        """What is given, by the options' names."""
        return {
            "--ranks": self.num_ranks,
            "--parallel": self.parallel,
            "--n-shard": self.n_shard,
            "--shard-ranks": self.shard_ranks,
        }

    def taking(self, plan: Plan, hardware: Hardware) -> Plan:
        """``plan`` for so many ranks, in this mode, with so many chunks sharded in such groups, its own if None.

        A mode of several ranks alone takes all devices of the machine, one rank alone is single.
        Raises PlanError if ranks and mode do not agree; whether mode and shards do, compiling the plan says.
        """
        if self.n_shard is not None:
            plan = plan.model_copy(update={"n_shard": self.n_shard})
        plan = self._in_mode(plan, hardware)
        if self.shard_ranks is None:
            return plan
        return plan.model_copy(update={"shard_ranks": None if self.shard_ranks == plan.num_ranks else self.shard_ranks})

    def _in_mode(self, plan: Plan, hardware: Hardware) -> Plan:
        num_ranks, parallel = self.num_ranks, self.parallel
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


def machine_of(name: str, changes: list[str] | None, prices: list[str] | None = None) -> Hardware:
    """The machine that ``--hardware`` names, with the changes of ``--set`` and the rent of ``--price``."""
    machine = load_hardware(name)
    wanted = changes_of(changes)
    if wanted:
        machine = override_hardware(machine, wanted)
    if prices:
        from ...shared.catalogue.prices import parse_prices, with_prices

        (machine,) = with_prices([machine], parse_prices(prices))
    return machine


def price_files(prices: list[str] | None) -> dict[str, str | Path | None]:
    """Files among the values of ``--price``, by what a message calls them."""
    return {f"--price {entry}": Path(entry) for entry in prices or () if entry.endswith((".toml", ".json"))}


def check_budget(budget_bytes: int | None, machine: Hardware) -> None:
    """Warn of a budget that the device does not have: it is taken as asked for."""
    usable_bytes = machine.device.usable_bytes
    if budget_bytes is not None and budget_bytes > usable_bytes:
        warn(
            f"the device budget is {format_bytes(budget_bytes)} but {machine.device.name} has "
            f"{format_bytes(usable_bytes)} for training. For a larger device, use --set device.memory_bytes=SIZE."
        )
