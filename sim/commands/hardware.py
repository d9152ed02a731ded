"""The commands ``hardware`` and ``models``: what the catalogue knows by name, and measuring this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ...shared.basics.documents import FrozenModel, write_atomically
from ...shared.basics.plugins import plugin
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.machines import (
    hardware_to_toml,
    load_hardware,
    machine,
    machines_with_words,
    override_hardware,
)
from ...shared.catalogue.models import ModelList
from ...shared.catalogue.parts import (
    disk_names,
    disk_part,
    host_names,
    host_part,
    link_names,
    link_part,
    network_names,
    network_part,
    node_names,
    node_part,
)
from ...shared.cli.options import (
    HardwareChanges,
    JsonFlag,
    changes_of,
    command_app,
    examples,
    keep_apart,
    writable_machine,
)
from ...shared.cli.output import is_standard_output, save, show, tell
from ...shared.cli.streams import say, write_data
from ...shared.schema.hardware import Hardware

hardware = command_app()
hardware.info.help = "List and show known machines, or probe this one."
models = command_app()


MachineOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=writable_machine,
        help="Write the machine, as TOML or JSON; - is TOML on standard output, instead of tables.",
    ),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[WORD]...", help="List those alone that these words are about.")
]
_LONGEST_PROBE_S: Final = 3600.0


@hardware.command(
    name="list", epilog=examples("protwin hardware list", "protwin hardware list h100", "protwin hardware list --json")
)
def list_command(words: Words = None, as_json: JsonFlag = False) -> None:
    """List the machines of the catalogue.

    Their main figures: first those with one device, then those with several.  With words: those that have all of them
    in their name.
    """
    alone, several = machines_with_words(words or ())
    if as_json:
        say(json.dumps([_parts_of(machine(name)) for name in (*alone, *several)], indent=1))
        return
    from ...shared.tables.machines import cluster_table, hardware_table

    if alone:
        show(hardware_table(alone))
    if alone and several:
        say()
    if several:
        show(cluster_table(several))


@hardware.command(name="parts", epilog=examples("protwin hardware parts", "protwin hardware parts --json"))
def parts_command(as_json: JsonFlag = False) -> None:
    """List the parts that --set can exchange.

    Hosts, links, disks, nodes and networks, each by the name that it goes by.
    """
    if as_json:
        parts: dict[str, list[FrozenModel]] = {
            "hosts": [host_part(name) for name in host_names()],
            "links": [link_part(name) for name in link_names()],
            "disks": [disk_part(name) for name in disk_names()],
            "nodes": [node_part(name) for name in node_names()],
            "networks": [network_part(name) for name in network_names()],
        }
        listed = {kind: [part.model_dump(mode="json") for part in found] for kind, found in parts.items()}
        write_data(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
        return
    from ...shared.tables.machines import part_tables

    show(part_tables())


@hardware.command(
    name="show",
    epilog=examples(
        "protwin hardware show rtx-3090",
        "protwin hardware show rtx-3090 --set device.memory_bytes=48GiB --set link=pcie5-x16 --output machine.toml",
        "protwin hardware show h100-80gb-x8 --set network.num_nodes=4 --set price_usd_per_hour=24",
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
    keep_apart({"--output": output}, {}, as_json=as_json)
    found = load_hardware(name)
    wanted = changes_of(changes)
    _give(override_hardware(found, wanted) if wanted else found, output, as_json=as_json)


@hardware.command(
    name="probe",
    epilog=examples(
        "protwin hardware probe --output machine.toml", "protwin hardware probe --ranks 2 --output machine.toml"
    ),
)
def probe_command(
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="SECONDS", min=0.1, max=_LONGEST_PROBE_S, help="How long to measure, about."),
    ] = 10.0,
    disk_folder: Annotated[
        Path | None,
        typer.Option("--disk-folder", metavar="FOLDER", file_okay=False, help="Measure the disk that it lies on too."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", min=1, help="Start N processes that measure what each reaches beside them."
        ),
    ] = None,
    output: MachineOutput = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine.

    Its memory, its links, its arithmetic and its CPU Adam, with all cores but one, as training has them.  With --ranks,
    by torchrun, what each of several processes that share the CPU has of them, and their collectives.
    --output writes the machine, as TOML to edit if the name ends so.
    """
    keep_apart({"--output": output}, {}, as_json=as_json)
    if (ranks or 1) > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
        of_ranks = plugin("protwin.probes", "ranks")(ranks, seconds=seconds, disk_folder=disk_folder)
        if of_ranks is not None:
            _give(of_ranks, output, as_json=as_json)
        return
    probe = plugin("protwin.probes", "torch")
    with progress_bar("measuring this machine") as on_progress:
        found = probe(seconds=seconds, on_progress=on_progress, leaves_a_core=True, disk_folder=disk_folder)
    _give(found, output, as_json=as_json)


def _give(found: Hardware, output: MachineOutput, *, as_json: bool) -> None:
    if is_standard_output(output):
        write_data(hardware_to_toml(found))
    elif output is not None and output.suffix == ".toml":
        write_atomically(output, hardware_to_toml(found))
    else:
        save(found, output)
    from ...shared.tables.machines import hardware_details

    tell(found, output, as_json=as_json, tables=lambda: hardware_details(found))


def _parts_of(found: Hardware) -> dict[str, str | int | None]:
    """A machine by the names of its parts."""
    return {
        "name": found.name,
        "num_devices": found.num_devices,
        "device": found.device.name,
        "host": found.host.name,
        "link": found.host_to_device.name,
        "node": None if found.node is None else found.node.name,
        "network": None if found.network is None else found.network.name,
    }


@models.command(epilog=examples("protwin models", "protwin models llama 8b", "protwin models --json"))
def models_command(words: Words = None, as_json: JsonFlag = False) -> None:
    """List the models of the catalogue, each with its parameters and where its configuration was published.

    With words: those that have all of them in their name, architecture or source.
    """
    listed = ModelList.of_catalogue()
    if words:
        listed = listed.with_words(words)
    if as_json:
        write_data(listed.to_json())
    else:
        from ...shared.tables.workloads import models_table

        show(models_table(listed))
