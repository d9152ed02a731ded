"""``protwin sweep``: the best plan at many shapes of the batch, and where offloading becomes free."""

from __future__ import annotations

import os
from itertools import product
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...shared.basics.errors import PlanError, WorkloadError
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.list_prices import with_list_prices
from ...shared.cli.exits import report_interruption
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    Tokens,
    command_app,
    examples,
    warn,
)
from ...shared.cli.output import save
from ...shared.cli.ranges import Numbers, lengths_option, numbers_option
from ...shared.cli.report_options import AnswerChoice
from ...shared.phases.operations import lowering_notes
from ...shared.records.question import exceeded_tokens
from ...shared.sweeps.sweep import Sweep, crossovers
from ...shared.workloads.source import is_saved_workload
from ..questions.sweep import SweepRequest
from ..questions.sweep import sweep as sweep_points
from ..searching.request import SearchRequest
from .advise import NumProcesses
from .machine_choice import MachineChoice, check_budget, unused_devices
from .model_choice import NamedModel, PredictedTraining
from .options import Margin, margin_frac_of
from .space_options import (
    AllowedSequenceRanks,
    ProductKnobs,
    StepChoice,
    groups_that_share,
)
from .warnings import warn_of_kernels, warn_of_options

if TYPE_CHECKING:
    from ...shared.report.page import Report
    from ...shared.tables.table import Parts

__all__ = ["sweep"]

_MOST_POINTS: Final = 500
sweep = command_app()

SequenceLengths = Annotated[
    Numbers,
    typer.Option(
        "--sequence-length",
        parser=lengths_option,
        metavar="RANGE",
        help="Tokens per sample: A:B doubles from A to B, A:B:STEP goes in steps, or a list; 8k is 8192.",
    ),
]
BatchSizes = Annotated[
    Numbers | None,
    typer.Option(
        "--batch-size",
        parser=numbers_option,
        metavar="RANGE",
        help="Samples per micro-batch, in the same way.",
    ),
]


@sweep.command(
    epilog=examples(
        "protwin sweep --model llama-3-8b --hardware h100-80gb --sequence-length 2048:131072 --batch-size 1:16",
        "protwin sweep --model llama-3-8b --hardware rtx-4090 --sequence-length 2048,4096 --batch-size 1:64 "
        "--lora-rank 16 --report sweep.html",
    )
)
@with_groups
def sweep_command(
    *,
    named: NamedModel,
    batches: BatchSizes = None,
    training: PredictedTraining,
    on: MachineChoice,
    sequences: SequenceLengths,
    margin: Margin = None,
    products: ProductKnobs,
    steps: StepChoice,
    sequence_ranks: AllowedSequenceRanks = None,
    tokens: Tokens = None,
    processes: NumProcesses = None,
    answer: AnswerChoice,
) -> None:
    """Find the best plan at every batch size and sequence length, and where offloading becomes free.

    Each point is searched as protwin search does, beside a device of unlimited memory: what of a plan's time is due to
    offloading, and what to recomputation.  Points that no plan fits say what is missing.  A machine costs what --price
    or its file says, else what a public list said on the day that is told.  Ctrl-C ends with the points so far.
    """
    answer.keep_apart({**named.files, **on.files})
    sequence_lengths, batch_sizes = sequences.values, (1,) if batches is None else batches.values
    _check_shapes(named.model, sequence_lengths, batch_sizes)
    (machine,), listed = with_list_prices([on.machine()])
    check_budget(on.device_budget_bytes, machine)
    num_ranks = steps.ranks_of(machine)
    if (unused := unused_devices(machine, num_ranks)) is not None:
        warn(unused)
    groups_that_share(sequence_ranks, num_ranks)
    choice = named.choice(
        training,
        machine,
        batch_size=batch_sizes[0],
        sequence_length=sequence_lengths[0],
        has_cache=not answer.no_cache,
        sequence_ranks=sequence_ranks,
        tiles=training.tiles(products),
    )
    if num_ranks > 1 and choice.student is not None:
        raise PlanError(
            f"{num_ranks} ranks that learn from {named.model} are stages and replicas, which a sweep does not search. "
            f"Leave --ranks and --parallel out, or ask protwin search about one shape."
        )
    with progress_bar("searching points") as on_progress:
        asked = SweepRequest(
            workload_at=choice.at,
            workload_in_tiles=choice.with_needed_tiles.at,
            tiles=choice.tiles,
            run_tokens=tokens,
            request=SearchRequest(
                workload=choice.workload(),
                hardware=machine,
                calibration=on.factors(),
                device_budget_bytes=on.device_budget_bytes,
                margin_frac=margin_frac_of(margin),
                space=choice.tiles.space.model_copy(
                    update={
                        "product_stride": products.strides,
                        "sequence_ranks": tuple(sequence_ranks) if sequence_ranks else None,
                    }
                ),
                step=steps.step(num_ranks),
            ),
        )
        smallest = asked.request.smallest_workload()
        warn_of_options(smallest)
        warn_of_kernels(smallest)
        points, is_complete = sweep_points(
            asked,
            [(batch_size, length) for length, batch_size in product(sequence_lengths, batch_sizes)],
            num_processes=processes or len(os.sched_getaffinity(0)),
            on_progress=on_progress,
        )
    workload = choice.workload()
    found = Sweep(
        model=named.model,
        model_name=workload.model_name,
        hardware_name=machine.name,
        device_budget_bytes=on.device_budget_bytes,
        num_ranks=num_ranks,
        micro_batches=steps.micro_batches or 1,
        sequence_lengths=sequence_lengths,
        batch_sizes=batch_sizes,
        rotary_tokens=exceeded_tokens(workload, max(sequence_lengths)),
        points=tuple(points),
        crossovers=crossovers(points),
        list_price=listed[0] if listed else None,
        emulated=lowering_notes(training.compiled, training.float8, choice.options.packed_products),
        is_complete=is_complete,
    )
    save(found, answer.output)
    answer.tell(found, lambda: _tables(found), lambda: _report(found))
    if not is_complete:
        raise typer.Exit(
            report_interruption(answer.output, answer.report, holding="the sweep so far, which is not complete,")
        )


def _check_shapes(model: str, sequence_lengths: tuple[int, ...], batch_sizes: tuple[int, ...]) -> None:
    """Raise WorkloadError if the model has one shape, PlanError if the points are too many."""
    if is_saved_workload(model):
        raise WorkloadError(
            f"{model} is a saved workload, whose batch has one shape. Name the model itself, or its config.json."
        )
    num_points = len(sequence_lengths) * len(batch_sizes)
    if num_points > _MOST_POINTS:
        raise PlanError(
            f"{len(sequence_lengths):,} sequence lengths and {len(batch_sizes):,} batch sizes make {num_points:,} "
            f"points, but a sweep has at most {_MOST_POINTS}. Name fewer: A:B doubles from A to B."
        )


def _tables(found: Sweep) -> Parts:
    from ...shared.sweeps.tables import sweep_tables

    return sweep_tables(found)


def _report(found: Sweep) -> Report:
    from ...shared.sweeps.report import sweep_report

    return sweep_report(found)
