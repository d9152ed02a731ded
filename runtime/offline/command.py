"""The command ``protwin checkpoint``: checkpoints on the disk, without a training.  torch is imported when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.errors import FileError
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes
from ...shared.cli.options import JsonFlag, command_app, examples, size_option
from ...shared.cli.output import show
from ...shared.cli.streams import say, write_data

__all__ = ["checkpoint"]

checkpoint = command_app()
checkpoint.info.help = "Inspect, consolidate and reshard checkpoints."

Saved = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a checkpoint.", show_default=False)]
NewFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", file_okay=False, help="A new folder to write.")
]


@checkpoint.command(
    epilog=examples("protwin checkpoint inspect saved", "protwin checkpoint inspect saved --json"),
)
def inspect(folder: Saved, as_json: JsonFlag = False) -> None:
    """Show what a checkpoint is, and whether it is whole.

    Step, model, ranks, files, sizes and damage: every file is read and compared with the hash that it had when it was
    saved.  The exit code is 2 if the checkpoint is damaged.
    """
    from .inspecting import inspect as inspected
    from .tables import checkpoint_tables

    with progress_bar("reading") as on_progress:
        report = inspected(folder, on_progress=on_progress)
    if as_json:
        write_data(report.to_json())
    else:
        show(checkpoint_tables(report))
    if report.damage is not None:
        raise FileError(report.damage)


@checkpoint.command(
    epilog=examples(
        "protwin checkpoint consolidate saved --output model",
        "protwin checkpoint consolidate saved --output model --max-shard-bytes 2GiB",
    )
)
def consolidate(
    folder: Saved,
    output: NewFolder,
    max_shard_bytes: Annotated[
        int,
        typer.Option(
            "--max-shard-bytes",
            metavar="SIZE",
            parser=size_option,
            help="Most bytes of one file; a larger tensor has a file of its own.",
        ),
    ] = "5GB",  # type: ignore[assignment]
    as_json: JsonFlag = False,
) -> None:
    """Write its weights as a folder for from_pretrained.

    Parameters and buffers in files of safetensors, with an index if they are several, and the configuration of a
    transformers model.  One tensor is in memory at a time.
    """
    if max_shard_bytes < 1:
        raise FileError(f"--max-shard-bytes is {max_shard_bytes}; it must be positive.")
    from .consolidating import ConsolidatedWeights
    from .consolidating import consolidate as consolidated

    with progress_bar("writing") as on_progress:
        files = consolidated(folder, output, max_shard_bytes=max_shard_bytes, on_progress=on_progress)
    written = ConsolidatedWeights.of(files)
    if as_json:
        write_data(written.to_json())
        return
    count = "1 file" if len(written.files) == 1 else f"{len(written.files)} files"
    say(f"{format_bytes(sum(written.files.values()))} of weights in {count}, in {output}")


@checkpoint.command(
    epilog=examples(
        "protwin checkpoint reshard saved --ranks 8 --output for-eight",
        "protwin checkpoint reshard saved --ranks 1 --output for-one",
    )
)
def reshard(
    folder: Saved,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", min=1, help="Ranks that will resume from it.")],
    output: NewFolder,
    as_json: JsonFlag = False,
) -> None:
    """Write the same checkpoint for another number of ranks.

    A resumption takes any checkpoint: this makes one of whose files every rank reads its part alone.  Ranks that were
    not there get the buffers of rank 0, and random states that follow from its seed and their number.  One tensor is in
    memory at a time.  With --json the new checkpoint is read again, and told as by inspect.
    """
    from .inspecting import inspect as inspected
    from .resharding import reshard as resharded

    with progress_bar("writing") as on_progress:
        resharded(folder, output, ranks, on_progress=on_progress)
    if as_json:
        with progress_bar("reading") as on_progress:
            write_data(inspected(output, on_progress=on_progress).to_json())
        return
    say(f"a checkpoint of {ranks} rank{'s' if ranks > 1 else ''} in {output}")
