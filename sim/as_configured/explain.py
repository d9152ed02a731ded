"""The answer about a file of another tool: its run predicted, and what a searched plan would do for it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...shared.answers.search_result import Lack, SearchResult
from ...shared.basics.errors import InfeasibleError, WorkloadError
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.foreign.asked_run import Checkpointing, Reading, Tool
from ...shared.methods.runtime_profile import RuntimeProfile
from ...shared.phases.operations import left_out_words
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.memory import allocator_warning
from ...shared.workloads.check import check_lowering
from ..engine.simulator import simulate
from ..memory.host import default_host_budget_bytes
from ..memory.libraries import rank_device_bytes
from ..questions.in_tiles import AskedTiles
from ..searching.baselines import SEGMENTS
from ..searching.request import SearchRequest, Step
from ..searching.search import search_batches
from ..searching.survival import SegmentRoom
from .configured_plan import configured_plan
from .explanation import OWN_ROW, Explanation, OtherReading
from .question import Said, Settled, as_here, settle, workload_in_tiles, workload_of

_RUNTIMES = {
    Tool.DEEPSPEED: "DeepSpeed's runtime",
    Tool.TORCHTITAN: "torchtitan's runtime",
    Tool.TRAINING_ARGUMENTS: "the Trainer's runtime",
    Tool.TRL: "the Trainer's runtime",
    Tool.AXOLOTL: "axolotl's runtime",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """On what, and within what, a file is explained."""

    file: str
    hardware_name: str | None
    """As the command line has it."""
    machine: Hardware | None
    changes: tuple[str, ...] = ()
    """Of ``--set``."""
    device_budget_bytes: int | None = None
    calibration: Calibration | None = None
    calibration_path: str | None = None
    cache: Path | None = None
    searches: bool = True
    """Whether a plan is searched beside it."""


def explain(
    reading: Reading, said: Said, asked: Asked, warn: Callable[[str], None], on_progress: OnProgress = no_progress
) -> Explanation:
    """What the run of ``reading`` takes on the machine that is asked about, and what a plan would do for it.

    Raises PlanError if something is missing that no file says, or if no plan does what the run does, and what
    ``resolve_workload`` and ``simulate`` raise.
    """
    settled = settle(reading, said, asked.machine, file=asked.file)
    here, plain = workload_of(as_here(settled), cache=asked.cache, warn=warn)
    workload, settled = _lowered(settled, (here, plain), asked, warn)
    configured = configured_plan(settled, workload, reading.tool)
    machine = _of_run(settled)
    record = _predicted(configured.plan, workload, machine, asked, configured.runtime)
    others = [
        OtherReading(
            name=words,
            iteration_s=other.iteration_s,
            guaranteed_peak_device_bytes=other.guaranteed_peak_device_bytes,
        )
        for words, plan in configured.other_plans
        for other in [_predicted(plan, workload, machine, asked, configured.runtime)]
    ]
    masters_bytes = configured.masters_bytes
    lacking = _lacking(record, settled.machine, asked, masters_bytes)
    found, why = None, None
    if asked.searches:
        found, why = _searched(settled, record, masters_bytes, asked, warn, on_progress)
    return Explanation(
        file=asked.file,
        reading=reading,
        settled=(*settled.notes, *configured.notes),
        differences=(
            _what_is_predicted(reading.tool, configured.runtime),
            *settled.differences,
            *configured.differences,
            *((left_out,) if (left_out := left_out_words(workload.kernels_left_out, workload.model_name)) else ()),
        ),
        configured=record,
        masters_bytes=masters_bytes,
        lacking=lacking,
        segments=None if lacking or _has_room(record, masters_bytes) else allocator_warning(record),
        other_readings=tuple(others),
        found=found,
        infeasible=why,
        command=command_line(settled, asked),
        num_ranks=settled.num_ranks,
    )


def _lowered(
    settled: Settled, plain: tuple[Workload, Settled], asked: Asked, warn: Callable[[str], None]
) -> tuple[Workload, Settled]:
    """The workload of the run as it is compiled, and multiplies; ``plain`` where that is not known, which it says."""
    products = settled.options.packed_products
    if not settled.options.is_lowered and products is None:
        return plain
    try:
        found, same = workload_of(settled, cache=asked.cache, warn=warn)
        check_lowering(found, same.machine)
    except WorkloadError as error:
        here, same = plain
        why = f"nothing is compiled or in float8 in the answer, which takes more time for it: {error}"
        if products is not None and not settled.options.is_lowered:
            why = f"{products.words} keep inputs of maps, which are not in the answer: {error}"
        return here, replace(same, differences=(*same.differences, why))
    return found, same


def _what_is_predicted(tool: Tool, runtime: RuntimeProfile) -> str:
    copies = "" if runtime.is_ours else f", with the copies that {runtime.runtime} makes around its collectives"
    if runtime.steps_alone:
        copies = f", with the copies, waits and steps of {runtime.runtime}"
    return (
        f"what is predicted is a plan here that does the same{copies}: {_RUNTIMES[tool]} is not simulated beyond that, "
        f"nor its costs of its own (allocations, synchronisation, Python), so that the run is hardly faster than the "
        f"prediction."
    )


def _of_run(settled: Settled) -> Hardware:
    """The machine, with the attention that the run asks for; plans here have PyTorch's."""
    machine, kernel = settled.machine, settled.run.attention_kernel
    if kernel is None:
        return machine
    device = machine.device.model_copy(update={"attention_kernel": kernel})
    return machine.model_copy(update={"device": device})


def _predicted(plan: Plan, workload: Workload, machine: Hardware, asked: Asked, runtime: RuntimeProfile) -> Record:
    record = simulate(plan, workload, machine, asked.calibration, runtime=runtime)
    return record.asking(device_budget_bytes=asked.device_budget_bytes)


def _has_room(record: Record, masters_bytes: int) -> bool:
    """Whether segments fit because of masters that the run has not."""
    reserved = record.device_reserved
    return (
        bool(masters_bytes) and reserved is not None and reserved.expected_bytes - masters_bytes < reserved.limit_bytes
    )


def _searched(
    settled: Settled,
    configured: Record,
    masters_bytes: int,
    asked: Asked,
    warn: Callable[[str], None],
    on_progress: OnProgress,
) -> tuple[SearchResult | None, str | None]:
    """The recommended plan within the same budgets, or why none fits: the answer to ``command_line``."""
    settled = as_here(settled)
    tiles = _tiles(settled)
    space = tiles.space
    if settled.run.checkpointing is Checkpointing.SELECTIVE:
        space = space.model_copy(update={"product_stride": None})
    request = SearchRequest(
        workload=workload_in_tiles(settled, tiles, cache=asked.cache, warn=warn),
        hardware=settled.machine,
        calibration=asked.calibration,
        device_budget_bytes=asked.device_budget_bytes,
        space=space,
        step=Step(
            micro_batches=settled.micro_batches,
            max_gradient_norm=settled.run.max_gradient_norm or None,
            optimizer=settled.optimizer,
            num_ranks=settled.num_ranks,
        ),
        baselines=((OWN_ROW, configured.plan),),
    )
    try:
        found = search_batches(request, on_progress=on_progress).result
    except InfeasibleError as error:

        def at_size(size: int) -> Workload:
            return workload_in_tiles(replace(settled, batch_size=size), tiles.needed, cache=asked.cache, warn=warn)

        tiled = tiles.search_in_tiles(request, at_size)
        if tiled is None:
            return None, str(error)
        try:
            found = search_batches(tiled, on_progress=on_progress).result
        except InfeasibleError as still:
            return None, str(still)
    return _with_own_row(found, configured, masters_bytes, _room(found, request)), None


def _room(found: SearchResult, request: SearchRequest) -> SegmentRoom | None:
    """What segments may take of the rows of ``found``: with the margin, unless no plan leaves it."""
    reserved, whole = found.prediction.device_reserved, SegmentRoom.of(replace(request, margin_frac=0.0))
    if found.survives is not False or reserved is None or whole is None or reserved.expected_bytes > whole.limit_bytes:
        return SegmentRoom.of(request)
    return whole


def _with_own_row(
    found: SearchResult, configured: Record, masters_bytes: int, room: SegmentRoom | None
) -> SearchResult:
    """The run's row as its own prediction has it: a search knows plans alone, and not who carries them out or how.

    It fits as other rows do: within the search's budgets, and with segments that leave its margin free.
    """
    host, reserved = configured.host_memory, configured.device_reserved
    peak_bytes = configured.guaranteed_peak_device_bytes - masters_bytes
    short = [("device memory", peak_bytes - found.device_budget_bytes)]
    if host is not None:
        short.append(("host memory", host.planned_bytes - found.host_budget_bytes))
    lacking = tuple(Lack(memory=memory, size_bytes=size) for memory, size in short if size > 0)
    segments_bytes = None if lacking or reserved is None else max(0, reserved.expected_bytes - masters_bytes)
    if segments_bytes is not None and room is not None and segments_bytes > room.limit_bytes:
        lacking = (Lack(memory=SEGMENTS, size_bytes=segments_bytes - room.limit_bytes),)
    own = {
        "iteration_s": configured.iteration_s,
        "guaranteed_peak_device_bytes": peak_bytes,
        "expected_segments_bytes": segments_bytes,
        "lacking": lacking,
    }
    if host is not None:
        pinned_bytes = host.pinned_requested_bytes
        own |= {"pinned_host_bytes": pinned_bytes, "host_bytes": host.planned_bytes - pinned_bytes}
    rows = tuple(one.model_copy(update=own) if one.name == OWN_ROW else one for one in found.baselines)
    return found.model_copy(update={"baselines": rows})


def _tiles(settled: Settled) -> AskedTiles:
    """Numbers of tiles that a plan may have: those of the file, where it has some, and whatever is sensible else."""
    loss = [settled.loss_tiles] if settled.loss_tiles > 1 or settled.options.loss_head is not None else None
    return AskedTiles.named([settled.mlp_tiles] if settled.mlp_tiles > 1 else None, loss)


def _lacking(record: Record, machine: Hardware, asked: Asked, masters_bytes: int) -> tuple[Lack, ...]:
    """By how much the run does not fit, which has no such masters."""
    plan = record.plan
    room_bytes = rank_device_bytes(machine, plan.num_ranks, plan.shard_ranks)
    budget_bytes = asked.device_budget_bytes or room_bytes
    own = machine if plan.num_ranks == 1 else machine_of_rank(machine, plan.num_ranks)
    short = [("device memory", record.guaranteed_peak_device_bytes - masters_bytes - budget_bytes)]
    host = record.host_memory
    if host is not None:
        short.append(("host memory", host.planned_bytes - default_host_budget_bytes(own, budget_bytes)))
    return tuple(Lack(memory=memory, size_bytes=size) for memory, size in short if size > 0)


def command_line(settled: Settled, asked: Asked) -> str:
    """The search that asks for a plan of the same training on the same machine."""
    run = settled.run
    words = ["protwin", "search", f"--model={settled.model}", f"--hardware={asked.hardware_name}"]
    words += [f"--set={change}" for change in asked.changes]
    network = settled.machine.network
    if asked.machine is not None and network is not None and network != asked.machine.network:
        words.append(f"--set=network.num_nodes={network.num_nodes}")
    words.append(f"--batch-size={settled.batch_size}")
    words += [f"--sequence-length={settled.sequence_length}"] if settled.sequence_length is not None else []
    words += [f"--packed-lengths={settled.packed_lengths}"] if settled.packed_lengths is not None else []
    words += [f"--dtype={settled.dtype}", f"--micro-batches={settled.micro_batches}"]
    if run.max_gradient_norm:
        words.append(f"--max-gradient-norm={run.max_gradient_norm:g}")
    words.append(f"--optimizer={settled.optimizer}")
    lora, quantized = settled.options.lora, settled.options.quantized
    if lora is not None:
        words.append(f"--lora-rank={lora.rank}")
        words += [f"--lora-targets={','.join(lora.targets)}"] if lora.targets else []
        words += [f"--lora-dropout={lora.dropout:g}"] if lora.dropout else []
        words += ["--use-dora"] if lora.use_dora else []
        words += [f"--lora-dtype={lora.dtype}"] if lora.dtype is not None else []
    if quantized is not None:
        words.append(f"--quantize={quantized.how.type}")
        words += ["--double-quantize"] if quantized.how.double else []
    words += [f"--kernels={package}" for package in settled.options.kernels]
    words += ["--product-stride=all"] if run.checkpointing is Checkpointing.SELECTIVE else []
    words += [f"--mlp-tiles={settled.mlp_tiles}"] if settled.mlp_tiles > 1 else []
    if settled.options.loss_head is not None:
        words.append(f"--loss={settled.options.loss_head}")
    words += [f"--loss-tiles={settled.loss_tiles}"] if settled.loss_tiles > 1 else []
    if settled.num_ranks > 1:
        words.append(f"--ranks={settled.num_ranks}")
    if asked.device_budget_bytes is not None:
        words.append(f"--device-budget={asked.device_budget_bytes}B")
    if asked.calibration_path is not None:
        words.append(f"--calibration={asked.calibration_path}")
    return shlex.join(words)
