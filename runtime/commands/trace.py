"""The command ``protwin trace``.  torch is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ...shared.basics.errors import ProtwinError
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import ModelConfiguration, load_model_configuration, published_dtype
from ...shared.cli.loss_options import loss_tiles_of
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    ConfigurationName,
    DTypeName,
    JsonFlag,
    KeepsOutputs,
    MethodName,
    OutputPath,
    PackedLengths,
    Seed,
    SequenceLength,
    StatedBatchSize,
    command_app,
    examples,
    keep_apart,
    warn,
)
from ...shared.cli.output import give
from ...shared.cli.training_choice import TrainingChoice
from ...shared.phases.operations import left_out_words
from ...shared.phases.packing import parse_packed_lengths
from ...shared.phases.sequence_sharing import MOST_SEQUENCE_RANKS
from ...shared.phases.tiling import MOST_TILES, LossHead
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import TrainingMethod
from ...shared.schema.training_options import TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.workloads.check import option_words, quadratic_words
from ...shared.workloads.dtypes import choose_dtype

__all__ = ["trace"]

trace = command_app()

MachineToTrainOn = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="The machine to train on: it decides the element type, as in a search, and which kernels run.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How it is traced, and in which parts; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    loss_tiles: Annotated[
        list[int] | None,
        typer.Option(
            "--loss-tiles",
            min=2,
            max=MOST_TILES,
            metavar="TILES",
            help="Trace the loss in so many tiles of tokens too, for plans with loss_tiles. May be given several "
            "times.",
        ),
    ] = None
    is_real: Annotated[
        bool, typer.Option("--real", help="Build the model with random weights and time it on this machine.")
    ] = False
    seed: Seed = 0
    mlp_tiles: Annotated[
        list[int] | None,
        typer.Option(
            "--mlp-tiles",
            metavar="N",
            help="Tiles of tokens that the MLPs of blocks may run in, besides whole; may be given more than once.",
        ),
    ] = None
    mlp_modules: Annotated[
        list[str] | None,
        typer.Option(
            "--mlp-module",
            metavar="PATTERN",
            help="Dotted path of the MLPs that --mlp-tiles is about, with wildcards; may be given more than once.",
        ),
    ] = None
    sequence_ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--sequence-ranks",
            min=1,
            max=MOST_SEQUENCE_RANKS,
            metavar="N",
            help="Ranks that may share each sequence, besides one; may be given more than once.",
        ),
    ] = None
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", min=1, help="Give up a trace that takes longer.")
    ] = 300

    def parts(self, loss: LossHead | None) -> dict[str, Any]:
        """What runs in parts, by the names of a trace's parameters.  Raises what ``loss_tiles_of`` raises."""
        return {
            "mlp_tiles": self.mlp_tiles or (),
            "mlp_modules": self.mlp_modules,
            "loss_tiles": loss_tiles_of(loss, self.loss_tiles) or (),
            "sequence_ranks": self.sequence_ranks or (),
        }

    def check(self, options: TrainingOptions, packed_lengths: str | None) -> None:
        """Raise ProtwinError if it contradicts itself or how the model is trained."""
        if self.mlp_modules and not self.mlp_tiles:
            raise ProtwinError("--mlp-module names what runs in tiles. Say in how many: --mlp-tiles 4.")
        if self.is_real and options.autocast is not None:
            raise ProtwinError(
                "--real computes in the dtype of the parameters. Leave out --autocast, or trace without it."
            )
        if self.is_real and packed_lengths is not None:
            raise ProtwinError("--real runs on rows of one sample. Leave out --packed-lengths, or trace without it.")


@dataclass(frozen=True, kw_only=True)
class TracedTraining(TrainingChoice):
    """With what the loop holds."""

    keeps_outputs: KeepsOutputs = False


@trace.command(
    epilog=examples(
        "protwin trace --model llama-3-8b --batch-size 1 --sequence-length 2048 --output workload.json",
        "protwin trace --model config.json --batch-size 4 --sequence-length 128 --real --output workload.json",
        "protwin trace --model llama-3-8b --batch-size 1 --sequence-length 131072 --mlp-tiles 8 --output workload.json",
    )
)
@with_groups
def trace_command(
    *,
    model: ConfigurationName,
    batch_size: StatedBatchSize,
    sequence_length: SequenceLength = None,
    packed_lengths: PackedLengths = None,
    dtype: DTypeName = None,
    hardware: MachineToTrainOn = None,
    method: MethodName = None,
    training: TracedTraining,
    tracing: Tracing,
    output: OutputPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Write down what a model does in one iteration: its workload, from which everything else is answered.

    Without --dtype and --hardware, parameters have the element type that the model was published in.
    """
    keep_apart({"--output": output}, {"--model": model, "--hardware": hardware}, as_json=as_json)
    device = None if hardware is None else load_hardware(hardware).device
    described = load_model_configuration(model)
    chosen = choose_dtype(published_dtype(described.config), dtype, device)
    if method is TrainingMethod.BYPASS:
        raise ProtwinError(f"--method {method} trains a student, which a search traces with its teacher. Leave it out.")
    options = training.options(method)
    parts = tracing.parts(training.loss)
    tracing.check(options, packed_lengths)
    if packed_lengths is not None and sequence_length is None:
        raise ProtwinError("--sequence-length is missing: the tokens of a row, of all its packed samples. State it.")
    packing = None
    if packed_lengths is not None and sequence_length is not None:
        packing = parse_packed_lengths(packed_lengths, sequence_length)
    if tracing.is_real:
        workload = _timed_workload(
            described,
            batch_size,
            sequence_length,
            dtype=chosen.dtype,
            seed=tracing.seed,
            options=options,
            parts=parts,
        )
    else:
        from ..devices.time_limit import time_limit
        from ..tracing.configurations import workload_of_configuration

        with progress_bar("tracing") as on_progress, time_limit(f"tracing {described.name}", tracing.time_limit_s):
            workload = workload_of_configuration(
                described.config,
                name=described.name,
                batch_size=batch_size,
                sequence_length=sequence_length,
                dtype=chosen.dtype,
                options=options,
                device_kind=DeviceKind.CUDA if device is None else device.kind,
                packing=packing,
                on_progress=on_progress,
                **parts,
            )
    from ...shared.tables.workloads import workload_tables

    workload = chosen.note_in(workload, described.config)
    left_out = left_out_words(workload.kernels_left_out, workload.model_name)
    for said in (quadratic_words(workload), left_out, *option_words(workload)):
        if said is not None:
            warn(said)
    give(workload, output, as_json=as_json, tables=lambda: workload_tables(workload))


def _timed_workload(
    described: ModelConfiguration,
    batch_size: int,
    sequence_length: int | None,
    *,
    dtype: str | None,
    seed: int,
    options: TrainingOptions,
    parts: Mapping[str, Any],
) -> Workload:
    """The workload of the model with random weights, on text or what it reads, timed on this machine.

    ``parts``: as ``Tracing.parts`` has them.
    """
    from ..data.byte_text import read_text
    from ..tracing.tracing import trace as trace_model
    from .random_batches import random_batches
    from .random_model import random_model

    model = random_model(described.config, described.name, dtype, seed, options)
    batches = random_batches(
        model,
        read_text(None),
        name=described.name,
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_batches=1,
        seed=seed,
        images=options.images,
    )
    with progress_bar("tracing") as report:
        return trace_model(
            model,
            next(batches),
            name=described.name,
            loss_head=options.loss_head or LossHead.EAGER,
            keeps_outputs=options.keeps_outputs,
            on_progress=report,
            **parts,
        )
