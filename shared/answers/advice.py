"""Which machines were asked about, and what each would do: outcomes of ``protwin advise`` and ``protwin largest``."""

from __future__ import annotations

from math import inf
from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..basics.documents import Document, FrozenModel
from ..basics.interval import Interval
from ..schema.optimizer import Optimizer
from ..schema.plan import Plan
from ..schema.question import Question
from ..schema.record import Factorisation, TrainingRun
from ..schema.schedule import Lane
from ..schema.training_options import FULL_TRAINING, TrainingOptions
from .list_price import ListPrice
from .plan_kind import PlanKind
from .search_result import Goal


class MachineAdvice(FrozenModel):
    """The best plan on one machine, or on some of its devices; without ``plan``, why there is none."""

    hardware_name: str
    num_ranks: PositiveInt = 1
    """Devices that train together; ``plan`` says how."""
    num_devices: PositiveInt = 1
    """Devices whose rent counts: all those of the machines that the ranks are in, since machines are rented whole."""
    price_usd_per_hour: PositiveFloat | None
    """Of these machines."""
    plan: Plan | None = None
    question: Question | None = None
    """What was asked of this machine: element types and micro-batches may differ from machine to machine."""
    plan_kind: PlanKind | None = None
    survives: bool | None = None
    """As of ``SearchResult``."""
    micro_batch_size: PositiveInt | None = None
    """Samples that each device takes at a time."""
    iteration_interval_s: Interval | None = None
    """Where the iteration time of the plan is expected; None without a plan, or in files that do not say."""
    iteration_s: PositiveFloat | None = None
    num_tokens: PositiveInt | None = None
    """Per iteration."""
    tokens_per_s: PositiveFloat | None = None
    usd_per_step: PositiveFloat | None = None
    """Rent of these machines for one iteration; None without a price."""
    usd_per_million_tokens: PositiveFloat | None = None
    """None without a price."""
    run: TrainingRun | None = None
    """Time, energy and cost of the number of tokens that was asked about, if one was."""
    factorisation: Factorisation | None = None
    """What comes before the first step, if the plan trains weights in factors: ``run`` has no part of it."""
    guaranteed_peak_device_bytes: PositiveInt | None = None
    is_certified: bool = False
    """Whether the search proved its plan the best within its tolerance; false where there is no plan, and where it
    ended early: then ``gap_frac`` is what it proved."""
    gap_frac: NonNegativeFloat | None = None
    """How much faster any plan of the space could at most be; None where nothing is proven."""
    longest_sequence: PositiveInt | None = None
    """Tokens of the longest sequence that trains, which the plan is for; None where the length was given."""
    limit: str = ""
    """What stands against longer sequences; empty where the length was given."""
    reason: str = ""
    """Why no plan fits; empty where one does."""

    def rank(self) -> tuple[float, float, str, int]:
        """Longest sequences first where these were asked for, then fastest; machines that nothing fits last."""
        seconds = inf if self.iteration_s is None else self.iteration_s
        return -(self.longest_sequence or 0), seconds, self.hardware_name, self.num_ranks

    @property
    def name(self) -> str:
        """The machine, and its devices where several train."""
        return self.hardware_name if self.num_ranks == 1 else f"{self.hardware_name}, {self.num_ranks:,} ranks"

    @property
    def devices_per_rate(self) -> float:
        """Rented devices over tokens per second: what a token costs, in the rent of a device.  Infinite without one."""
        return inf if self.tokens_per_s is None else self.num_devices / self.tokens_per_s


class Advice(Document):
    """Machines ranked by time, or by the longest sequence that trains."""

    KIND: ClassVar[str] = "advice"
    TABLES: ClassVar[str] = "tables.advice:advice_tables"

    model: str
    """As it was asked for: a name of the catalogue or a file."""
    sequence_length: int | None
    """Tokens per sample; None where the model's file fixes it, or has none, and for the longest sequence."""
    global_batch_size: PositiveInt
    """Samples per step."""
    goal: Goal = Goal.FASTEST
    """The fastest plan for the length that was given, or the longest sequence."""
    ranks: tuple[PositiveInt, ...] = ()
    """The numbers of devices that were asked about; empty: all devices of every machine, and one of them alone."""
    machines: tuple[MachineAdvice, ...]
    """In the order of ``MachineAdvice.rank``; a machine with several devices more than once."""
    unanswered: tuple[str, ...] = ()
    """Machines that were asked about too, but that Ctrl-C left no time for."""
    emulated: tuple[str, ...] = ()
    """What is computed as others do, in words: plans of it are for comparison, and are not carried out here."""
    list_prices: tuple[ListPrice, ...] = ()
    """What machines were taken to cost that nobody stated a price for, each with its day and its source."""

    @property
    def question(self) -> Question | None:
        """What was asked of the first machine with a plan; None if there is none."""
        return next((one.question for one in self.deals if one.question is not None), None)

    @property
    def is_longest(self) -> bool:
        """Whether the longest sequences were asked for."""
        return self.goal is Goal.LONGEST_SEQUENCE

    @property
    def is_complete(self) -> bool:
        """Whether every machine that was asked about is ranked."""
        return not self.unanswered

    @property
    def deals(self) -> tuple[MachineAdvice, ...]:
        """Those with a plan, as ranked; of a machine's devices one alone only if it is cheaper or trains longer ones.

        Not where a machine with a single device is its equal, at no higher price.  Where numbers of devices were named,
        all of them.
        """
        found = [one for one in self.machines if one.plan is not None]
        if self.ranks:
            return tuple(found)
        together = {one.hardware_name: one for one in self.machines if one.num_ranks > 1}
        singles = [one for one in found if one.hardware_name not in together]

        def is_no_dearer(other: MachineAdvice, one: MachineAdvice) -> bool:
            ours, theirs = one.price_usd_per_hour, other.price_usd_per_hour
            return ours == theirs or (ours is not None and theirs is not None and theirs < ours)

        def has_equal(one: MachineAdvice) -> bool:
            alike = (other for other in singles if (other.iteration_s, other.plan) == (one.iteration_s, one.plan))
            return any(is_no_dearer(other, one) for other in alike)

        def is_longer(one: MachineAdvice, other: MachineAdvice) -> bool:
            return (one.longest_sequence or 0) > (other.longest_sequence or 0)

        def is_shown(one: MachineAdvice) -> bool:
            whole = together.get(one.hardware_name)
            if one.num_ranks > 1 or whole is None:
                return True
            is_better = one.devices_per_rate < whole.devices_per_rate or is_longer(one, whole)
            return is_better and not has_equal(one)

        return tuple(one for one in found if is_shown(one))

    @property
    def without_plan(self) -> tuple[MachineAdvice, ...]:
        """Why machines have no plan, for those that have none with any number of devices; of each the most devices."""
        answered = {one.hardware_name for one in self.machines if one.plan is not None}
        without: dict[str, MachineAdvice] = {}
        for one in self.machines:
            if one.hardware_name not in answered:
                most = without.get(one.hardware_name, one)
                without[one.hardware_name] = one if one.num_ranks >= most.num_ranks else most
        return tuple(without.values())

    @property
    def by_cost(self) -> tuple[MachineAdvice, ...]:
        """Those with a plan and a price, cheapest token first."""
        priced = [(cost, one) for one in self.deals if (cost := one.usd_per_million_tokens) is not None]
        return tuple(one for _, one in sorted(priced, key=lambda pair: (pair[0], pair[1].rank()[2:])))


class AdviceState(Document):
    """Answers so far, so that a sweep that was interrupted goes on where it ended."""

    KIND: ClassVar[str] = "advice_state"

    request: str
    """What they are answers to (``sim/questions/advise.py``)."""
    answers: dict[str, MachineAdvice]
    """By the hash of the machine's description, with the numbers of devices that train and that are paid for."""


class TooLarge(FrozenModel):
    """What a model lacks that does not fit; of each memory the least that some plan gets by with."""

    model: str
    num_parameters: PositiveInt
    short_device_bytes: NonNegativeInt
    """What the device's memory lacks, however much the host has."""
    short_host_bytes: NonNegativeInt
    """What the host's then lacks, beside a device that is large enough."""
    short_disk_bytes: NonNegativeInt = 0
    """What the host's disk lacks, where a larger one is all that is missing."""


class TrainedModel(FrozenModel):
    """What training one model comes to on one machine."""

    model: str
    num_parameters: PositiveInt
    plan: Plan
    iteration_s: PositiveFloat
    iteration_interval_s: Interval | None = None
    """Where a run of the plan is expected; None in files that do not say."""
    tokens_per_s: PositiveFloat
    bottleneck: Lane | None
    """The busiest lane."""
    guaranteed_peak_device_bytes: PositiveInt
    host_bytes: NonNegativeInt
    """Pinned and other memory of the plan on the host."""
    survives: bool | None
    """As of ``SearchResult``."""


class LargestModel(FrozenModel):
    """The largest model that trains on one machine with one size of host memory."""

    hardware_name: str
    device_memory_bytes: PositiveInt
    host_memory_bytes: PositiveInt | None
    """None: as much as any model needs."""
    disk_name: str | None = None
    """The disk that what the host cannot hold may lie on; None for no disk."""
    found: TrainedModel | None
    """None if none trains."""
    following: TooLarge | None
    """The next larger model, which does not; None if there is none."""


class PublishedLargest(FrozenModel):
    """What others published as their largest model, beside a model of that size in the catalogue."""

    system: str
    source: str
    hardware_name: str
    host_memory_bytes: PositiveInt | None
    """As published; None where that is not known."""
    num_parameters: PositiveInt
    """As published."""
    model: str
    """The model of the catalogue that is nearest to it."""
    least_host_memory_bytes: NonNegativeInt | None
    """Of a host that is enough for that model; None where the device is too small for it."""
    found: TrainedModel | None
    """That model on a host with the published memory, or with more if it takes more."""


class LargestModels(Document):
    """The largest models that train on machines, with several sizes of host memory each."""

    KIND: ClassVar[str] = "largest_models"
    TABLES: ClassVar[str] = "tables.advice:largest_tables"

    batch_size: PositiveInt
    """Samples per step."""
    sequence_length: PositiveInt
    """Tokens per sample."""
    optimizer: Optimizer
    options: TrainingOptions = FULL_TRAINING
    """What of the models is trained, and how."""
    left_out: tuple[str, ...] = ()
    """Models of the catalogue that have no such sequences."""
    untraced: tuple[str, ...] = ()
    """Models of the catalogue that are left out because only a trace knows them in this training."""
    machines: tuple[LargestModel, ...]
    published: tuple[PublishedLargest, ...] = ()
