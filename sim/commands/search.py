"""The command ``search``: the fastest plan of a model on a machine, without the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from ...shared.answers.search_result import BatchSearchResult, Goal, Risk, SearchResult
from ...shared.basics.errors import InfeasibleError
from ...shared.basics.gc_pause import gc_paused
from ...shared.basics.progress import OnProgress, progress_bar
from ...shared.cli.exits import report_interruption
from ...shared.cli.loss_options import loss_tiles_of
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    BatchSize,
    SequenceLength,
    Tokens,
    command_app,
    examples,
    warn,
)
from ...shared.cli.output import save
from ...shared.cli.report_options import AnswerChoice
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..memory.libraries import rank_host_bytes
from ..questions.goals import SEQUENCE_STEP, Shapes, search_goal
from ..questions.host_bound import with_host_bound
from ..questions.remedies import with_remedies
from ..searching.request import GlobalBatch, SearchRequest
from .machine_choice import MachineChoice, check_budget, unused_devices
from .model_choice import ModelChoice, NamedModel, PredictedTraining
from .options import (
    BaselinePlans,
    GlobalBatchSize,
    GoalName,
    Margin,
    RiskName,
    WhatIfCommand,
    WhatIfQuestions,
    check_batch,
    check_goal,
    check_risk,
    margin_frac_of,
    with_run,
)
from .pipelines import may_be_pipeline, refuse, search_pipelines
from .space_options import (
    AllowedKnobs,
    AllowedSequenceRanks,
    StepChoice,
    groups_that_share,
)
from .warnings import warn_of_attention, warn_of_dtype, warn_of_kernels, warn_of_memory, warn_of_options

if TYPE_CHECKING:
    from ...shared.report.page import Report
    from ...shared.tables.table import Parts
    from ..questions.what_if import Question
    from ..questions.what_if_methods import MethodChange, WorkloadWith

__all__ = ["search"]

search = command_app()


@search.command(
    cls=WhatIfCommand,
    epilog=examples(
        "protwin search --model llama-3-8b --hardware rtx-3090 --batch-size 1 --sequence-length 2048",
        "protwin search --model workload.json --hardware machine.toml --device-budget 10GiB --output plan.json",
        "protwin search --model gpt2 --hardware rtx-3090 --batch-size 8 --sequence-length 512 --what-if rtx-4090",
        "protwin search --model llama-3-8b --hardware h100-80gb-x8 --batch-size 1 --sequence-length 2048 --ranks 8",
        "protwin search --model llama-3-8b --student student.toml --hardware rtx-4090 --batch-size 1 "
        "--sequence-length 2048",
    ),
)
@gc_paused()
@with_groups
def search_command(
    *,
    named: NamedModel,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    training: PredictedTraining,
    on: MachineChoice,
    knobs: AllowedKnobs,
    global_batch: GlobalBatchSize = None,
    steps: StepChoice,
    sequence_ranks: AllowedSequenceRanks = None,
    questions: WhatIfQuestions = None,
    goal: GoalName = Goal.FASTEST,
    risk: RiskName = Risk.MEAN,
    margin: Margin = None,
    baseline: BaselinePlans = None,
    tokens: Tokens = None,
    answer: AnswerChoice,
) -> None:
    """Find the fastest plan that fits a model on a machine, without the machine.

    Prints the plan, its time by phase, its memory with what is alive at the peak, what each lane does, and what is
    proven about every other plan.  --compile and --float8 search for what others run: protwin's own runtime carries out
    no such plan, and a note in it says so.  --output writes the plan.  A distillation on several ranks is split into
    stages and replicas, and --output writes a pipeline.  Ctrl-C ends the search with the best plan so far; what
    --output and --report write then says that it is not certified.
    """
    check_batch(global_batch, batch_size, steps.micro_batches)
    check_goal(
        goal,
        batch_size=batch_size,
        sequence_length=sequence_length,
        global_batch=global_batch,
        packed_lengths=named.packed_lengths,
    )
    check_risk(risk, goal)
    answer.keep_apart({**named.files, **on.files, **{f"--baseline {path}": path for path in baseline or ()}})
    machine = on.machine()
    check_budget(on.device_budget_bytes, machine)
    factors = on.factors()
    num_ranks = steps.ranks_of(machine)
    if goal is not Goal.CHEAPEST and (unused := unused_devices(machine, num_ranks)) is not None:
        warn(unused)
    what_ifs = _what_ifs(questions, machine, factors)
    num_groups = groups_that_share(sequence_ranks, num_ranks)
    space = knobs.space(
        loss_tiles=loss_tiles_of(training.loss, knobs.products.loss_tiles), sequence_ranks=sequence_ranks
    )
    choice = named.choice(
        training,
        machine,
        batch_size=batch_size,
        sequence_length=sequence_length,
        has_cache=not answer.no_cache,
        sequence_ranks=sequence_ranks,
        tiles=training.tiles(
            knobs.products,
            at_any_length=goal in (Goal.LONGEST_SEQUENCE, Goal.LARGEST_BATCH),
            is_needed=goal is Goal.LEAST_MEMORY,
        ),
    )

    def workload_with(change: MethodChange) -> Workload | GlobalBatch:
        changed = choice.changed(change)
        return changed.workload() if global_batch is None else changed.global_batch(global_batch, num_groups)

    with progress_bar("searching"):
        request = SearchRequest(
            workload=_first_workload(goal, choice)
            if global_batch is None
            else choice.global_batch(global_batch, num_groups),
            hardware=machine,
            calibration=factors,
            device_budget_bytes=on.device_budget_bytes,
            margin_frac=margin_frac_of(margin),
            baselines=tuple((str(path), Plan.load(path)) for path in baseline or ()),
            space=space,
            risk=risk,
            step=steps.step(num_ranks),
        )
    if may_be_pipeline(request):
        of_one = {"--what-if": questions, "--goal": goal is not Goal.FASTEST, "--baseline": baseline}
        of_one["--risk"] = risk is not Risk.MEAN
        others = {"--tokens": tokens, "--shard-ranks": steps.shard_ranks, "--report": answer.report}
        refuse({**of_one, **others}, "a distillation on several ranks")
        search_pipelines(request, output=answer.output, as_json=answer.as_json)
        return
    with progress_bar("searching") as on_progress:
        # A question that cannot be answered is told at once.
        asked = what_ifs(request, workload_with if choice.has_shapes else None)
        found, request = _found(goal, request, choice, on_progress)
        found = with_run(found, tokens)
        found, is_interrupted = _with_more(found, goal, request, asked, on_progress)
    if not is_interrupted:
        found = with_remedies(found, request, choice.untraced)
    result = found.result
    warn_of_dtype(result.prediction, machine)
    chosen = _workload_of(request, found, choice)
    for warn_of in (warn_of_attention, warn_of_kernels, warn_of_options):
        warn_of(chosen)
    warn_of_memory(result.prediction, rank_host_bytes(machine, result.plan.num_ranks))
    save(result.noted_plan.model_copy(update={"made_for": chosen.words}), answer.output)
    answer.tell(result, lambda: _tables(result), lambda: _report(result, chosen))
    if is_interrupted:
        certified = result.certificate.is_certified
        holding = "the plan, which is certified," if certified else "the best plan so far, which is not certified,"
        raise typer.Exit(report_interruption(answer.output, answer.report, holding=holding))


def _first_workload(goal: Goal, choice: ModelChoice) -> Workload:
    """The workload that is asked about, or the smallest where the goal chooses the shape."""
    if goal is Goal.LONGEST_SEQUENCE and choice.has_shapes:
        return choice.at_sequence_length(SEQUENCE_STEP)
    if goal is Goal.LARGEST_BATCH and choice.has_shapes:
        return choice.at_batch_size(1)
    return choice.workload()


def _found(
    goal: Goal, request: SearchRequest, choice: ModelChoice, on_progress: OnProgress
) -> tuple[BatchSearchResult, SearchRequest]:
    """The best plan, and the request that it answers: where nothing fits whole, one for tiles.

    Raises InfeasibleError, which says what would fit instead, and what ``search_goal`` raises.
    """
    shapes = Shapes(choice.at_batch_size, choice.at_sequence_length) if choice.has_shapes else None
    try:
        return search_goal(goal, request, shapes, on_progress=on_progress, keep_interrupted=True), request
    except InfeasibleError as error:
        needed, untried = choice.with_needed_tiles, ""
        try:
            tiled = choice.tiles.search_in_tiles(request, needed.at_batch_size) if choice.has_shapes else None
        except ModuleNotFoundError as missing:
            tiled = None
            untried = f" Plans in tiles were not tried: a trace in tiles needs {missing.name}, which is not installed."
        if tiled is not None:
            return _found(goal, tiled, needed, on_progress)
        if isinstance(request.workload, GlobalBatch):
            raise InfeasibleError(f"{error}{untried}") from error
        sized = choice if choice.is_known and goal is Goal.FASTEST else None
        raise InfeasibleError(f"{error}{_what_fits_instead(request, sized)}{untried}") from error


def _with_more(
    found: BatchSearchResult, goal: Goal, request: SearchRequest, asked: list[Question], on_progress: OnProgress
) -> tuple[BatchSearchResult, bool]:
    """``found`` with what more memory of the host would bring and the answers to ``asked``; whether Ctrl-C ended it."""
    is_interrupted = found.result.certificate.is_interrupted
    if goal is Goal.FASTEST and not is_interrupted:
        found, is_interrupted = with_host_bound(found, request, on_progress)
    if asked and not is_interrupted:
        from ..questions.what_if import what_if

        try:
            answers = what_if(request, found.result.prediction.iteration_s, asked, on_progress=on_progress)
            found = found.model_copy(update={"result": found.result.model_copy(update={"what_if": answers})})
        except KeyboardInterrupt:
            is_interrupted = True
    return found, is_interrupted


def _workload_of(request: SearchRequest, found: BatchSearchResult, choice: ModelChoice) -> Workload:
    """The workload of the recommended plan."""
    if isinstance(request.workload, GlobalBatch):
        return request.workload.workload_at(found.micro_batch_size)
    if found.result.plan.workload_id == request.workload.identity:
        return request.workload
    question = found.result.prediction.question
    assert question is not None, "a prediction says what was asked"
    return choice.at(question.samples_per_micro_batch, question.sequence_length)


def _what_fits_instead(request: SearchRequest, sized: ModelChoice | None) -> str:
    """A smaller batch or more devices that fit where the plans that were asked about do not, in words.

    ``sized``: the model, where other batches of it are worth a look.
    """
    from ..questions.what_if import fewest_ranks, largest_batch

    batch_size = None
    if sized is not None and sized.tiles.is_needed:
        # A trace in tiles takes minutes, and a batch that fits whole needs none.
        batch_size = largest_batch(request, sized.at_batch_size, sized.untraced_at_batch_size)
    elif sized is not None:
        batch_size = largest_batch(request, sized.at_batch_size)
    smaller = f" A batch of {batch_size} fits as things are." if batch_size is not None else ""
    num_ranks = fewest_ranks(request) if request.step.num_ranks > 1 else None
    more = f" A plan of {num_ranks} ranks fits this machine." if num_ranks is not None else ""
    return smaller + more


def _what_ifs(
    wanted: list[str] | None, machine: Hardware, factors: Calibration | None
) -> Callable[[SearchRequest, WorkloadWith | None], list[Question]]:
    """Checks the names of what-if questions; gives the questions about a request.

    That takes what makes the workload of another method, or None where nothing does.
    """
    if not wanted:
        return lambda request, workload_with: []
    from ..questions.what_if import USUAL, questions
    from ..questions.what_if_machines import changed_machines, part_questions

    machines = changed_machines(wanted, machine, factors)
    return lambda request, workload_with: [
        *(questions(request) if USUAL in wanted else ()),
        *part_questions(request, machines, workload_with),
    ]


def _tables(result: SearchResult) -> Parts:
    from ...shared.tables.search import search_tables

    return search_tables(result)


def _report(result: SearchResult, workload: Workload) -> Report:
    from ...shared.report.report import Facts, report

    facts = Facts(
        predicted=result.prediction,
        budget_bytes=result.device_budget_bytes,
        schedule=compile_schedule(result.plan, workload),
        search=result,
    )
    return report(f"{result.model_name} on {result.hardware_name}: the plan that was found", facts)
