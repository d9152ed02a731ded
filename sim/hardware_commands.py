"""The command ``hardware``: list and show known machines, probe this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ..shared.cli_options import HardwareChanges, JsonFlag, changes_of, command_app, examples, writable
from ..shared.cli_output import show
from ..shared.extensions import extension
from ..shared.files import write_atomically
from ..shared.hardware import Hardware
from ..shared.machines import hardware_to_toml, load_hardware, machine_names, override_hardware
from ..shared.progress import progress_bar

hardware = command_app()
hardware.info.help = "List and show known machines, or probe this one."


MachineOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", callback=writable, help="Write the machine, as TOML or JSON."),
]
_LONGEST_PROBE_S: Final = 3600.0


@hardware.command(name="list", epilog=examples("protwin hardware list"))
def list_command() -> None:
    """List the machines of the catalogue with their main figures."""
    from ..shared.hardware_tables import hardware_table

    show(hardware_table(machine_names()))


@hardware.command(
    name="show",
    epilog=examples(
        "protwin hardware show rtx-3090",
        "protwin hardware show rtx-3090 --set device.memory_bytes=48GiB --set link=pcie5-x16 --output machine.toml",
    ),
)
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A machine of the catalogue, or its file.")],
    changes: HardwareChanges = None,
    output: MachineOutput = None,
    as_json: JsonFlag = False,
) -> None:
    """Show every figure of a machine with its source.

    --output writes the machine, as TOML to edit if the name ends so.
    """
    machine = load_hardware(name)
    wanted = changes_of(changes)
    _give(override_hardware(machine, wanted) if wanted else machine, output, as_json=as_json)


@hardware.command(
    name="probe", epilog=examples("protwin hardware probe --output machine.toml", "protwin hardware probe --seconds 5")
)
def probe_command(
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=_LONGEST_PROBE_S, help="How long to measure, about.")
    ] = 10.0,
    output: MachineOutput = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine: its memory, its links, its arithmetic and its CPU Adam.

    --output writes the machine, as TOML to edit if the name ends so.
    """
    probe = extension("protwin.probes", "torch")
    with progress_bar("measuring this machine") as on_progress:
        machine = probe(seconds=seconds, on_progress=on_progress)
    _give(machine, output, as_json=as_json)


def _give(machine: Hardware, output: MachineOutput, *, as_json: bool) -> None:
    if output is not None and output.suffix == ".toml":
        write_atomically(output, hardware_to_toml(machine))
    elif output is not None:
        machine.save(output)
    if as_json:
        typer.echo(machine.to_json(), nl=False)
    else:
        from ..shared.hardware_tables import hardware_details

        show(hardware_details(machine))
