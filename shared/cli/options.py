"""What the commands of all folders share: how an app is made, and options that mean the same everywhere."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from ..basics.documents import check_json_name
from ..basics.errors import FileError, ProtwinError
from ..basics.units import parse_bytes, parse_bytes_per_s, parse_count, parse_tokens
from ..optimizers.names import host_gradients_named, optimizer_named
from ..phases.operations import KernelPackage
from ..phases.tiling import LossHead
from ..schema.optimizer import HostGradients, Optimizer
from ..schema.plan import Plan, TrainingMethod
from .output import check_standard_output, is_standard_output
from .told import warn as warn


def writable(path: Path | None) -> Path | None:
    """``path``, once it is sure that it can be written: hours of work must not end in a wrong folder.

    Raises FileError if it is a folder or protected, or if its folder is missing or cannot be written.
    """
    if path is None or is_standard_output(path):
        return path
    if path.is_dir():
        raise FileError(f"{path} is a folder; name a file in it.")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise FileError(f"{path} cannot be written: it is not writable for you.")
        if not path.is_file():
            return path  # a device or a pipe, which is written to and not replaced
    folder = Path(os.path.realpath(path)).parent
    above = next(found for found in (folder, *folder.parents) if found.exists())
    if not above.is_dir():
        raise FileError(f"{path} cannot be written: {above} is no folder.")
    if above != folder:
        missing = shlex.quote(str(path.parent))
        raise FileError(f"{path} cannot be written: folder {path.parent} is missing. Make it first: mkdir -p {missing}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be written: {folder} is not writable for you.")
    return path


def writable_json(path: Path | None) -> Path | None:
    """``path``, once it is sure that JSON can be written to it.  Raises FileError."""
    if path is not None:
        check_json_name(path)
    return writable(path)


def writable_machine(path: Path | None) -> Path | None:
    """``path``, once it is sure that a machine can be written to it and read again.  Raises FileError."""
    if (
        path is not None
        and not is_standard_output(path)
        and path.suffix not in (".toml", ".json")
        and (path.is_file() or not path.exists())
    ):
        raise FileError(f"{path} says neither TOML nor JSON. Choose a name that ends in .toml or .json.")
    return writable(path)


def keep_apart(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, str | Path | None], *, as_json: bool = False
) -> None:
    """Make sure that no output, by option, takes the place of another or of what the command reads.

    Raises FileError, also if standard output would get two things (``check_standard_output``); devices and pipes hold
    nothing that could be lost.
    """
    check_standard_output(outputs, as_json=as_json)
    taken = {os.path.realpath(path): option for option, path in inputs.items() if path and os.path.isfile(path)}
    for option, path in outputs.items():
        if path is None or is_standard_output(path) or (path.exists() and not path.is_file()):
            continue
        owner = taken.setdefault(os.path.realpath(path), option)
        if owner != option:
            raise FileError(f"{option} {path} would take the place of {owner}, the same file. Name another one.")


_LEAST_BARE_BYTES: Final = 2**20
"""A budget below it that has no unit was hardly meant in bytes."""


def size_option(text: str) -> int:
    """The bytes of an option's value; raises typer.BadParameter, which names the option."""
    try:
        return parse_bytes(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def budget_option(text: str) -> int:
    """As ``size_option``, of a device's memory: a bare number that counts something larger than bytes is refused."""
    size_bytes = size_option(text)
    if size_bytes < _LEAST_BARE_BYTES and text.strip().isdecimal():
        raise typer.BadParameter(f"{text!r} is {size_bytes} bytes. Write the unit that is meant, such as {text}GiB.")
    return size_bytes


def rate_option(text: str) -> float:
    """The bytes per second of an option's value; raises typer.BadParameter, which names the option."""
    try:
        return parse_bytes_per_s(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def count_option(text: str) -> int:
    """The number of an option's value (1B, 300M, 2e9); raises typer.BadParameter, which names the option."""
    try:
        return parse_count(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def tokens_option(text: str | int) -> int:
    """The tokens of an option's value (2048, 8k), or its default; raises typer.BadParameter, which names the option."""
    tokens = parse_tokens(str(text))
    if tokens is None:
        raise typer.BadParameter(f"{text!r:.60} is no whole number of tokens. Write one such as 2048, or 8k for 8192.")
    if tokens < 1:
        raise typer.BadParameter(f"{tokens} is not in the range x>=1.")
    return tokens


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
OutputPath = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=writable_json,
        help="Write the result to this file; - is standard output, instead of tables.",
    ),
]
TimelinePath = Annotated[
    Path | None,
    typer.Option(
        "--timeline", metavar="FILE", callback=writable_json, help="Write a Chrome trace (open it in Perfetto)."
    ),
]
ConfigurationName = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME|FILE", help="A model of the catalogue, or a config.json.")
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
_BATCH_SIZE: Final = typer.Option("--batch-size", metavar="N", min=1, help="Samples of a micro-batch, on one rank.")
_SEQUENCE_LENGTH: Final = typer.Option(
    "--sequence-length", metavar="N", parser=tokens_option, help="Tokens per sample, at least 1; 8k is 8192."
)
BatchSize = Annotated[int | None, _BATCH_SIZE]
SequenceLength = Annotated[int | None, _SEQUENCE_LENGTH]
PackedLengths = Annotated[
    str | None,
    typer.Option(
        "--packed-lengths",
        metavar="LENGTHS",
        help="Samples end to end in each row of --sequence-length tokens, as flash attention takes them: their lengths "
        "(512,1024,2560), a JSON file of lengths, or uniform:LEAST:MOST.",
    ),
]
StatedBatchSize = Annotated[int, _BATCH_SIZE]
"""Of commands that cannot do without: the user states it, or the command's default does."""
StatedSequenceLength = Annotated[int, _SEQUENCE_LENGTH]
"""As ``StatedBatchSize``."""
DTypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Element type of parameters, instead of the published one or one that the device computes in.",
    ),
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
        parser=budget_option,
        metavar="SIZE",
        help="Device memory that training may use (10GiB), instead of all that the machine has.",
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the random weights and of the batches."),
]
CalibrationPath = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="What protwin calibrate wrote."),
]
MethodName = Annotated[
    TrainingMethod | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="How it is trained: full, osft (a part of each weight's directions), or bypass (every block of a student "
        "by itself).",
    ),
]
FrozenParts = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        metavar="PATTERN",
        help="Do not train these: model.embed_tokens, 'model.layers.[0-9].*' (repeatable).",
    ),
]
OptimizerName = Annotated[
    Optimizer | None,
    typer.Option(
        "--optimizer",
        parser=lambda text: optimizer_option(text),
        metavar="NAME",
        help=f"What steps the weights ({', '.join(Optimizer)}), instead of adamw or of what the plan names.",
    ),
]
HostGradientsName = Annotated[
    HostGradients | None,
    typer.Option(
        "--host-gradients",
        parser=lambda text: host_gradients_option(text),
        metavar="TYPE",
        help="Add up narrow gradients on the host in this type (float32), instead of in the parameters' own.",
    ),
]
KernelPackages = Annotated[
    list[KernelPackage] | None,
    typer.Option(
        "--kernels",
        metavar="PACKAGE",
        help="A package that the machine that trains has, whose kernels the model calls: flash-linear-attention, "
        "mamba-ssm or causal-conv1d (repeatable). Without it: PyTorch's operations.",
    ),
]
LossName = Annotated[
    LossHead | None,
    typer.Option(
        "--loss",
        help="How the loss is made: eager, as the model's code has it, with all logits in float32; narrow, the "
        "same without widening them; fused, whose gradient takes the place of the logits; chunked, head and loss by "
        "chunks of tokens (8 unless --loss-tiles names others). Unless given: eager, and whichever tiles are sensible.",
    ),
]
KeepsOutputs = Annotated[
    bool,
    typer.Option(
        "--keeps-outputs",
        help="The loop holds what the model gives until the next micro-batch's is there (outputs = model(**batch)), so "
        "that its logits stay on the device. Without it: the loss alone (loss = model(**batch).loss).",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        parser=count_option,
        metavar="N",
        help="Say what training on so many tokens takes (1B, 300M, 2e9): time, energy, cost.",
    ),
]
PriceEntries = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="NAME=USD|FILE",
        help="US dollars per hour of the whole machine (h100-80gb-x8=24), or a .toml file of such lines (repeatable).",
    ),
]
NoCacheFlag = Annotated[bool, typer.Option("--no-cache", help="Trace the model anew and keep nothing of it.")]


def command_app() -> typer.Typer:
    """An app for one command of the root; give it one command, or several as subcommands."""
    return typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def examples(*lines: str) -> str:
    """The ``epilog`` of a command: example calls, kept line by line in its help."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


def changes_of(assignments: list[str] | None) -> dict[str, str]:
    """``--set`` options as a mapping from dotted field to value.

    Raises ProtwinError if one is no assignment, or if two set the same field.
    """
    changes: dict[str, str] = {}
    for assignment in assignments or ():
        field, equals, value = assignment.partition("=")
        if not (field.strip() and equals and value.strip()):
            raise ProtwinError(f"--set {assignment} is no assignment. Write it as device.memory_bytes=40GiB.")
        if field.strip() in changes:
            raise ProtwinError(f"--set {assignment} is the second value for {field.strip()}. Give it one.")
        changes[field.strip()] = value.strip()
    return changes


def optimizer_option(text: str) -> Optimizer:
    """The optimizer of an option's value; raises typer.BadParameter, which names the option."""
    try:
        return optimizer_named(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def host_gradients_option(text: str) -> HostGradients:
    """The element type of an option's value; raises typer.BadParameter, which names the option."""
    try:
        return host_gradients_named(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def load_plan(path: Path, optimizer: Optimizer | None = None) -> Plan:
    """The plan of a file, with another optimizer if one is given.

    Warns of what its note says, such as that it is not certified.  Raises FileError.
    """
    plan = Plan.load(path)
    if optimizer is not None:
        plan = plan.model_copy(update={"optimizer": optimizer})
    if plan.note is not None:
        warn(f"{path}: {plan.note}")
    return plan


def cache_folder() -> Path:
    """Where this user's traced workloads are kept: ``$XDG_CACHE_HOME/protwin/workloads``, else under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "protwin" / "workloads"
