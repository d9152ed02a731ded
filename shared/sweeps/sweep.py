"""What a sweep over batch sizes and sequence lengths found, and where offloading becomes free.

[Note: What offloading costs]
A plan that has anything on the host is slower than one on a device with memory for everything for two reasons: copies
and steps on the host may take longer than the compute beside them, and memory that is still short has blocks
recomputed.  The two are told apart by a third plan: everything on such a device, with as many blocks recomputed and as
many tiles as the plan itself.  Beside that one, the plan loses what does not hide behind compute: what offloading
costs.  It may gain, for the host steps what the device would.  Beside the best plan on such a device, the third one
loses what recomputation costs.  Offloading is free where it costs less than 1 %: searches prove their plans to 0.5 %,
and two of them are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from ..answers.list_price import ListPrice
from ..answers.plan_kind import PlanKind
from ..basics.documents import Document, FrozenModel
from ..basics.interval import Interval
from ..schema.plan import Plan
from ..schema.record import TrainingRun
from ..schema.schedule import Lane

FREE_FRAC: Final = 0.01
"""See [Note: What offloading costs]."""
_NEARLY_FREE_FRAC: Final = 0.05
"""Beyond the point from which on offloading is called free, single points may cost up to this: where memory is nearly
full, more travels beside compute.  They are named."""


class SweepPlan(FrozenModel):
    """What one plan does at one point."""

    plan: Plan
    plan_kind: PlanKind
    """What it asks of the machine."""
    iteration_s: PositiveFloat
    """Period of its steady state."""
    iteration_interval_s: Interval | None = None
    """Where a run of it is expected; None where nothing tells."""
    tokens_per_s: PositiveFloat
    """Of all ranks together."""
    guaranteed_peak_device_bytes: PositiveInt
    host_bytes: NonNegativeInt
    """Pinned and other memory of the plan on the host of one rank."""
    mfu_frac: PositiveFloat | None
    """Model FLOPs utilisation; None where it is not known."""
    bottleneck: Lane | None
    """The busiest lane."""
    survives: bool | None
    """As of ``SearchResult``."""
    usd_per_million_tokens: PositiveFloat | None = None
    """None without a price."""
    run: TrainingRun | None = None
    """Time, energy and cost of the number of tokens that was asked about, if one was; of the recommended plan alone."""


class SweepPoint(FrozenModel):
    """One shape of the batch."""

    batch_size: PositiveInt
    """Samples per micro-batch."""
    sequence_length: PositiveInt
    """Tokens per sample."""
    num_tokens: PositiveInt
    """Tokens per step, of all ranks and micro-batches together."""
    found: SweepPlan | None = None
    """The recommended plan; None where none fits."""
    on_device: SweepPlan | None = None
    """The fastest plan with everything on the device, whatever it recomputes; None where none fits."""
    unlimited_s: PositiveFloat | None = None
    """Iteration of the best plan on a device, and a host, of unlimited memory; None without a plan."""
    same_recomputation_s: PositiveFloat | None = None
    """The same with what the recommended plan recomputes, in as many tiles; None without a plan."""
    reason: str = ""
    """Why there is no plan; empty where there is one."""
    lacks_memory: bool = False
    """Whether it is memory that is short; otherwise the model has no such batch."""
    is_searched: bool = True
    """False where a smaller point without a plan answers for it, or where Ctrl-C left no time."""

    @property
    def offloads(self) -> bool:
        """Whether the recommended plan has anything on the host."""
        return self.found is not None and self.found.plan_kind.uses_host

    @property
    def offloading_cost_frac(self) -> float | None:
        """What offloading costs, below 0 where it gains; None where nothing is offloaded."""
        if self.found is None or self.same_recomputation_s is None or not self.offloads:
            return None
        return self.found.iteration_s / self.same_recomputation_s - 1

    @property
    def recomputation_cost_frac(self) -> float | None:
        """What recomputation costs; None without a plan."""
        if self.unlimited_s is None or self.same_recomputation_s is None:
            return None
        return self.same_recomputation_s / self.unlimited_s - 1

    @property
    def is_free(self) -> bool:
        """Whether something is offloaded that costs next to nothing."""
        cost = self.offloading_cost_frac
        return cost is not None and cost < FREE_FRAC

    @property
    def words(self) -> str:
        """``8 x 4,096``."""
        return f"{self.batch_size:,} x {self.sequence_length:,}"


class Crossover(FrozenModel):
    """From which batch on offloading is free, at one sequence length."""

    sequence_length: PositiveInt
    """Tokens per sample."""
    batch_size: PositiveInt | None
    """This one and all larger ones of the sweep that offload do so for free; None where none does."""
    num_tokens: PositiveInt | None
    """Per step, of that batch."""
    least_cost_frac: float
    """The least that offloading costs at this length, below 0 where it gains."""


class Sweep(Document):
    """Every point of a sweep, sequence by sequence, and where offloading becomes free."""

    KIND: ClassVar[str] = "sweep"
    TABLES: ClassVar[str] = "sweeps.tables:sweep_tables"

    model: str
    """As it was asked for: a name of the catalogue or a file."""
    model_name: str
    hardware_name: str
    device_budget_bytes: PositiveInt | None
    """As it was asked for; None for all that the device has for training."""
    num_ranks: PositiveInt = 1
    """Devices that train together."""
    micro_batches: PositiveInt = 1
    """Forwards and backwards per step and rank."""
    sequence_lengths: tuple[PositiveInt, ...]
    """That were asked about, shorter ones first."""
    batch_sizes: tuple[PositiveInt, ...]
    """That were asked about, smaller ones first."""
    rotary_tokens: PositiveInt | None = None
    """Tokens of a sample that the model's rotary positions were made for, where some points have more; else None."""
    points: tuple[SweepPoint, ...]
    """Shorter sequences first, then smaller batches."""
    crossovers: tuple[Crossover, ...]
    """Of the lengths at which anything is offloaded; see [Note: What offloading costs]."""
    emulated: tuple[str, ...] = ()
    """What is computed as others do, in words: plans of it are for comparison, and are not carried out here."""
    list_price: ListPrice | None = None
    """What the machine was taken to cost, where nobody stated a price."""
    is_complete: bool = True
    """Whether every point was answered; Ctrl-C ends a sweep early."""

    @property
    def with_plan(self) -> tuple[SweepPoint, ...]:
        """Points that a plan fits."""
        return tuple(point for point in self.points if point.found is not None)

    @property
    def free_from(self) -> SweepPoint | None:
        """The point of the fewest tokens a step from which on offloading is free, or nearly so; None if there is none.

        It is free at that point, and beyond it costs less than 5 % anywhere; ``exceptions`` has what is not free there.
        Of several with as many tokens, the one of the longest sequence.
        """
        offloading = [point for point in self.points if point.offloads]
        costs = [(point.num_tokens, point.offloading_cost_frac or 0.0) for point in offloading]
        costly = max((num_tokens for num_tokens, cost in costs if cost >= _NEARLY_FREE_FRAC), default=0)
        free = (point for point in offloading if point.is_free and point.num_tokens > costly)
        return min(free, key=lambda point: (point.num_tokens, -point.sequence_length), default=None)

    @property
    def exceptions(self) -> tuple[SweepPoint, ...]:
        """Points of as many tokens as ``free_from``, or of more, at which offloading is not free."""
        first = self.free_from
        if first is None:
            return ()
        return tuple(p for p in self.points if p.offloads and not p.is_free and p.num_tokens >= first.num_tokens)


def crossovers(points: Iterable[SweepPoint]) -> tuple[Crossover, ...]:
    """Where offloading becomes free at each length at which anything is offloaded, shorter ones first."""
    by_length: dict[int, list[SweepPoint]] = {}
    for point in points:
        if point.offloads:
            by_length.setdefault(point.sequence_length, []).append(point)
    return tuple(_crossover(length, by_length[length]) for length in sorted(by_length))


def _crossover(length: int, points: Sequence[SweepPoint]) -> Crossover:
    found: SweepPoint | None = None
    for point in sorted(points, key=lambda one: -one.batch_size):
        if not point.is_free:
            break
        found = point
    costs = [cost for point in points if (cost := point.offloading_cost_frac) is not None]
    return Crossover(
        sequence_length=length,
        batch_size=None if found is None else found.batch_size,
        num_tokens=None if found is None else found.num_tokens,
        least_cost_frac=min(costs),
    )
