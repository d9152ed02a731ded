"""``protwin advise``: which machine to rent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...shared.answers.advice import Advice
from ...shared.answers.list_price import ListPrice
from ...shared.answers.search_result import Goal
from ...shared.basics.errors import CalibrationError, HardwareError, PlanError
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.list_prices import with_list_prices
from ...shared.catalogue.machines import cluster_names, load_hardware, machine_names, override_hardware
from ...shared.catalogue.prices import parse_prices, with_prices
from ...shared.cli.exits import report_interruption
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    DeviceBudget,
    HardwareChanges,
    HostGradientsName,
    OptimizerName,
    PriceEntries,
    SequenceLength,
    Tokens,
    cache_folder,
    changes_of,
    command_app,
    examples,
    warn,
    writable_json,
)
from ...shared.cli.output import save
from ...shared.cli.report_options import AnswerChoice
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ..questions.advise import AdviceRequest, Offer, check_request, machines_with, search_machine, whole_machines
from ..questions.advise import advise as advise_machines
from ..space.step_spec import MOST_RANKS, check_shares
from .machine_choice import check_budget, price_files
from .model_choice import NamedModel, PredictedTraining, student_of
from .options import MOST_SAMPLES, Margin, MaxGradientNorm, margin_frac_of
from .space_options import ProductKnobs
from .warnings import warn_of_kernels, warn_of_options

if TYPE_CHECKING:
    from ...shared.report.page import Report

__all__ = ["advise"]

advise = command_app()

SamplesPerStep = Annotated[
    int, typer.Option("--global-batch", metavar="N", min=1, max=MOST_SAMPLES, help="Samples per step.")
]
LongestFlag = Annotated[
    bool,
    typer.Option(
        "--longest",
        help="Ask for the longest sequences that train, in micro-batches of one sample, instead of --sequence-length.",
    ),
]
Machines = Annotated[
    list[str] | None,
    typer.Option(
        "--hardware", metavar="NAME|FILE", help="Ask about this machine (repeatable), instead of the catalogue."
    ),
]
AllowedRanks = Annotated[
    list[int] | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        max=MOST_RANKS,
        help="Ask about so many devices of each machine that has them (repeatable), instead of all and of one.",
    ),
]
CalibrationPaths = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration", metavar="FILE", help="Factors for the machine that they were measured on (repeatable)."
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option("--processes", metavar="N", min=1, max=1024, help="Searches at once: one per core if left out."),
]
StatePath = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="FILE",
        callback=writable_json,
        help="Keep answers here as they come, and go on from them when asked again.",
    ),
]


@advise.command(
    epilog=examples(
        "protwin advise --model llama-3-8b --global-batch 16 --sequence-length 2048",
        "protwin advise --model llama-3-8b --global-batch 16 --sequence-length 2048 --report advice.html",
        "protwin advise --model llama-3-8b --global-batch 16 --sequence-length 2048 --hardware rtx-4090 "
        "--hardware machine.toml --state advice-state.json --json",
        "protwin advise --model llama-3-8b --global-batch 8 --longest --report longest.html",
    )
)
@with_groups
def advise_command(
    *,
    named: NamedModel,
    global_batch: SamplesPerStep,
    longest: LongestFlag = False,
    sequence_length: SequenceLength = None,
    hardware: Machines = None,
    ranks: AllowedRanks = None,
    training: PredictedTraining,
    changes: HardwareChanges = None,
    device_budget_bytes: DeviceBudget = None,
    margin: Margin = None,
    calibrations: CalibrationPaths = None,
    prices: PriceEntries = None,
    tokens: Tokens = None,
    max_gradient_norm: MaxGradientNorm = None,
    optimizer: OptimizerName = None,
    host_gradients: HostGradientsName = None,
    products: ProductKnobs,
    processes: NumProcesses = None,
    state: StatePath = None,
    answer: AnswerChoice,
) -> None:
    """Rank machines by the time of the best plan for a model on each, and by what a token costs.

    Every machine is searched over plans and micro-batch sizes, without having it, and rented as a whole: a device that
    idles is paid for too.  With --longest they are ranked by the longest sequences that train there.  Rent is what
    --price or a machine's own file says, else what a public list said on the day that is told.  --set changes every
    machine.  Ctrl-C ends with the ranking so far; --output and --report write it too, and name the missing machines.
    """
    read = {f"--hardware {name}": name for name in hardware or ()}
    read |= {f"--calibration {path}": str(path) for path in calibrations or ()}
    answer.keep_apart({**named.files, **read, **price_files(prices)}, state=state)
    if longest and sequence_length is not None:
        raise PlanError(
            f"--longest chooses the length, but --sequence-length {sequence_length} fixes it. Leave one out."
        )
    if longest and named.packed_lengths is not None:
        raise PlanError(
            f"--longest chooses the length, but --packed-lengths {named.packed_lengths} fills rows of one. Leave one "
            f"out."
        )
    machines, listed = _machines(hardware or (*machine_names(), *cluster_names()), changes_of(changes), prices)
    for box in machines.values() if hardware else ():
        check_budget(device_budget_bytes, box)
    request = AdviceRequest(
        named.model,
        sequence_length,
        named.dtype,
        global_batch,
        max_gradient_norm,
        _fingerprint(named.model, named.packed_lengths),
        options=training.options(named.method),
        packed_lengths=named.packed_lengths,
        device_budget_bytes=device_budget_bytes,
        margin_frac=margin_frac_of(margin),
        calibrations=_calibrations(calibrations or (), machines),
        num_tokens=tokens,
        optimizer=optimizer or Optimizer.ADAMW,
        host_gradients=host_gradients or HostGradients.PARAMETERS,
        student=student_of(named.model, named.student, named.method),
        goal=Goal.LONGEST_SEQUENCE if longest else Goal.FASTEST,
        tiles=training.tiles(products),
        product_stride=products.strides,
    )
    numbers = sorted(set(ranks or ()))
    for number in numbers:
        check_shares(global_batch, number)
    cache = None if answer.no_cache else cache_folder()
    num_parts = check_request(request, cache, named.method if training.subspaces.unfreeze_rank_ratio is None else None)
    smallest = request.smallest_workload(cache)
    warn_of_options(smallest)
    warn_of_kernels(smallest)
    boxes = list(machines.values())
    asked = machines_with(boxes, numbers) if numbers else whole_machines(boxes, num_parts)
    if hardware:
        _warn_of_small(boxes, asked)
    with progress_bar("searching machines") as on_progress:
        found = advise_machines(
            request,
            asked,
            search_one=partial(search_machine, cache=cache),
            num_processes=processes or len(os.sched_getaffinity(0)),
            state=state,
            ranks=numbers,
            on_progress=on_progress,
            keep_interrupted=True,
        ).model_copy(update={"list_prices": listed})
    save(found, answer.output)
    from ...shared.tables.advice import advice_tables

    answer.tell(found, lambda: advice_tables(found), lambda: _report(found))
    if not found.is_complete:
        raise typer.Exit(
            report_interruption(answer.output, answer.report, holding="the ranking so far, which is not complete,")
        )


def _warn_of_small(boxes: Sequence[Hardware], asked: Sequence[Offer]) -> None:
    for name in sorted({box.name for box in boxes} - {one.hardware.name for one in asked}):
        warn(f"{name} has fewer devices than --ranks names, and is left out.")


def _calibrations(paths: Iterable[Path], machines: Mapping[str, Hardware]) -> tuple[Calibration, ...]:
    """The calibrations, each of a machine that is asked about.  Raises CalibrationError."""
    found = [Calibration.load(path) for path in paths]
    for calibration, path in zip(found, paths, strict=True):
        if calibration.hardware_name not in machines:
            raise CalibrationError(
                f"{path} was measured on {calibration.hardware_name}, which is not among the machines that are asked "
                f"about. Name it with --hardware, or leave the calibration out."
            )
    return tuple(found)


def _machines(
    names: Iterable[str], changes: Mapping[str, str], prices: Sequence[str] | None
) -> tuple[dict[str, Hardware], tuple[ListPrice, ...]]:
    """The machines by their names, changed and priced, and the list prices of those that nobody states a price for.

    Raises HardwareError if two that differ are called the same, and as ``override_hardware`` and ``with_prices`` do.
    """
    found: dict[str, Hardware] = {}
    for name in names:
        machine = load_hardware(name)
        if changes:
            machine = override_hardware(machine, changes)
        if found.setdefault(machine.name, machine) != machine:
            raise HardwareError(
                f"--hardware {name} describes another machine than the one before it, which is called {machine.name} "
                f"too. Give one of the two another name."
            )
    if prices:
        found = {machine.name: machine for machine in with_prices(found.values(), parse_prices(prices))}
    priced, listed = with_list_prices(found.values())
    return {machine.name: machine for machine in priced}, listed


def _report(advice: Advice) -> Report:
    from ...shared.report.advice import advice_report

    return advice_report(advice)


def _fingerprint(model: str, packed_lengths: str | None) -> str:
    """Hash of the files of the model and of lengths, of this package's version and of the sources of its answers."""
    digest = hashlib.sha256()
    try:
        digest.update(version("protwin").encode())
    except PackageNotFoundError:
        digest.update(b"no version")
    sim = Path(__file__).parents[1]
    for folder in (sim, sim.parent / "shared"):
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.read_bytes())
    for named in (model, packed_lengths or ""):
        if os.path.isfile(named):
            digest.update(Path(named).read_bytes())
    return digest.hexdigest()[:32]
