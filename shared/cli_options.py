"""What the commands of all folders share: how an app is made, and options that mean the same everywhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import FileError, ProtwinError
from .units import parse_bytes


def writable(path: Path | None) -> Path | None:
    """``path``, once it is sure that it can be written: hours of work must not end in a wrong folder.

    Raises FileError if it is a folder, or if its own cannot be made or written.
    """
    if path is None:
        return None
    if path.is_dir():
        raise FileError(f"{path} is a folder; name a file in it.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise FileError(f"{path} cannot be written: {above} is no folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be written: {above} is not writable for you.")
    return path


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
OutputPath = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", callback=writable, help="Write the result to this file."),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|FILE",
        help="A model of the catalogue, a config.json in the Hugging Face form, or a saved workload.",
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        "--hardware", metavar="NAME|FILE", help="A machine of the catalogue (protwin hardware list), or its file."
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Samples per iteration.")]
SequenceLength = Annotated[int | None, typer.Option("--sequence-length", min=1, help="Tokens per sample.")]
DTypeName = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="Element type of parameters, instead of the configuration's."),
]
HardwareChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PART=VALUE", help="Change one part of the machine: device.memory_bytes=40GiB (repeatable)."
    ),
]
DeviceBudget = Annotated[
    int | None,
    typer.Option(
        "--device-budget",
        parser=parse_bytes,
        metavar="SIZE",
        help="Device memory that training may use (10GiB), instead of all that the machine has.",
    ),
]
CalibrationPath = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="What protwin calibrate wrote."),
]
NoCacheFlag = Annotated[bool, typer.Option("--no-cache", help="Trace the model anew and keep nothing of it.")]


def command_app() -> typer.Typer:
    """An app for one entry of the group ``protwin.commands``; give it one command, or several as subcommands."""
    return typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def examples(*lines: str) -> str:
    """The ``epilog`` of a command: example calls, kept line by line in its help."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


def changes_of(assignments: list[str] | None) -> dict[str, str]:
    """``--set`` options as a mapping from dotted field to value.  Raises ProtwinError if one is no assignment."""
    changes: dict[str, str] = {}
    for assignment in assignments or ():
        field, equals, value = assignment.partition("=")
        if not (field.strip() and equals and value.strip()):
            raise ProtwinError(f"--set {assignment} is no assignment. Write it as device.memory_bytes=40GiB.")
        changes[field.strip()] = value.strip()
    return changes


def cache_folder() -> Path:
    """Where this user's traced workloads are kept: ``$XDG_CACHE_HOME/protwin/workloads``, else under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "protwin" / "workloads"


def warn(message: str) -> None:
    """Print a warning on standard error; the command goes on."""
    sys.stderr.write(f"warning: {message}\n")
