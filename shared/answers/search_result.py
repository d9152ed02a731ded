"""The search result: the best plan that was found, what is proven about it, and the plans next to it."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel
from ..basics.interval import Interval
from ..schema.plan import ParallelMode, Plan, mode_words
from ..schema.record import Record
from .list_price import ListPrice
from .plan_kind import PlanKind, Uncertainty


class Goal(StrEnum):
    """What a search is for."""

    FASTEST = "fastest"
    """The least time, as far as it is worth the means."""
    CHEAPEST = "cheapest"
    """The least money per token, over numbers of the machine's devices."""
    LONGEST_SEQUENCE = "longest-sequence"
    LARGEST_BATCH = "largest-batch"
    LEAST_MEMORY = "least-memory"
    """The smallest guaranteed device peak."""


class Risk(StrEnum):
    """Which end of its uncertain time a plan is chosen by."""

    MEAN = "mean"
    """The predicted time."""
    HIGH = "high"
    """The upper end of its interval."""


class PlanOutcome(FrozenModel):
    """What the search knows of one plan that fits."""

    plan: Plan
    plan_kind: PlanKind
    iteration_s: PositiveFloat
    iteration_interval_s: Interval | None = None
    """Where the time that a run of it measures is expected; None where nothing tells."""
    ratio_interval: Interval | None = None
    """Where its measured time over that of the recommended plan is expected: errors that both share cancel."""
    is_simulated: bool
    """Whether the simulator ran it; otherwise it was replayed by the same rules, beside many others, and the two agree
    to five digits."""
    guaranteed_peak_device_bytes: NonNegativeInt
    """What no timing of the plan's schedule can exceed."""
    pinned_host_bytes: NonNegativeInt
    host_bytes: NonNegativeInt
    """Host memory that is not pinned: optimizer state of offloaded chunks."""

    @property
    def is_near_tie(self) -> bool:
        """Whether its interval cannot tell it from the recommended plan."""
        return self.ratio_interval is not None and self.ratio_interval.contains(1.0)


class Lack(FrozenModel):
    """What a plan needs beyond a budget."""

    memory: str
    """Of what there is too little, in words."""
    size_bytes: PositiveInt


class Baseline(FrozenModel):
    """A plan that nobody searched for, simulated on the same machine: plain training, or what another system does."""

    name: str
    how: str
    """What it does, in words."""
    plan: Plan
    plan_kind: PlanKind
    num_samples: PositiveInt
    """Per iteration, of all ranks together."""
    num_tokens: PositiveInt
    iteration_s: PositiveFloat
    """As if the memory were there, where it is lacking."""
    guaranteed_peak_device_bytes: NonNegativeInt
    expected_segments_bytes: NonNegativeInt | None = None
    """What PyTorch's allocator is expected to hold with its default settings; None where the plan lacks memory without
    it, and where the CPU is the device."""
    pinned_host_bytes: NonNegativeInt
    host_bytes: NonNegativeInt
    """Host memory that is not pinned."""
    lacking: tuple[Lack, ...] = ()
    """By how much it does not fit; nothing if it does."""

    @property
    def fits(self) -> bool:
        """Whether there is enough of every memory."""
        return not self.lacking

    @property
    def tokens_per_s(self) -> float:
        """Throughput, of all ranks together."""
        return self.num_tokens / self.iteration_s


class Certificate(FrozenModel):
    """What the search proves, and how.

    Every candidate of the space is in exactly one of the five counts below ``num_candidates``.
    """

    num_candidates: PositiveInt
    """Distinct plans in the space."""
    num_bounded_by_memory: NonNegativeInt
    """Left out since a lower bound of their device peak, or their host memory, exceeds its budget."""
    num_bounded_by_time: NonNegativeInt
    """Left out since a lower bound of their iteration time is too high to win."""
    num_bounded_by_segments: NonNegativeInt = 0
    """Left out since their segments are expected not to leave the margin free, though they may be faster: those whose
    segments were replayed, and those beyond the limit that was estimated for plans with the same chunks."""
    num_simulated: NonNegativeInt
    """Run by the simulator, of the plans whose segments may fit."""
    num_undecided: NonNegativeInt = 0
    """Left over where a cap or Ctrl-C ended the search early; then nothing is proven about them."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended the search: the plan is then the best so far."""
    has_fewest_on_disk: bool = False
    """Whether there are plans with chunks on the disk among them that nobody named: where host memory binds, those with
    the fewest that it allows."""
    best_iteration_s: PositiveFloat
    """The shortest iteration of all simulated plans."""
    best_unsimulated_bound_s: NonNegativeFloat | None
    """No decided plan that was not simulated has a shorter iteration, of those that fit, segments included; None if all
    of these were simulated."""
    tolerance_frac: NonNegativeFloat
    """Plans that are slower than the fastest one by less count as equals, of which the simplest is chosen."""
    left_out_frac: NonNegativeFloat | None = None
    """No plan that was left out is faster than the fastest one by more: ``tolerance_frac``, or more where several
    micro-batches left too many plans to look at.  None in documents that do not say: then ``tolerance_frac``."""

    @property
    def is_certified(self) -> bool:
        """Whether every plan of the space was simulated or excluded by a bound."""
        return self.num_undecided == 0 and not self.is_interrupted

    def noted(self, plan: Plan) -> Plan:
        """``plan`` as it is written to a file of its own: with a note if the search that found it was ended early."""
        if self.is_certified:
            return plan
        decided = self.num_candidates - self.num_undecided
        ended = "Ctrl-C ended the search" if self.is_interrupted else "the search ended at its limit of work"
        note = (
            f"Not certified: {ended} when {decided:,} of {self.num_candidates:,} plans were decided. "
            f"This was the best of the {self.num_simulated:,} that had been simulated."
        )
        return plan.model_copy(update={"note": note})

    @property
    def shortest_possible_s(self) -> float:
        """No decided plan that fits has a shorter iteration."""
        bound_s = self.best_unsimulated_bound_s
        return self.best_iteration_s if bound_s is None else min(self.best_iteration_s, bound_s)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        decided = self.num_bounded_by_memory + self.num_bounded_by_time + self.num_bounded_by_segments
        decided += self.num_simulated + self.num_undecided
        if decided != self.num_candidates:
            raise ValueError(f"the counts add up to {decided}, not to num_candidates {self.num_candidates}")
        return self


class WhatIf(FrozenModel):
    """What one change of the machine would do to the best plan's time."""

    change: str
    """What would be different, in words: ``"2 GiB more device memory"``."""
    iteration_s: PositiveFloat | None
    """Of the best plan then; None if none fits."""
    iteration_interval_s: Interval | None = None
    """Where a run of it is expected; None if none fits, or in files that do not say."""
    speedup: PositiveFloat | None
    """How many times as fast tokens then come: other numbers of ranks may train on more of them in an iteration."""
    reason: str = ""
    """Why nothing fits."""


class HostBound(FrozenModel):
    """The best plan with any host memory, where the host's is too small for it."""

    plan: Plan
    iteration_s: PositiveFloat
    survives: bool | None
    """As of ``SearchResult``."""
    host_bytes: PositiveInt
    """What it needs of the host, for one rank."""
    host_memory_bytes: PositiveInt
    """Of a host that is enough for it."""


class LeftOutSort(StrEnum):
    """Plans that a search tries where it is asked to, and not by default."""

    SWAPS = "swaps"
    """Blocks whose saved activations go to the host and come back."""
    HOST_STEPPED = "host-stepped"
    """Chunks that stay on the device and are stepped on the host."""
    ROW_LOOKUPS = "row-lookups"
    """Rows of embeddings that are looked up on the host."""

    @property
    def words(self) -> str:
        """What such plans have, for a sentence."""
        return _LEFT_OUT_WORDS[self]

    @property
    def option(self) -> str:
        """What ``protwin search`` takes to search them."""
        return _LEFT_OUT_OPTIONS[self]

    @property
    def kind(self) -> PlanKind:
        """The most that such plans need not ask for: by it their gain is weighed."""
        return _LEFT_OUT_KINDS[self]


_LEFT_OUT_WORDS: Final = {
    LeftOutSort.SWAPS: "swapped activations",
    LeftOutSort.HOST_STEPPED: "chunks on the device that the host steps",
    LeftOutSort.ROW_LOOKUPS: "rows of embeddings looked up on the host",
}
_LEFT_OUT_OPTIONS: Final = {
    LeftOutSort.SWAPS: "--n-swap all",
    LeftOutSort.HOST_STEPPED: "--n-host-stepped all",
    LeftOutSort.ROW_LOOKUPS: "--looks-up-rows",
}
_LEFT_OUT_KINDS: Final = {
    LeftOutSort.SWAPS: PlanKind.SWAPPED,
    LeftOutSort.HOST_STEPPED: PlanKind.HOST_STEPPED,
    LeftOutSort.ROW_LOOKUPS: PlanKind.OFFLOADED,
}


class LeftOut(FrozenModel):
    """Plans of one sort that the search left out, and what they might bring at most."""

    sort: LeftOutSort
    shortest_possible_s: PositiveFloat | None
    """No such plan that fits has a shorter iteration; None where nothing is known."""


class ModeChoice(FrozenModel):
    """What became of one parallel mode."""

    parallel: ParallelMode
    shard_ranks: PositiveInt | None = None
    """Ranks of its shard groups; None where all ranks are one, or none shards anything."""
    num_candidates: NonNegativeInt
    num_simulated: NonNegativeInt
    best_iteration_s: PositiveFloat | None
    """The shortest iteration of its simulated plans, the recommended one among them where none is expected to fit; None
    where none was simulated: none fits, or none can win."""
    shortest_possible_s: NonNegativeFloat | None
    """No plan of this mode that fits has a shorter iteration; None where none fits, or where nothing is proven."""
    reason: str = ""
    """Why it has no plan, or none that fits, in a clause."""

    @property
    def words(self) -> str:
        """``sharded``, or ``sharded in groups of 8``."""
        return mode_words(self.parallel, self.shard_ranks)

    def has(self, plan: Plan) -> bool:
        """Whether ``plan`` is one of this mode."""
        return (plan.parallel, plan.shard_ranks) == (self.parallel, self.shard_ranks)


class BatchChoice(FrozenModel):
    """What became of one size of the micro-batch, of several ranks in all parallel modes together."""

    micro_batch_size: PositiveInt
    micro_batches: PositiveInt
    num_candidates: PositiveInt
    num_simulated: NonNegativeInt
    best_iteration_s: PositiveFloat | None
    """The shortest iteration of its simulated plans; None where none was simulated: none fits, or none can win."""
    shortest_possible_s: NonNegativeFloat | None
    """No plan of this size that fits has a shorter iteration; None where none fits, or where nothing is proven."""
    parallel: ParallelMode | None = None
    """The mode of its best simulated plan."""


class BatchSizes(FrozenModel):
    """What became of the sizes of the micro-batch at one global batch.

    A step's samples are ``micro_batch_size`` times the plan's ``micro_batches`` and ``num_ranks``.
    """

    global_batch_size: PositiveInt
    """Samples per step, of all ranks together."""
    micro_batch_size: PositiveInt
    """That of the best plan: samples that a rank takes at a time."""
    choices: tuple[BatchChoice, ...]
    """Every size, ascending."""


class SearchResult(Document):
    """The outcome of one search."""

    KIND: ClassVar[str] = "search_result"
    TABLES: ClassVar[str] = "tables.search:search_tables"

    model_name: str
    hardware_name: str
    device_budget_bytes: PositiveInt
    host_budget_bytes: NonNegativeInt
    risk: Risk = Risk.MEAN
    """Which end of the predicted time the plan was chosen by."""
    goal: Goal = Goal.FASTEST
    goal_words: str = ""
    """What was reached, in words, and what lies beyond it."""
    list_price: ListPrice | None = None
    """What the machine was taken to cost for the goal, where nobody stated a price."""
    plan: Plan
    """The recommended plan."""
    plan_kind: PlanKind
    prediction: Record
    survives: bool | None
    """Whether the segments of PyTorch's allocator are expected to fit with its default settings, and the margin with
    them; None where the device has no segments, and where nobody asked."""
    margin_frac: NonNegativeFloat | None
    """Share of the device's memory that is to stay free beside these segments; None where they do not count."""
    uncertainty: Uncertainty
    """A plan of a less simple kind is recommended only if it is faster by more."""
    baselines: tuple[Baseline, ...] = ()
    """What people do without a search, on the same machine."""
    expandable: PlanOutcome | None = None
    """A faster plan whose segments fit only with expandable segments."""
    passed_over_for_risk: PlanOutcome | None = None
    """The plan of the least predicted time, where another one has the lower upper end."""
    num_weighed: NonNegativeInt = 0
    """Plans whose upper ends were compared, for ``risk``: the fastest ones that the search looked at closely."""
    passed_over: PlanOutcome | None = None
    """A faster plan of a less simple kind, the gain of which is within the uncertainty."""
    host_bound: HostBound | None = None
    """A faster plan that only the host's memory rules out, if that was asked."""
    certificate: Certificate
    left_out: tuple[LeftOut, ...] = ()
    """Sorts of plans that were not searched although some of them may fit: those that nobody asked for."""
    alternatives: tuple[PlanOutcome, ...]
    """The next best plans that differ in chunk size, persistent chunks or checkpointed blocks, fastest first."""
    pareto: tuple[PlanOutcome, ...]
    """The front of iteration time against guaranteed device peak, of the plans that the search looked at closely.

    Fastest first; each is slower than those before it, and needs at least one percent less memory.  Plans of a less
    simple kind than the recommended one count from its time on: a gain below the uncertainty is none.
    """
    what_if: tuple[WhatIf, ...] = ()
    """What other machines would change, if that was asked."""
    modes: tuple[ModeChoice, ...] = ()
    """Of several ranks: every parallel mode that was allowed, over all sizes of the micro-batch where several were."""
    batch: BatchSizes | None = None
    """Of a global batch, whose micro-batches may have any size: what became of each size."""

    @property
    def noted_plan(self) -> Plan:
        """The plan as it is written to a file of its own.

        With notes if the search that found it was ended early, and if its times are of blocks that others compute.
        """
        plan = self.certificate.noted(self.plan)
        if not self.prediction.emulated:
            return plan
        how = ", ".join(self.prediction.emulated)
        note = (
            f"Chosen for {how}: carried out, the plan takes other time, and may take more memory, than was predicted."
        )
        return plan.model_copy(update={"note": note if plan.note is None else f"{plan.note} {note}"})

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest baseline that fits; None if none does."""
        fitting = [baseline for baseline in self.baselines if baseline.fits]
        return max(fitting, key=lambda baseline: baseline.tokens_per_s, default=None)

    @property
    def gap_frac(self) -> float:
        """How much faster than ``plan`` any plan of the space could at most be, as a fraction of its time."""
        return max(0.0, 1 - self.certificate.shortest_possible_s / self.prediction.iteration_s)

    def left_out_frac(self, one: LeftOut) -> float | None:
        """How much faster than ``plan`` a plan of such a sort could at most be; None where nothing is known."""
        if one.shortest_possible_s is None:
            return None
        return max(0.0, 1 - one.shortest_possible_s / self.prediction.iteration_s)


class BatchSearchResult(BatchSizes):
    """The best plan of all sizes of the micro-batch, and what became of each: one size where one was asked about."""

    result: SearchResult
    """The best plan; its certificate covers all sizes."""
