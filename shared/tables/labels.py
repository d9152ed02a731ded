"""What tables and reports say alike: names of things in words, formatted figures, and facts read off a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ..answers.plan_kind import PlanKind
from ..basics.interval import Interval
from ..basics.units import format_bytes, format_seconds
from ..records.chrome_trace import subject_of
from ..schema.optimizer import HostGradients, Optimizer
from ..schema.plan import ParallelMode, Plan, ProjectionPlace, TrainingMethod
from ..schema.record import IterationPhase, MemoryCurve, Origin, PhaseWait, Record, Remedy, RemedyKind
from ..schema.schedule import Content, Lane, Memory, TaskKind

KIND_NAMES: Final[dict[TaskKind, str]] = {
    TaskKind.FORWARD: "forward",
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.BACKWARD: "backward",
    TaskKind.TEACHER_FORWARD: "teacher's forward",
    TaskKind.LOSS: "loss",
    TaskKind.GATHER: "gather",
    TaskKind.GRADIENT_OFFLOAD: "gradient offload",
    TaskKind.GRADIENT_ACCUMULATE: "adding gradients up",
    TaskKind.GRADIENT_NORM: "gradient norm",
    TaskKind.ACTIVATION_OFFLOAD: "activation offload",
    TaskKind.ACTIVATION_FETCH: "activation fetch",
    TaskKind.CPU_ADAM: "CPU Adam",
    TaskKind.DEVICE_ADAM: "device Adam",
    TaskKind.GRADIENT_PROJECTION: "gradient projection",
    TaskKind.PARAMETER_PROJECTION: "parameter projection",
    TaskKind.HOST_GRADIENT_PROJECTION: "gradient projection on the host",
    TaskKind.HOST_PARAMETER_PROJECTION: "parameter projection on the host",
    TaskKind.ALL_GATHER: "all-gather",
    TaskKind.REDUCE_SCATTER: "reduce-scatter",
    TaskKind.ALL_REDUCE: "all-reduce",
    TaskKind.GRADIENTS_TO_OWNERS: "gradients to owners",
    TaskKind.GRADIENTS_FROM_OWNERS: "gradients from owners",
    TaskKind.PARAMETERS_TO_OWNERS: "parameters to owners",
    TaskKind.PARAMETERS_FROM_OWNERS: "parameters from owners",
    TaskKind.SEQUENCE_EXCHANGE: "exchange of the sequence",
    TaskKind.RECEIVE: "receive",
    TaskKind.SEND: "send",
    TaskKind.DISK_READ: "disk read",
    TaskKind.DISK_WRITE: "disk write",
}
"""Of protwin's own kinds; ``kind_name`` names all."""
LANE_NAMES: Final[dict[Lane, str]] = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "host to device",
    Lane.D2H: "device to host",
    Lane.CPU_OPTIM: "CPU Adam",
    Lane.COLLECTIVE: "between ranks",
    Lane.DISK: "disk",
}
CONTENT_NAMES: Final[dict[Content | None, str]] = {
    Content.PARAMETERS: "parameters",
    Content.GRADIENTS: "gradients",
    Content.ARRIVING_GRADIENTS: "arriving gradients",
    Content.LOOKED_UP_ROWS: "rows of embeddings",
    Content.ROW_GRADIENTS: "gradients of rows",
    Content.OPTIMIZER_STATE: "optimizer state",
    Content.PAGED_STATE: "paged optimizer state",
    Content.ACTIVATIONS: "saved activations",
    Content.KEPT_RESULTS: "kept results",
    Content.SWAPPED: "swapped activations",
    Content.OUTPUT: "block outputs",
    Content.LOSS: "block losses",
    Content.INCOMING_GRADIENT: "incoming gradient",
    Content.RESIDENT: "module buffers, batch, what the loop holds",
    Content.FLAT_GRADIENTS: "gradients, laid flat",
    Content.REDUCED_GRADIENTS: "shards of gradients",
    Content.BUCKET: "bucket of gradients",
    Content.SECOND_BUCKET: "second bucket",
    Content.HELD_INPUT: "held inputs of blocks",
    Content.CACHED_KEYS: "cached keys and values",
    Content.OWNED_FROZEN: "frozen matrices of owners",
    Content.OWNED_TRAINED: "trained matrices of owners",
    Content.PASSING_PARTS: "parts of matrices on their way",
    None: "transient, running task",
}
MEMORY_NAMES: Final[dict[Memory, str]] = {
    Memory.DEVICE: "device memory",
    Memory.PINNED_HOST: "pinned host memory",
    Memory.HOST: "host memory",
    Memory.DISK: "disk",
}
ORIGIN_NAMES: Final[dict[Origin, str]] = {Origin.SIMULATED: "predicted", Origin.MEASURED: "measured"}

NO_VALUE: Final = "–"
_SMALLEST_SHOWN_FRAC: Final = 0.0005
"""Shares below this would be shown as nothing."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob of a plan, ready to be shown."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Alive:
    """One row of what was alive at a peak."""

    content: Content | None
    name: str
    size_bytes: int
    is_itemized: bool = True
    """False for the rest that the record does not break down."""


def format_error(error_frac: float | None) -> str:
    """``"+2.5 %"``, ``"−0.3 %"`` or, without a sign, ``"0.0 %"``; a dash where the error has no value."""
    if error_frac is None:
        return NO_VALUE
    shown = f"{error_frac * 100:+.1f} %".replace("-", "−")
    return shown[1:] if shown[1:] == "0.0 %" else shown


def format_share(share_frac: float) -> str:
    """``"45.2 %"``; what is more than nothing is never ``"0.0 %"``."""
    shown = f"{share_frac * 100:.1f} %"
    return "< 0.1 %" if shown == "0.0 %" and share_frac > 0 else shown


def format_interval_s(interval: Interval | None) -> str:
    """``"1.2 s to 1.5 s"``; empty where there is none."""
    return "" if interval is None else f"{format_seconds(interval.low)} to {format_seconds(interval.high)}"


def format_interval_bytes(interval: Interval | None) -> str:
    """``"3.1 GiB to 3.4 GiB"``, one size where it is a point; empty where there is none."""
    if interval is None:
        return ""
    low, high = format_bytes(interval.low), format_bytes(interval.high)
    return low if low == high else f"{low} to {high}"


def how_much_faster(gap_frac: float) -> str:
    """What is true of no other plan: ``"is faster"``, or ``"is more than 0.8 % faster"``."""
    if gap_frac == 0:
        return "is faster"
    if gap_frac < _SMALLEST_SHOWN_FRAC:
        return f"is faster by {format_share(2 * _SMALLEST_SHOWN_FRAC)}"
    return f"is more than {format_share(gap_frac)} faster"


def kind_name(kind: TaskKind) -> str:
    """``"CPU Adam"``; of a kind that a training method has added, its own name."""
    return KIND_NAMES.get(kind) or kind.replace("_", " ")


def task_name(name: str, kind: TaskKind) -> str:
    """``"CPU Adam chunk 7"`` for ``"cpu_adam chunk 7"``."""
    return name.replace(str(kind), kind_name(kind), 1) if name.startswith(str(kind)) else name


def peak_name(curve: MemoryCurve) -> str:
    """During which task its peak is: ``"device Adam"`` for ``"device_adam"``."""
    kind, space, rest = curve.peak_at.partition(" ")
    words = {str(known): name for known, name in KIND_NAMES.items()}
    return f"{words.get(kind) or kind.replace('_', ' ')}{space}{rest}"


_METHOD_WORDS: Final[dict[TrainingMethod, str]] = {
    TrainingMethod.FULL: "the whole model, by its own loss",
    TrainingMethod.BYPASS: "every block of a student by a loss of its own, beside its teacher",
    TrainingMethod.OSFT: "the low directions of factorised weights, orthogonal to the frozen ones",
}
_PARALLEL_WORDS: Final[dict[ParallelMode, str]] = {
    ParallelMode.SINGLE: "one rank alone",
    ParallelMode.DDP: "every rank has all chunks on its device",
    ParallelMode.REPLICATED: "every rank has all offloaded chunks on its host",
    ParallelMode.SHARDED: "every rank has an equal part of every chunk that is not persistent",
}


def _knobs_of_ranks(plan: Plan) -> list[Knob]:
    shown = []
    if plan.num_ranks > 1:
        shown.append(Knob("parallel", plan.parallel, _PARALLEL_WORDS[plan.parallel]))
        batches = "its own batches" if plan.sequence_ranks == 1 else "its part of batches"
        shown.append(Knob("num_ranks", f"{plan.num_ranks:,}", f"devices that train together, each on {batches}"))
    if plan.shard_ranks is not None:
        shown.append(
            Knob("shard_ranks", f"{plan.shard_ranks:,}", "neighbours that share chunks; such groups have replicas")
        )
    if plan.sequence_ranks > 1:
        shown.append(Knob("sequence_ranks", f"{plan.sequence_ranks:,}", "neighbours that share each sequence"))
    return shown


def knobs(plan: Plan, *, num_blocks: int | None = None) -> tuple[Knob, ...]:
    """The plan's knobs in the order of ``Plan``, each in words."""
    of_blocks = f" of {num_blocks}" if num_blocks else ""
    shown = [
        *([Knob("method", plan.method, _METHOD_WORDS[plan.method])] if plan.method is not TrainingMethod.FULL else []),
        Knob("chunk_bytes", format_bytes(plan.chunk_bytes), "parameters packed into one flat buffer, at most"),
        Knob("n_persist", str(plan.n_persist), "first chunks that stay on the device for good"),
        *(
            [Knob("n_host_stepped", str(plan.n_host_stepped), "next chunks, on the device too but stepped on the host")]
            if plan.n_host_stepped
            else []
        ),
        *(
            [Knob("n_shard", str(plan.n_shard), "next chunks, sharded over the devices; the rest lie on the hosts")]
            if plan.n_shard
            else []
        ),
        *(
            [
                Knob("n_disk_state", str(plan.n_disk_state), "last chunks, with optimizer state on the disk"),
                Knob("n_disk", str(plan.n_disk), "last of these, with parameters there too"),
                Knob("n_staging", str(plan.n_staging), "host places of each sort that they share"),
            ]
            if plan.n_disk_state
            else []
        ),
        *([Knob("looks_up_rows", "yes", "rows of embeddings come from the host")] if plan.looks_up_rows else []),
        Knob("n_buffer", str(plan.n_buffer), "device places for the other chunks"),
        Knob("prefetch_depth", str(plan.prefetch_depth), "sections ahead that chunks are gathered"),
    ]
    if plan.method is not TrainingMethod.BYPASS:
        shown.append(Knob("n_checkpoint", f"{plan.n_checkpoint}{of_blocks}", "blocks whose activations are recomputed"))
    if plan.n_offload_input:
        meaning = "of these, blocks whose input travels to the host and back"
        shown.append(Knob("n_offload_input", f"{plan.n_offload_input}{of_blocks}", meaning))
    if plan.n_swap:
        shown.append(
            Knob("n_swap", f"{plan.n_swap}{of_blocks}", "blocks whose activations travel to the host and back")
        )
    shown += _knobs_of_tiles(plan)
    if plan.micro_batches > 1:
        shown.append(Knob("micro_batches", str(plan.micro_batches), "forwards and backwards per step"))
    if plan.max_gradient_norm is not None:
        of_whom = "each student block's" if plan.method is TrainingMethod.BYPASS else "all"
        meaning = f"limit of the norm of {of_whom} gradients"
        shown.append(Knob("max_gradient_norm", f"{plan.max_gradient_norm:g}", meaning))
    if plan.optimizer is not Optimizer.ADAMW:
        shown.append(Knob("optimizer", plan.optimizer, "what steps the weights"))
    if plan.host_gradients is not HostGradients.PARAMETERS:
        shown.append(Knob("host_gradients", plan.host_gradients, "in which the host adds gradients up"))
    if plan.projects_gradients_on is not ProjectionPlace.HOST:
        place = plan.projects_gradients_on
        shown.append(Knob("projects_gradients_on", place, "where gradients that leave are projected"))
    shown += _knobs_of_ranks(plan)
    if plan.activation_modes is not None:
        runs = [(mode, len(list(group))) for mode, group in groupby(plan.activation_modes)]
        modes = ", ".join(f"{mode} × {count}" for mode, count in runs)
        shown.append(Knob("activation_modes", modes, "one mode per block, in order"))
    return tuple(shown)


TILED: Final = ", tiled"
TILED_MARK: Final = "†"
"""The same in a table without room for the word."""


def plan_words(plan: Plan, kind: PlanKind, tiled: str = TILED) -> str:
    """The kind of a plan, and what else it recomputes or keeps: a cell of a table."""
    return f"{kind}{', selective' if plan.n_selective else ''}{tiled if _is_tiled(plan) else ''}"


def _is_tiled(plan: Plan) -> bool:
    return plan.mlp_tiles > 1 or plan.loss_tiles > 1


def notes_of_plan_words(plans: Iterable[Plan], tiled: str = TILED) -> list[str]:
    """What ``selective`` and ``tiled`` mean, with how many products are kept; nothing where no plan is either."""
    shown = tuple(plans)
    notes, strides = [], sorted({plan.product_stride for plan in shown if plan.n_selective})
    if strides:
        which = " or ".join("every one" if stride == 1 else f"the first of every {stride}" for stride in strides)
        notes.append(
            f"selective: recomputed blocks keep results of attention, and of {which} of their matrix products."
        )
    if any(_is_tiled(plan) for plan in shown):
        notes.append(
            f"{tiled.strip(', ')}: MLPs, or head and loss, run in tiles of tokens and are recomputed in backward."
        )
    return notes


def _knobs_of_tiles(plan: Plan) -> list[Knob]:
    found = []
    if plan.n_selective:
        found.append(Knob("n_selective", f"{plan.n_selective:,}", "recomputed blocks that keep results"))
    if plan.product_stride > 1:
        meaning = "of their products, the first of every so many is kept"
        found.append(Knob("product_stride", f"{plan.product_stride:,}", meaning))
    if plan.mlp_tiles > 1:
        found.append(Knob("mlp_tiles", f"{plan.mlp_tiles:,}", "tiles of tokens that MLPs of blocks run in"))
    if plan.loss_tiles > 1:
        found.append(Knob("loss_tiles", f"{plan.loss_tiles:,}", "tiles of tokens that head and loss run in"))
    return found


def num_blocks(record: Record) -> int:
    """Blocks of the record's model: those that its forward tasks name, without prologue and epilogue."""
    subjects = {subject_of(timing) for timing in record.tasks if timing.kind is TaskKind.FORWARD}
    return sum(subject is not None and subject[1].isdecimal() for subject in subjects)


def busy_frac(record: Record, lane: Lane) -> float:
    """Share of the iteration during which ``lane`` runs tasks."""
    return record.lane(lane).busy_s / record.iteration_s


def bottleneck(record: Record) -> Lane | None:
    """The busiest lane, which bounds the iteration from below; None if no lane does anything."""
    busiest = max(Lane, key=lambda lane: record.lane(lane).busy_s)
    return busiest if record.lane(busiest).busy_s > 0 else None


def alive_at_peak(curve: MemoryCurve) -> tuple[Alive, ...]:
    """What the peak consists of, largest first, and last whatever the record does not break down."""
    rows = [
        Alive(holding.content, CONTENT_NAMES[holding.content], holding.size_bytes)
        for holding in curve.alive_at_peak
        if holding.size_bytes
    ]
    rows.sort(key=lambda row: (-row.size_bytes, row.name))
    rest_bytes = curve.peak_bytes - sum(row.size_bytes for row in rows)
    if rest_bytes > 0:
        rows.append(Alive(None, "not itemized", rest_bytes, is_itemized=False))
    return tuple(rows)


def title_of(record: Record) -> str:
    """``"predicted: llama-3-8b on rtx-3090"``."""
    return f"{ORIGIN_NAMES[record.origin]}: {record.model_name} on {record.hardware_name}"


# -- where the time goes, and what would shorten it -------------------------------------------------------------

_SMALLEST_FRAC: Final = 0.01
"""Of the iteration: shorter waits are not told one by one."""
_REMEDY_NAMES: Final[dict[RemedyKind, str]] = {
    RemedyKind.HOST: "twice the cores and host memory bandwidth",
    RemedyKind.LINKS: "links to the host twice as fast",
    RemedyKind.DEVICE: "a device twice as fast",
    RemedyKind.DEVICE_LINKS: "links between devices twice as fast",
    RemedyKind.NETWORK: "a network twice as fast",
    RemedyKind.DISK: "a disk twice as fast",
}


@dataclass(frozen=True, slots=True)
class PhasePart:
    """Part of a phase: compute at work, or waiting for one cause."""

    name: str
    seconds: float
    is_waiting: bool
    cause: TaskKind | None = None
    for_ranks: bool = False


def phase_parts(record: Record, phase: IterationPhase, *, smallest_frac: float = _SMALLEST_FRAC) -> list[PhasePart]:
    """Compute's own time and its waits; together they are the phase.

    ``smallest_frac``: waits below this share of the iteration are added up, as waits for other tasks.  Nothing where
    they come to no more than that together: the phase is then compute's own time.
    """
    waits = record.waits_in(phase)
    least_s = smallest_frac * record.iteration_s
    told = [wait for wait in waits if wait.seconds > least_s]
    waiting_s = sum(wait.seconds for wait in waits)
    if waiting_s <= least_s:
        return []
    parts = [PhasePart("computing", max(0.0, record.phase_s(phase) - waiting_s), is_waiting=False)]
    parts += [
        PhasePart(f"waiting for {cause_name(wait, record.origin)}", wait.seconds, True, wait.cause, wait.for_ranks)
        for wait in told
    ]
    rest_s = sum(wait.seconds for wait in waits if wait.seconds <= least_s)
    if rest_s > 0:
        parts.append(PhasePart("waiting for other tasks" if told else "waiting", rest_s, is_waiting=True))
    return parts


def cause_name(wait: PhaseWait, origin: Origin) -> str:
    """``"CPU Adam"``; where no task is the cause, what is then to blame."""
    if wait.cause is not None:
        return kind_name(wait.cause)
    # A prediction starts tasks at once; one of an older release does not say that ranks were waited for.
    return "slower ranks" if wait.for_ranks or origin is Origin.SIMULATED else "tasks to be started"


def remedy_sentence(record: Record) -> str:
    """``"Twice the cores and host memory bandwidth: 1.9 times the tokens; batch 4: 3.6 times."``; empty without any."""
    told: list[str] = []
    for remedy in record.remedies:
        tokens = " the tokens per second" if not told else ""
        told.append(f"{_remedy_name(remedy, record.plan)}: {remedy.speedup:.2f} times{tokens}")
    sentence = "; ".join(told)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _remedy_name(remedy: Remedy, plan: Plan) -> str:
    if remedy.kind is not RemedyKind.BATCH:
        return _REMEDY_NAMES[remedy.kind]
    now = {knob.name: knob.value for knob in knobs(plan)}
    changed = [f"{knob.name} {knob.value}" for knob in knobs(remedy.plan) if knob.value != now.get(knob.name)]
    return f"batch {remedy.num_samples}" + (f" with {', '.join(changed)}" if changed else "")
