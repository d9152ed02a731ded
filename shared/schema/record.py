"""The record: what happened in one iteration, in one form for prediction and measurement."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, Final, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel, Name
from ..basics.errors import PlanError
from ..basics.interval import Interval
from .memory_accounts import DeviceReserved, HostMemory
from .plan import Plan
from .question import Question
from .schedule import LANES_ALONE, Content, Lane, Memory, TaskKind

_SECONDS_PER_HOUR: Final = 3600


class Origin(StrEnum):
    """Where a record comes from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


class TaskTiming(FrozenModel):
    """One task of the iteration.

    Seconds since the iteration's first compute task started; gathers that were issued ahead start below zero.
    """

    task: NonNegativeInt
    """The task's id in the schedule."""
    name: str
    kind: TaskKind
    lane: Lane
    start_s: float
    end_s: float
    duration_s: NonNegativeFloat
    """Seconds it took."""


class Holding(FrozenModel):
    """Bytes of one kind that were alive at a peak."""

    content: Content | None
    """None: what the running task itself held beyond buffers (its transient tensors)."""
    size_bytes: NonNegativeInt


class MemoryCurve(FrozenModel):
    """One memory over the iteration."""

    memory: Memory
    times_s: tuple[float, ...]
    """Ascending; the level holds from each time to the next.

    Of several levels at one time, all but the last held too briefly to be timed.
    """
    levels_bytes: tuple[NonNegativeInt, ...]
    peak_bytes: NonNegativeInt
    peak_at: str
    """Name of the compute task during which the peak occurs."""
    alive_at_peak: tuple[Holding, ...] = ()

    @model_validator(mode="after")
    def _matches(self) -> Self:
        if len(self.times_s) != len(self.levels_bytes):
            raise ValueError("times_s and levels_bytes must have the same length")
        return self


class LaneUse(FrozenModel):
    """What one lane did."""

    lane: Lane
    num_tasks: NonNegativeInt
    busy_s: NonNegativeFloat
    """Seconds of its tasks together, slowdown by other lanes included."""
    moved_bytes: NonNegativeInt = 0


class IterationPhase(StrEnum):
    """The parts of an iteration that people speak of."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Recomputation included."""
    OPTIMIZER = "optimizer"
    """From the end of backward to the start of the next iteration."""


class PhaseWait(FrozenModel):
    """Time in which compute waits, of one phase and for one cause."""

    phase: IterationPhase
    cause: TaskKind | None
    """What ran at that time and held the next compute task up, directly or through other tasks that wait for it.  None
    where all of that had ended: time to start a task."""
    seconds: NonNegativeFloat
    for_ranks: bool = False
    """Whether it waited for other ranks, which had not come to a collective yet; without a cause then."""


class RankWait(FrozenModel):
    """What one rank waited for the others before one collective."""

    task: NonNegativeInt
    """The task's id in the schedule."""
    seconds: NonNegativeFloat
    """From when this rank came to it until the last one did."""


class RankRecord(FrozenModel):
    """One rank in the iteration of a record of several, or in a prediction ranks that are alike."""

    rank: NonNegativeInt
    """Its number; of ranks that are alike, the first."""
    num_alike: PositiveInt = 1
    """Ranks that it stands for."""
    name: Name = ""
    """What tells it from the others in words: its host, or the name of its group in a prediction."""
    machine: str = ""
    """The machine that measured it; empty for a prediction."""
    begins_s: float
    """When its first compute task started, in seconds after the one of the record's own rank.

    Ranks of one machine share a clock.  Clocks of several machines are laid over each other where their ranks met: a
    collective ends on all ranks at about one time, so that differences below its seconds tell nothing.
    """
    iteration_s: PositiveFloat
    """Mean seconds from one start of its first compute task to the next."""
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    optimizer_s: NonNegativeFloat
    """From the end of backward to the start of the next iteration."""
    waits: tuple[PhaseWait, ...] | None = None
    """Of these three, the time in which compute waits, by cause; None in records that do not say."""
    rank_waits: tuple[RankWait, ...] = ()
    """What it waited for other ranks on the collective lane, beside compute or not; the others of its collectives began
    as soon as it came to them."""
    tasks: tuple[TaskTiming, ...]
    """Since its own first compute task started."""
    lanes: tuple[LaneUse, ...]
    memory: tuple[MemoryCurve, ...]

    @property
    def waited_s(self) -> float:
        """Seconds per iteration in which its collective lane waits for other ranks."""
        return sum(wait.seconds for wait in self.rank_waits)


OF_RANKS: Final = ("iteration_s", "forward_s", "backward_s", "optimizer_s", "waits", "tasks", "lanes", "memory")
"""Fields of a record that every rank has of its own."""


class RemedyKind(StrEnum):
    """What a remedy changes."""

    HOST = "host"
    """Twice the cores and host memory bandwidth."""
    LINKS = "links"
    """Links between host and device twice as fast."""
    DEVICE = "device"
    """A device twice as fast."""
    DEVICE_LINKS = "device_links"
    """Links between the devices of a node twice as fast."""
    NETWORK = "network"
    """A network between nodes that is twice as fast."""
    DISK = "disk"
    """A disk that reads and writes twice as fast."""
    BATCH = "batch"
    """A larger batch."""


class Remedy(FrozenModel):
    """What one change of machine or batch does to a plan, simulated with nothing else changed."""

    kind: RemedyKind
    num_samples: PositiveInt
    """Samples of one rank's micro-batch then."""
    plan: Plan
    """The plan that was simulated: the record's own, or if a larger batch needs the memory, one that keeps less."""
    iteration_s: PositiveFloat
    speedup: PositiveFloat
    """How many times as many tokens per second."""


class ChunkCounts(FrozenModel):
    """How many chunks have each residency: the first so many in execution order, then the next, and so on.

    A frozen chunk among those that are host-stepped is as a persistent one, for nobody steps it.
    """

    persistent: NonNegativeInt
    """Chunks whole on the device, with their optimizer state."""
    host_stepped: NonNegativeInt
    """Chunks whole on the device, with their optimizer state on the host, which steps them."""
    sharded: NonNegativeInt
    """Chunks in parts on the devices of all ranks."""
    offloaded: NonNegativeInt
    """Chunks on the hosts."""


class Factorisation(FrozenModel):
    """What it takes to factorise weights, once, before the first step; no part of an iteration."""

    num_weights: PositiveInt
    flops: PositiveInt
    """Of all singular value decompositions."""
    host_s: NonNegativeFloat
    """On the hosts of all ranks together, each with its share of the weights."""
    working_bytes: PositiveInt
    """Memory that the largest one takes on the way."""


class TrainingRun(FrozenModel):
    """Time, energy and cost of training on so many tokens, at the pace of one steady iteration."""

    num_tokens: PositiveInt
    """As asked for."""
    num_steps: PositiveInt
    """Optimizer steps that go through them, the last one whole."""
    time_s: PositiveFloat
    """Of all steps, without starting up, evaluating and saving."""
    energy_kwh: NonNegativeFloat | None = None
    """Kilowatt-hours of all devices at their limit of power, hosts and cooling not among them: an upper estimate.  None
    where no power is known."""
    cost_usd: NonNegativeFloat | None = None
    """Rent of the machines for this time, in US dollars; None where no price is known."""


class Record(Document):
    """One iteration in steady state, predicted or measured."""

    KIND: ClassVar[str] = "record"
    TABLES: ClassVar[str] = "tables.record:record_tables"

    origin: Origin
    plan: Plan
    plan_id: str
    """``Schedule.plan_id``."""
    model_name: str
    hardware_name: str
    machine: str = ""
    """The machine that measured it; empty for a prediction."""
    software: dict[str, str] = {}
    emulated: tuple[str, ...] = ()
    """What was emulated, in words: a budget on host memory, throttled links; of a prediction, another runtime."""
    num_samples: PositiveInt
    """Samples of one iteration, of all ranks together."""
    num_tokens: PositiveInt
    """Tokens of one iteration, of all ranks together."""
    iteration_s: PositiveFloat
    """Period of the steady state."""
    iteration_noise_frac: NonNegativeFloat = 0.0
    """Median absolute deviation of iterations from ``iteration_s``, over it, or how far runs of one plan lie apart, if
    that was measured and is more; 0 in an uncalibrated prediction."""
    iteration_interval_s: Interval | None = None
    """Of a prediction, where the ``iteration_s`` that a run of this plan measures is expected; None if unknown."""
    num_iterations: PositiveInt = 1
    """Timed iterations; times are means over the typical half of them."""
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    optimizer_s: NonNegativeFloat
    """From the end of backward to the start of the next iteration."""
    waits: tuple[PhaseWait, ...] | None = None
    """Of these three, the time in which compute waits, by cause; None in records that do not say."""
    remedies: tuple[Remedy, ...] = ()
    """What would help most, if that was asked: the most helpful first."""
    tasks: tuple[TaskTiming, ...]
    lanes: tuple[LaneUse, ...]
    memory: tuple[MemoryCurve, ...]
    peak_interval_bytes: Interval | None = None
    """Of a prediction, where the measured peak of device memory is expected; None if unknown."""
    chance_oom: NonNegativeFloat | None = Field(default=None, le=1)
    """Of a prediction, the chance that the peak of device memory is above the budget that was asked for, or above what
    the device has for training where none was; None if unknown."""
    guaranteed_peak_device_bytes: NonNegativeInt
    """What no timing of this schedule can exceed."""
    price_usd_per_hour: PositiveFloat | None = None
    """Rent of the machines that the devices of all ranks are in; None where no price is known."""
    model_flops: PositiveInt | None = None
    """FLOPs that one iteration of all ranks needs in matrix products and attention, nothing twice; None where they are
    not known (``shared/records/flops.py``)."""
    hardware_flops: PositiveInt | None = None
    """FLOPs that all ranks carry out for it, recomputation among them; None where they are not known."""
    peak_flop_per_s: PositiveFloat | None = None
    """Peak of the devices of all ranks in the element type of the products; None where it is not known."""
    power_w: PositiveFloat | None = None
    """What the devices of all ranks draw at most, in watts; None where it is not known."""
    run: TrainingRun | None = None
    """What training on the tokens that were asked about takes; None where nobody asked."""
    chunks: ChunkCounts | None = None
    """Where the chunks of the plan lie; None in records that do not say."""
    num_gathers: NonNegativeInt
    num_cpu_adam_steps: NonNegativeInt
    device_reserved: DeviceReserved | None = None
    """What the device's allocator holds beyond what is allocated; None where it is not predicted."""
    host_memory: HostMemory | None = None
    """What the process holds of the host's memory; None where it is not predicted."""
    factorisation: Factorisation | None = None
    """What comes before the first step, if the plan trains weights in factors."""
    question: Question | None = None
    """What was asked; None in records that do not say."""
    rank: NonNegativeInt = 0
    """The rank that times and memory are of, if the record has several: the one that waits least for the others."""
    ranks: tuple[RankRecord, ...] = ()
    """What each of several ranks did, by rank; empty where one stands for all that there are.

    A collective starts when the last of its ranks has come to it, here and in ``tasks``.
    """

    @model_validator(mode="after")
    def _ranks_agree(self) -> Self:
        if not self.ranks:
            return self
        for one, following in pairwise(self.ranks):
            if one.rank + one.num_alike > following.rank:
                raise ValueError(f"rank {following.rank} follows {one.num_alike} from rank {one.rank} on in ranks")
        if self.rank not in {one.rank for one in self.ranks}:
            raise ValueError(f"rank is {self.rank}, which is none of ranks")
        return self

    @model_validator(mode="after")
    def _tasks_agree(self) -> Self:
        seen: set[int] = set()
        for timing in self.tasks:
            if timing.task in seen:
                raise ValueError(f"task {timing.task} ({timing.name}) occurs twice in tasks")
            seen.add(timing.task)
            if timing.end_s < timing.start_s:
                raise ValueError(f"{timing.name} ends at {timing.end_s} s, before its start at {timing.start_s} s")
        return self

    def of_rank(self, rank: int) -> Self:
        """The record with the times and the memory of ``rank``, or of one that is like it; itself if all are alike.

        Raises KeyError if it has none of that number.
        """
        if not self.ranks:
            return self
        found = next((one for one in self.ranks if one.rank <= rank < one.rank + one.num_alike), None)
        if found is None:
            raise KeyError(rank)
        if found.rank == self.rank:
            return self
        own = {name: getattr(found, name) for name in OF_RANKS}
        return self.model_copy(update={**own, "rank": found.rank, "machine": found.machine})

    @property
    def highest_peak_device_bytes(self) -> int:
        """The highest peak of device memory of any rank; 0 if none was measured."""
        return max([self.peak_device_bytes, *(self.of_rank(one.rank).peak_device_bytes for one in self.ranks)])

    def asking(self, **changes: Any) -> Self:
        """The record with some fields of its question changed: what its maker could not know.  Itself without one."""
        if self.question is None:
            return self
        return self.model_copy(update={"question": self.question.model_copy(update=changes)})

    def curve(self, memory: Memory) -> MemoryCurve | None:
        """The curve of one memory, if the record holds it."""
        return next((curve for curve in self.memory if curve.memory is memory), None)

    @property
    def peak_device_bytes(self) -> int:
        """Peak of device memory; 0 if it was not measured."""
        curve = self.curve(Memory.DEVICE)
        return curve.peak_bytes if curve is not None else 0

    @property
    def peak_pinned_bytes(self) -> int:
        """Peak of pinned host memory; 0 if it was not measured."""
        curve = self.curve(Memory.PINNED_HOST)
        return curve.peak_bytes if curve is not None else 0

    @property
    def tokens_per_s(self) -> float:
        """Throughput in steady state, of all ranks together."""
        return self.num_tokens / self.iteration_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second in steady state, of all ranks together."""
        return self.num_samples / self.iteration_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput of one rank."""
        return self.tokens_per_s / self.plan.num_ranks

    @property
    def mfu_frac(self) -> float | None:
        """Model FLOPs utilisation: ``model_flops`` over what the devices' peak would do in an iteration's time."""
        return self._utilisation_frac(self.model_flops)

    @property
    def hfu_frac(self) -> float | None:
        """Hardware FLOPs utilisation: as ``mfu_frac``, with what is recomputed."""
        return self._utilisation_frac(self.hardware_flops)

    def _utilisation_frac(self, flops: int | None) -> float | None:
        if flops is None or self.peak_flop_per_s is None:
            return None
        return flops / (self.iteration_s * self.peak_flop_per_s)

    def for_tokens(self, num_tokens: int) -> Self:
        """The record with what training on ``num_tokens`` takes.  Raises PlanError if its samples have no tokens."""
        if self.question is not None and self.question.num_tokens is None:
            raise PlanError(
                f"{self.model_name} is trained on samples without tokens, {self.num_samples:,} in a step. Leave out "
                f"the number of tokens."
            )
        num_steps = -(-num_tokens // self.num_tokens)
        time_s = num_steps * self.iteration_s
        hours = time_s / _SECONDS_PER_HOUR
        run = TrainingRun(
            num_tokens=num_tokens,
            num_steps=num_steps,
            time_s=time_s,
            energy_kwh=None if self.power_w is None else self.power_w / 1000 * hours,
            cost_usd=None if self.price_usd_per_hour is None else self.price_usd_per_hour * hours,
        )
        return self.model_copy(update={"run": run})

    @property
    def usd_per_million_tokens(self) -> float | None:
        """What a million tokens cost; None where no price is known."""
        if self.price_usd_per_hour is None:
            return None
        return self.price_usd_per_hour / _SECONDS_PER_HOUR / self.tokens_per_s * 10**6

    def phase_s(self, phase: IterationPhase) -> float:
        """Seconds of one phase."""
        match phase:
            case IterationPhase.FORWARD:
                return self.forward_s
            case IterationPhase.BACKWARD:
                return self.backward_s
            case IterationPhase.OPTIMIZER:
                return self.optimizer_s

    def waits_in(self, phase: IterationPhase) -> tuple[PhaseWait, ...]:
        """What compute waits for in one phase, the longest wait first; nothing if the record does not say."""
        return tuple(wait for wait in self.waits or () if wait.phase is phase)

    @property
    def lanes_shown(self) -> tuple[Lane, ...]:
        """The lanes of one rank, and of the others those on which anything ran."""
        found = {task.lane for task in self.tasks} | {use.lane for use in self.lanes if use.num_tasks}
        return tuple(lane for lane in Lane if lane in LANES_ALONE or lane in found)

    def lane(self, lane: Lane) -> LaneUse:
        """What ``lane`` did; nothing if the record does not name it."""
        return next((use for use in self.lanes if use.lane is lane), LaneUse(lane=lane, num_tasks=0, busy_s=0.0))
