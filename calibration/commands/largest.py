"""``protwin largest``: the largest model that trains, by device and host memory."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ...shared.basics.progress import progress_bar
from ...shared.basics.units import parse_bytes
from ...shared.catalogue.machines import load_hardware, override_hardware
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    HardwareChanges,
    JsonFlag,
    OptimizerName,
    OutputPath,
    StatedBatchSize,
    StatedSequenceLength,
    budget_option,
    changes_of,
    command_app,
    examples,
    keep_apart,
)
from ...shared.cli.output import give
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.training_options import FULL_TRAINING
from ...shared.workloads.dtypes import choose_dtype
from ...sim.commands.model_choice import PredictedKnown
from ...sim.commands.space_options import ProductKnobs
from ...sim.questions.largest import LargestRequest, largest_models
from ..published.largest import CLAIMS, published_largest

__all__ = ["largest"]

_MACHINES: Final = ("rtx-4090", "a100-40gb", "a100-80gb", "h200-141gb")
"""Devices of 24, 40, 80 and 141 GB."""
_UNLIMITED: Final = "unlimited"
_HOSTS: Final = ("128GiB", "256GiB", "512GiB", _UNLIMITED)

largest = command_app()


def _host_memory(text: str) -> str:
    """``text``, once it is sure that it is a size or ``unlimited``; raises typer.BadParameter."""
    if text != _UNLIMITED:
        try:
            budget_option(text)
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{error.message} Or say {_UNLIMITED}.") from error
    return text


Machines = Annotated[
    list[str] | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="Ask about this machine (repeatable), instead of devices of 24, 40, 80 and 141 GB and of what was "
        "published.",
    ),
]
HostMemories = Annotated[
    list[str] | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE|unlimited",
        parser=_host_memory,
        help="Memory of the host (repeatable), instead of 128GiB, 256GiB, 512GiB and unlimited.",
    ),
]
AddedDisk = Annotated[
    str | None,
    typer.Option(
        "--disk",
        metavar="NAME",
        help="Add rows with this disk of the catalogue, where what the host cannot hold may lie; a machine that "
        "has one has such rows without this option.",
    ),
]


@largest.command(
    epilog=examples(
        "protwin largest",
        "protwin largest --hardware rtx-3090 --host-memory 64GiB --host-memory 128GiB --sequence-length 1024",
        "protwin largest --hardware rtx-4090 --host-memory 128GiB --disk nvme-pcie4-2tb",
        "protwin largest --hardware machine.toml --optimizer adamw-8bit --json",
        "protwin largest --hardware rtx-3090 --host-memory 64GiB --lora-rank 16 --quantize nf4",
    )
)
@with_groups
def largest_command(
    *,
    hardware: Machines = None,
    changes: HardwareChanges = None,
    host_memories: HostMemories = None,
    batch_size: StatedBatchSize = 1,
    sequence_length: StatedSequenceLength = 2048,
    disk: AddedDisk = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="Element type of parameters.")] = "bfloat16",
    optimizer: OptimizerName = None,
    training: PredictedKnown,
    output: OutputPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the largest model of the catalogue that trains on a machine, by the memory of its host.

    Prints the model, its best plan's time and tokens per second, the busiest lane, and what the next larger model
    lacks.  One device of a machine trains.  Without --hardware, published results stand beside it, where the models
    are trained whole.  Nothing is traced: models that are not known in a training are left out by name.
    """
    keep_apart({"--output": output}, {f"--hardware {name}": name for name in hardware or ()}, as_json=as_json)
    wanted = changes_of([*(changes or ()), *([f"disk={disk}"] if disk is not None else [])])
    machines = [load_hardware(name) for name in hardware or _MACHINES]
    if wanted:
        machines = [override_hardware(machine, wanted) for machine in machines]
    choose_dtype(None, dtype, None)
    sizes = [None if text == _UNLIMITED else parse_bytes(text) for text in host_memories or _HOSTS]
    request = LargestRequest(
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer or Optimizer.ADAMW,
        options=training.options(None),
        loss_tiles=training.tiles(ProductKnobs()).loss or (1,),
    )
    num_claims = len(CLAIMS) if not hardware and request.options == FULL_TRAINING else 0
    num_cells = len(machines) * len(set(sizes))
    with progress_bar("largest models") as on_progress:
        found = largest_models(
            request, machines, sizes, on_progress=lambda done, total: on_progress(done, total + num_claims)
        )
        if num_claims:
            published = published_largest(request, lambda done, total: on_progress(num_cells + done, num_cells + total))
            found = found.model_copy(update={"published": published})
    from ...shared.tables.advice import largest_tables

    give(found, output, as_json=as_json, tables=lambda: largest_tables(found))
