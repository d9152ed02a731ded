"""The schedule: the static program of one training iteration in steady state, which simulator and runtime interpret.

An iteration is an ordered list of tasks.  Each lane runs its tasks in the order of the list; lanes run side by side.
A task starts when the previous task of its lane has ended and so has every task that it waits for, in this iteration
(``after``) or in the previous one (``after_previous``).  It allocates its buffers when it starts and frees buffers
when it ends.  Iterations follow each other without a barrier: the same program again, with only these rules between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Final, NewType

from ..basics.shown import Shown
from .optimizer import Optimizer
from .plan import ParallelMode, ProjectionPlace, num_shards
from .workload import OuterSection as OuterSection
from .workload import Phase
from .workload import Section as Section

ChunkId = NewType("ChunkId", int)
TaskId = NewType("TaskId", int)
AllocationId = NewType("AllocationId", int)


NORM_BYTES: Final = 8
"""Bytes that ranks add up of the norm of the gradients: the sum of squares as a float64."""


class Lane(StrEnum):
    """What runs tasks one after another, beside the other lanes."""

    COMPUTE = "compute"
    """The device's kernels: forward, recomputation, backward, device Adam."""
    H2D = "h2d"
    """Copies from host to device."""
    D2H = "d2h"
    """Copies from device to host."""
    CPU_OPTIM = "cpu_optim"
    """CPU Adam."""
    COLLECTIVE = "collective"
    """What devices of several ranks do together.  All ranks of a stage run the same schedule, so they meet in one
    order."""
    DISK = "disk"
    """Reads and writes of the host's disk, one after another."""


LANES_ALONE: Final = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM)
"""The lanes of one rank alone."""


def lanes_of(num_ranks: int, *, has_disk: bool = False) -> tuple[Lane, ...]:
    """The lanes of each of so many ranks, of all stages; ``has_disk``: with that of a disk that chunks lie on."""
    beside = ((Lane.COLLECTIVE,) if num_ranks > 1 else ()) + ((Lane.DISK,) if has_disk else ())
    return LANES_ALONE + beside


class RankAxis(StrEnum):
    """Which ranks meet in a collective; see [Note: Shard groups] in ``shared/compile/compile.py``."""

    WORLD = "world"
    """All of them."""
    SHARD = "shard"
    """Those of one shard group, which have a chunk in parts between them: neighbours."""
    REPLICA = "replica"
    """Those that have the same part, one of every shard group."""
    SEQUENCE = "sequence"
    """Those of one sequence group, which share sequences: neighbours ([Note: Sequence groups] in
    ``shared/phases/sequence_sharing.py``)."""


class TaskKind(StrEnum):
    """What a task does.

    The members are protwin's own kinds, and iterating gives these.  A training method may add others
    (``add_task_kind``): ``TaskKind(name)`` finds them, and so do files.
    """

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    TEACHER_FORWARD = "teacher_forward"
    """Forward of a teacher's section in bypass distillation: nothing but its output outlives it."""
    LOSS = "loss"
    """The loss of a student's block in bypass distillation: its output against the teacher's."""
    GATHER = "gather"
    """Copy a chunk's parameters to the device."""
    GRADIENT_OFFLOAD = "gradient_offload"
    """Copy a chunk's gradients to the host; with a section, gradients of the rows that it looked up there."""
    GRADIENT_ACCUMULATE = "gradient_accumulate"
    """Add a micro-batch's gradients of a chunk to those of earlier ones, on the host; with a section, gradients of the
    rows that it looked up first."""
    ACTIVATION_OFFLOAD = "activation_offload"
    """Copy what a block saved to the host."""
    ACTIVATION_FETCH = "activation_fetch"
    """Copy it back."""
    GRADIENT_NORM = "gradient_norm"
    """The norm of all gradients together, wherever they are; with a section, of that student block's."""
    CPU_ADAM = "cpu_adam"
    DEVICE_ADAM = "device_adam"
    """Step every persistent chunk, and the rank's part of every one that is sharded over the devices; ends the
    iteration even where there is nothing to step."""
    GRADIENT_PROJECTION = "gradient_projection"
    """Make gradients orthogonal to frozen subspaces, on the device: of all persistent chunks, or of one chunk before
    they leave."""
    PARAMETER_PROJECTION = "parameter_projection"
    """Make the parameters that device Adam has stepped orthogonal to frozen subspaces."""
    HOST_GRADIENT_PROJECTION = "host_gradient_projection"
    """Make a chunk's complete gradients orthogonal to frozen subspaces, on the host."""
    HOST_PARAMETER_PROJECTION = "host_parameter_projection"
    """Make the parameters that CPU Adam has stepped orthogonal to frozen subspaces."""
    ALL_GATHER = "all_gather"
    """Every rank sends its shard of a chunk to all others, in their buffers; from the buffer, where a gather has copied
    it, or from where it lies on the device."""
    REDUCE_SCATTER = "reduce_scatter"
    """Add up a chunk's gradients over all ranks; each keeps its shard."""
    ALL_REDUCE = "all_reduce"
    """Add up gradients, or the norm's parts, over all ranks; each keeps all."""
    GRADIENTS_TO_OWNERS = "gradients_to_owners"
    """Send every owner of subspaces the gradients, and the frozen matrices, that ranks have in parts ([Note: Owners] in
    ``shared/layout/owners.py``)."""
    GRADIENTS_FROM_OWNERS = "gradients_from_owners"
    """Send every rank its parts of the gradients that owners have projected."""
    PARAMETERS_TO_OWNERS = "parameters_to_owners"
    """Send every owner of subspaces the parameters that device Adam has stepped in parts, or their masters."""
    PARAMETERS_FROM_OWNERS = "parameters_from_owners"
    """Send every rank its parts of those that owners have projected."""
    SEQUENCE_EXCHANGE = "sequence_exchange"
    """All-to-alls of a compute task among the ranks that share a sequence: from parts of it to heads, and back
    ([Note: Exchanges] in ``shared/compile/sections.py``)."""
    RECEIVE = "receive"
    """The teacher's activation before a stage's first pair comes from the stage before, into the prologue's output."""
    SEND = "send"
    """The teacher's activation behind a stage's last pair goes to the stage behind."""
    DISK_READ = "disk_read"
    """Read a chunk's parameters on their way to the device, or all that CPU Adam steps of it."""
    DISK_WRITE = "disk_write"
    """Write what CPU Adam has stepped of a chunk."""

    @classmethod
    def _missing_(cls, value: object) -> TaskKind | None:
        """The added kind of this name."""
        return _ADDED.get(value) if isinstance(value, str) else None

    def __reduce_ex__(self, protocol: object) -> tuple[type[TaskKind], tuple[str]]:
        """By its value, as newer Pythons do; 3.11.2 would look for an attribute, which an added kind is not."""
        return type(self), (self.value,)

    def __deepcopy__(self, memo: object) -> TaskKind:
        """Itself."""
        return self

    @property
    def lane(self) -> Lane:
        """The lane that runs it."""
        return LANE_OF[self]

    @property
    def is_added(self) -> bool:
        """Whether a training method has added it."""
        return self.value in _ADDED


_ADDED: Final[dict[str, TaskKind]] = {}
"""Kinds beside protwin's own, by name; filled by ``add_task_kind``."""

LANE_OF: dict[TaskKind, Lane] = {
    TaskKind.FORWARD: Lane.COMPUTE,
    TaskKind.RECOMPUTE: Lane.COMPUTE,
    TaskKind.BACKWARD: Lane.COMPUTE,
    TaskKind.TEACHER_FORWARD: Lane.COMPUTE,
    TaskKind.LOSS: Lane.COMPUTE,
    TaskKind.DEVICE_ADAM: Lane.COMPUTE,
    TaskKind.GRADIENT_PROJECTION: Lane.COMPUTE,
    TaskKind.PARAMETER_PROJECTION: Lane.COMPUTE,
    TaskKind.HOST_GRADIENT_PROJECTION: Lane.CPU_OPTIM,
    TaskKind.HOST_PARAMETER_PROJECTION: Lane.CPU_OPTIM,
    TaskKind.GATHER: Lane.H2D,
    TaskKind.GRADIENT_OFFLOAD: Lane.D2H,
    TaskKind.GRADIENT_ACCUMULATE: Lane.CPU_OPTIM,
    TaskKind.ACTIVATION_OFFLOAD: Lane.D2H,
    TaskKind.ACTIVATION_FETCH: Lane.H2D,
    TaskKind.GRADIENT_NORM: Lane.CPU_OPTIM,
    TaskKind.CPU_ADAM: Lane.CPU_OPTIM,
    TaskKind.ALL_GATHER: Lane.COLLECTIVE,
    TaskKind.REDUCE_SCATTER: Lane.COLLECTIVE,
    TaskKind.ALL_REDUCE: Lane.COLLECTIVE,
    TaskKind.GRADIENTS_TO_OWNERS: Lane.COLLECTIVE,
    TaskKind.GRADIENTS_FROM_OWNERS: Lane.COLLECTIVE,
    TaskKind.PARAMETERS_TO_OWNERS: Lane.COLLECTIVE,
    TaskKind.PARAMETERS_FROM_OWNERS: Lane.COLLECTIVE,
    TaskKind.SEQUENCE_EXCHANGE: Lane.COLLECTIVE,
    TaskKind.RECEIVE: Lane.COLLECTIVE,
    TaskKind.SEND: Lane.COLLECTIVE,
    TaskKind.DISK_READ: Lane.DISK,
    TaskKind.DISK_WRITE: Lane.DISK,
}
"""The lane of every kind, of added ones too."""


OF_OWNERS: Final = (
    TaskKind.GRADIENTS_TO_OWNERS,
    TaskKind.GRADIENTS_FROM_OWNERS,
    TaskKind.PARAMETERS_TO_OWNERS,
    TaskKind.PARAMETERS_FROM_OWNERS,
)
"""What ranks exchange of subspaces, in order."""
ALL_TO_ALLS: Final = (*OF_OWNERS, TaskKind.SEQUENCE_EXCHANGE)
"""Tasks in which every rank sends something of its own to every other one."""


def add_task_kind(name: str, lane: Lane) -> TaskKind:
    """A kind of task beside protwin's own: that of a training method, which ``lane`` runs.

    Records that name it can be read once it is added.  Adding it again gives the same kind.  Until a price of the kind
    stands in ``sim/costs``, its tasks state their seconds (``Task.stated_s``); tables call it by its name, reports draw
    it in its lane's colour, a calibration without a factor of it leaves it as it is.  The verifier refuses it unless a
    rule answers for it.

    Raises ValueError if the name is no lower-case identifier, or that of another kind.
    """
    if not (name.isidentifier() and name.isascii() and name.islower()):
        raise ValueError(f"a task kind has a name such as 'gather', in lower case, not {name!r}")
    known = _ADDED.get(name)
    if name in (own.value for own in TaskKind) or (known is not None and known.lane is not lane):
        raise ValueError(f"task kind {name!r} exists already, on lane {TaskKind(name).lane}. Choose another name.")
    if known is None:
        # Made as an enumeration makes its members, but for the list of them, which stays as it is.
        known = str.__new__(TaskKind, name)
        known._name_, known._value_ = name.upper(), name
        _ADDED[name], LANE_OF[known] = known, lane
    return known


def in_kind_order(kinds: Iterable[TaskKind]) -> list[TaskKind]:
    """Each of ``kinds`` once: protwin's own in the order of ``TaskKind``, then added ones by name."""
    own = {kind: place for place, kind in enumerate(TaskKind)}
    return sorted(set(kinds), key=lambda kind: (own.get(kind, len(own)), kind))


class Memory(StrEnum):
    """Where a buffer lies."""

    DEVICE = "device"
    PINNED_HOST = "pinned_host"
    """Host memory that copies read and write: page-locked on CUDA."""
    HOST = "host"
    DISK = "disk"
    """The host's disk, beyond its memory."""


class Content(StrEnum):
    """What a buffer holds."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    ARRIVING_GRADIENTS = "arriving_gradients"
    """A chunk's gradients of a later micro-batch, on the host, to be added to those of earlier ones."""
    FLAT_GRADIENTS = "flat_gradients"
    """A chunk's gradients in the order of the ranks' shards, while they are added up."""
    REDUCED_GRADIENTS = "reduced_gradients"
    """One rank's shard of a chunk's gradients, added up over all ranks: on its way to the host, or, of a chunk that is
    sharded over the devices, where it stays."""
    BUCKET = "bucket"
    """What another system copies gradients into, to reduce them together."""
    SECOND_BUCKET = "second_bucket"
    """Another one, which is filled while the first is reduced."""
    HELD_INPUT = "held_input"
    """The input of a recomputed block, and the gradient of the next one's, which another system's hooks hold."""
    CACHED_KEYS = "cached_keys"
    """Keys and values of a block's attention that another system's loop caches."""
    OWNED_FROZEN = "owned_frozen"
    """Whole frozen matrices of the subspaces that this rank projects for all that have them in parts."""
    OWNED_TRAINED = "owned_trained"
    """Whole gradients of these, or the stepped matrices themselves, while they are projected."""
    PASSING_PARTS = "passing_parts"
    """Parts of such matrices on their way between ranks, as they are sent and as they arrive."""
    LOOKED_UP_ROWS = "looked_up_rows"
    """Rows of a chunk's embeddings that were looked up on the host, on their way to the device."""
    ROW_GRADIENTS = "row_gradients"
    """Their gradients, where these arrive on the host."""
    OPTIMIZER_STATE = "optimizer_state"
    PAGED_STATE = "paged_state"
    """Moments of a chunk that is stepped on the device, in unified memory: counted on the host, as none of it has to
    stay on the device."""
    ACTIVATIONS = "activations"
    """Tensors saved for a section's backward."""
    KEPT_RESULTS = "kept_results"
    """What a block in mode SELECTIVE keeps from its forward, for its recomputation and its backward."""
    SWAPPED = "swapped"
    """Those of them that travel to the host and back, and inputs of recomputed blocks that do."""
    OUTPUT = "output"
    """A section's output, which the next section reads in forward and, saved, in backward."""
    LOSS = "loss"
    """The loss of a student's block, and what it saves for the block's backward."""
    INCOMING_GRADIENT = "incoming_gradient"
    """What one section's backward hands to the next, with the parts of gradients that others complete."""
    RESIDENT = "resident"
    """Module buffers and the batch."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A stretch of memory with a lifetime: allocated by one task and freed by a later one, or there for good."""

    id: AllocationId
    content: Content
    memory: Memory
    size_bytes: int
    chunk: ChunkId | None = None
    section: Section | None = None
    micro_batch: int = 0
    slot: int | None = None
    """The device place that a gathered chunk occupies; in host memory, the place that something between the disk and
    the rest passes through, or such a place itself, which is static.  Buffers of one content, memory and slot never
    live at the same time."""
    is_static: bool = False
    """There for good: no task allocates or frees it."""


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of the program."""

    id: TaskId
    kind: TaskKind
    section: Section | None = None
    chunk: ChunkId | None = None
    micro_batch: int = 0
    after: tuple[TaskId, ...] = ()
    """Tasks of this iteration that must have ended before it starts."""
    after_previous: tuple[TaskId, ...] = ()
    """Tasks of the previous iteration that must have ended before it starts."""
    allocates: tuple[AllocationId, ...] = ()
    frees: tuple[AllocationId, ...] = ()
    reads: tuple[AllocationId, ...] = ()
    writes: tuple[AllocationId, ...] = ()
    phase: Phase | None = None
    """What a forward, recomputation or backward does."""
    moved_bytes: int = 0
    """Bytes that a copy moves; of a collective, the whole buffer that every rank begins or ends with, or, of exchanges
    with owners of subspaces, that of the rank with the most; of all exchanges of a sequence that the task stands for,
    together; what is sent; of a norm, the gradients that it reads on the device."""
    num_stepped: int = 0
    """Scalars that an Adam task steps, or that a projection changes."""
    stepped_bytes: int = 0
    """Bytes of memory that a task of Adam, of adding gradients up, of their norm, or a projection reads and writes."""
    num_tensors: int = 0
    """Tensors that an Adam task steps, each by itself unless the optimizer has one kernel for all; matrices that a
    projection changes; all-to-alls that an exchange of a sequence stands for."""
    flops: int = 0
    """Operations of a projection's matrix products."""
    num_ranks: int = 1
    """Ranks that do it together."""
    axis: RankAxis = RankAxis.WORLD
    """Which ranks these are."""
    stated_s: float | None = None
    """Seconds that the schedule itself states: of an added kind, which has no price in ``sim/costs``; else None."""
    arrived_bytes: int = 0
    """Bytes that a compute task is the first to read since a copy, a collective or another stage brought them to the
    device: whole chunks, swapped activations, what a stage receives."""

    @property
    def lane(self) -> Lane:
        """The lane that runs it."""
        return LANE_OF[self.kind]

    @property
    def name(self) -> str:
        """``forward 3``, ``gather chunk 7``, ``backward 3 of micro-batch 1``; unique together with the id."""
        of = f" of micro-batch {self.micro_batch}" if self.micro_batch else ""
        if self.chunk is not None:
            return f"{self.kind} chunk {self.chunk}{of}"
        return f"{self.kind} {self.section}{of}" if self.section is not None else f"{self.kind}{of}"


@dataclass(frozen=True, repr=False)
class Schedule(Shown):
    """The program of one iteration.  ``compile_schedule`` makes it, ``verify_schedule`` proves it."""

    TABLES: ClassVar[str] = "tables.explain:schedule_tables"

    plan_id: str
    """Hash of plan and workload: ranks and interpreters agree on it."""
    tasks: tuple[Task, ...]
    """In an order that respects every ``after``; each lane keeps it."""
    buffers: tuple[Allocation, ...]
    num_slots: int
    num_blocks: int
    prefetch_depth: int
    micro_batches: int = 1
    num_ranks: int = 1
    parallel: ParallelMode = ParallelMode.SINGLE
    shard_ranks: int | None = None
    """Ranks of one shard group; None where all are one, or none shards anything."""
    sequence_ranks: int = 1
    """Ranks that share each sequence."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What tasks of the kinds CPU_ADAM and DEVICE_ADAM step with."""
    projects_gradients_on: ProjectionPlace = ProjectionPlace.HOST
    """Where gradients that leave are projected, if any are."""

    @cached_property
    def lanes(self) -> dict[Lane, tuple[TaskId, ...]]:
        """The program of every lane."""
        programs: dict[Lane, list[TaskId]] = {lane: [] for lane in Lane}
        for task in self.tasks:
            programs[task.lane].append(task.id)
        return {lane: tuple(program) for lane, program in programs.items()}

    @property
    def num_shards(self) -> int:
        """Equal parts that gathered chunks are cut into (``Plan.num_shards``)."""
        return num_shards(self.parallel, self.num_ranks, self.shard_ranks)

    def static_bytes(self, memory: Memory) -> int:
        """Bytes that are there for good."""
        return sum(b.size_bytes for b in self.buffers if b.is_static and b.memory is memory)
