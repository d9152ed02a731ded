"""A search as it is asked for: one frozen object, from the command line down to the tables of each space.

[Note: Equal steps]
Plans are compared by the time of a step, so that all of a search have steps of equally many samples.  Where several
ranks share each sequence, fewer batches are under way at once: such plans have as many more micro-batches.  So
``Step.micro_batches``, a number per rank, holds for the least sharing that the space allows: 8 ranks of which all share
each sequence, and no others are searched, have that number; beside plans of ranks with sequences of their own they have
8 times as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from types import NoneType

from ...shared.answers.plan_kind import Uncertainty
from ...shared.answers.search_result import Risk
from ...shared.basics.arguments import (
    as_choice,
    as_choices,
    as_number,
    as_size,
    as_whole,
    as_wholes,
    check_kind,
    wrong,
)
from ...shared.basics.errors import PlanError
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.layout.keeping import AS_PLANNED
from ...shared.methods.known import method_named
from ...shared.methods.method import Method
from ...shared.optimizers.check import check_host_gradients, check_optimizer
from ...shared.phases.sequence_sharing import why_not_shared
from ...shared.records.calibrated import check_figures
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import (
    ParallelMode,
    Plan,
    ProjectionPlace,
    why_not_bypass,
    why_not_osft,
    why_not_parallel,
    why_not_shard_ranks,
)
from ...shared.schema.workload import Workload
from ...shared.workloads.check import check_kernels, check_lowering, check_magnitude
from ..memory.host import default_host_budget_bytes
from ..memory.libraries import collective_bytes, more_collective_bytes, rank_device_bytes
from ..memory.reserved import segment_limit_bytes
from ..space.space import SearchSpace
from ..space.step_spec import MOST_MICRO_BATCHES, SEVERAL, StepSpec, check_shares
from .confidence import DEFAULT_MARGIN_FRAC, uncertainty_of

WorkloadAt = Callable[[int], Workload]
"""The workload of one micro-batch with this number of samples."""
_LARGEST_BATCH = 10**9


class _KnownSizes:
    """Workloads by their number of samples, each made once: searches come back to every size several times."""

    def __init__(self, workload_at: WorkloadAt) -> None:
        self._workload_at = workload_at
        self._known: dict[int, Workload] = {}

    def __call__(self, size: int) -> Workload:
        if size not in self._known:
            self._known[size] = self._workload_at(size)
        return self._known[size]


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """All samples of one optimizer step, of all ranks together: the search chooses the micro-batches' size."""

    num_samples: int
    workload_at: WorkloadAt
    micro_batch_sizes: tuple[int, ...] | None = None
    """Sizes to search, in samples, or one; None for every size that divides a rank's share."""

    def __post_init__(self) -> None:
        _set(self, num_samples=as_whole("num_samples", self.num_samples))
        check_kind("workload_at", self.workload_at, Callable, "a function of the number of samples")  # type: ignore[arg-type]
        if not isinstance(self.workload_at, _KnownSizes):
            _set(self, workload_at=_KnownSizes(self.workload_at))
        if self.micro_batch_sizes is not None:
            _set(self, micro_batch_sizes=as_wholes("micro_batch_sizes", self.micro_batch_sizes))

    def sizes(self, num_ranks: int) -> tuple[int, ...]:
        """Samples per micro-batch to search, ascending; each divides the share of one of ``num_ranks`` ranks.

        Without ``micro_batch_sizes``, all that leave a rank at most ``MOST_MICRO_BATCHES`` micro-batches.  Raises
        PlanError if the ranks cannot share the batch evenly, or if a size does not divide a rank's share.
        """
        if not 1 <= self.num_samples <= _LARGEST_BATCH:
            raise PlanError(
                f"the global batch is {self.num_samples}; it must be at least 1 and at most {_LARGEST_BATCH}."
            )
        check_shares(self.num_samples, num_ranks)
        of_one = self.num_samples // num_ranks
        if self.micro_batch_sizes is None:
            return tuple(size for size in divisors(of_one) if of_one // size <= MOST_MICRO_BATCHES)
        for size in self.micro_batch_sizes:
            if size < 1 or of_one % size:
                share = f"each rank's {of_one} of " if num_ranks > 1 else ""
                raise PlanError(
                    f"the micro-batch size {size} does not divide {share}the global batch of {self.num_samples}. "
                    f"Choose from {', '.join(map(str, divisors(of_one)))}."
                )
        return tuple(sorted(set(self.micro_batch_sizes)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: what is the same for every plan that is searched."""

    micro_batches: int = 1
    """Forwards and backwards per step and rank; a ``GlobalBatch`` decides the number by itself."""
    max_gradient_norm: float | None = None
    """Limit of the norm of all gradients, or of each student block's (``Plan.max_gradient_norm``); None for none."""
    num_ranks: int = 1
    """Equal ranks that train together, one device each."""
    modes: tuple[ParallelMode, ...] = SEVERAL
    """Parallel modes that several ranks may use; one rank alone is SINGLE whatever stands here."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What steps the weights."""
    host_gradients: HostGradients = HostGradients.PARAMETERS
    """In which element type the hosts add up gradients."""
    shard_ranks: tuple[int, ...] | None = None
    """Ranks of a shard group in mode SHARDED, one number or several; ``()`` for every number that makes equal groups.
    None: all ranks, and where these fill several nodes the ranks of one node."""

    def __post_init__(self) -> None:
        _set(
            self,
            micro_batches=as_whole("micro_batches", self.micro_batches),
            num_ranks=as_whole("num_ranks", self.num_ranks, least=1),
            modes=as_choices("modes", self.modes, ParallelMode),
            optimizer=as_choice("optimizer", self.optimizer, Optimizer),
            host_gradients=as_choice("host_gradients", self.host_gradients, HostGradients),
        )
        if self.max_gradient_norm is not None:
            _set(self, max_gradient_norm=as_number("max_gradient_norm", self.max_gradient_norm))
        if self.shard_ranks is not None:
            _set(self, shard_ranks=as_wholes("shard_ranks", self.shard_ranks))

    @property
    def allowed_modes(self) -> tuple[ParallelMode, ...]:
        """Modes to search, simplest first: of those that are named, the ones that the optimizer allows.

        Raises PlanError if it allows none of them.
        """
        if self.num_ranks == 1:
            return (ParallelMode.SINGLE,)
        named = [mode for mode in SEVERAL if mode in self.modes]
        allowed = tuple(mode for mode in named if why_not_parallel(self.optimizer, mode) is None)
        if named and not allowed:
            raise PlanError(f"{why_not_parallel(self.optimizer, named[0])}.")
        return allowed

    def shard_groups(self, hardware: Hardware, mode: ParallelMode) -> tuple[int | None, ...]:
        """Ranks of a shard group to search in one mode, None for all ranks, the largest first.

        Of numbers that are named those that divide the ranks, as other numbers of ranks may be asked about.
        Raises PlanError if none does.
        """
        if mode is not ParallelMode.SHARDED:
            return (None,)
        num_ranks, per_node = self.num_ranks, hardware.devices_per_node
        named = self.shard_ranks
        if named is None:
            named = (num_ranks, per_node) if 1 < per_node < num_ranks and num_ranks % per_node == 0 else (num_ranks,)
        elif not named:
            wanted = (number for number in divisors(num_ranks) if number > 1)
            named = tuple(n for n in wanted if max(n, per_node) % min(n, per_node) == 0 or num_ranks <= per_node)
        reasons = {number: why_not_shard_ranks(number, num_ranks, mode) for number in named}
        fitting = sorted((number for number, reason in reasons.items() if reason is None), reverse=True)
        if not fitting:
            raise PlanError(f"{next(iter(reasons.values()))}.")
        return tuple(None if number == num_ranks else number for number in fitting)

    def spec(
        self,
        mode: ParallelMode,
        micro_batches: int | None = None,
        shard_ranks: int | None = None,
        *,
        place: ProjectionPlace = ProjectionPlace.HOST,
    ) -> StepSpec:
        """The step in one mode, with the step's own micro-batches if None.  Raises PlanError if it is out of range."""
        return StepSpec(
            self.micro_batches if micro_batches is None else micro_batches,
            self.max_gradient_norm,
            mode,
            self.num_ranks,
            self.optimizer,
            self.host_gradients,
            shard_ranks,
            place,
        )


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is proven, and when the search gives up.  Raises PlanError if a figure is out of range."""

    tolerance_frac: float = 0.005
    """No plan of the space is faster than the fastest one found by more, as a fraction of its time, from 0 to below 1.

    Plans within the tolerance of the fastest count as equals, and the simplest of them is the answer
    (``LayoutGrid.simplicity``).  With 0 the answer equals a simulation of every plan.
    """
    max_replays: int | None = None
    """Plans to replay at most, over all modes and sizes, once one fits; None for no limit."""
    uncertainty: Uncertainty | None = None
    """A plan must be faster than one of a simpler kind by more; None for what the prediction is worth
    (``sim/searching/confidence.py``)."""

    def __post_init__(self) -> None:
        _set(self, tolerance_frac=as_number("tolerance_frac", self.tolerance_frac))
        if self.max_replays is not None:
            _set(self, max_replays=as_whole("max_replays", self.max_replays))
        if self.uncertainty is not None:
            check_kind("uncertainty", self.uncertainty, Uncertainty, "an Uncertainty, or None")
        if not 0 <= self.tolerance_frac < 1:
            raise PlanError(f"tolerance_frac is {self.tolerance_frac}; it must be at least 0 and below 1.")
        if self.max_replays is not None and self.max_replays < 1:
            raise PlanError(f"max_replays is {self.max_replays}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search for the fastest plan whose memory fits for every timing."""

    workload: Workload | GlobalBatch
    """One rank's micro-batch, or a global batch whose micro-batches may have any size."""
    hardware: Hardware
    """The machine, of all ranks together."""
    calibration: Calibration | None = None
    """Factors measured on that machine; None for its data sheet."""
    device_budget_bytes: int | None = None
    """Device memory that one rank's plan may fill, text such as ``"10GiB"`` too; None for all that the device has for
    training."""
    host_budget_bytes: int | None = None
    """Pinned and pageable host memory that one rank's plan may fill, text too; None for its share of the host, less a
    reserve."""
    margin_frac: float | None = DEFAULT_MARGIN_FRAC
    """Share of the device's memory that is to stay free beside all segments that PyTorch's allocator is expected to
    hold with its default settings, from 0 to below 1.  None: plans fit by what they allocate, whatever the segments.
    The CPU as a device has no segments, and no margin."""
    space: SearchSpace = field(default_factory=SearchSpace)
    """Plans to search."""
    step: Step = field(default_factory=Step)
    """The optimizer step and its ranks."""
    effort: Effort = field(default_factory=Effort)
    """What is proven, and at what price."""
    method: Method | None = None
    """The training method, where it is none of protwin's own; None: the workload's."""
    risk: Risk = Risk.MEAN
    """What is to be short: the predicted time, or the upper end of its interval."""
    baselines: tuple[tuple[str, Plan], ...] | None = None
    """The user's own plans, with names, to lay beside the recommended one together with what other systems would do;
    None for no baselines at all, and no word about plans that are left out by default."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for budget in ("device_budget_bytes", "host_budget_bytes"):
            if (size := getattr(self, budget)) is not None:
                _set(self, **{budget: as_size(budget, size)})
        _set(self, risk=as_choice("risk", self.risk, Risk))
        if self.margin_frac is not None:
            _set(self, margin_frac=as_number("margin_frac", self.margin_frac))
        for number in self.space.sequence_ranks or ():
            if (reason := why_not_shared(number, self.step.num_ranks)) is not None:
                raise PlanError(f"{reason}.")
        if self.margin_frac is not None and not 0 <= self.margin_frac < 1:
            raise PlanError(f"margin_frac is {self.margin_frac}; it must be at least 0 and below 1.")

    def _check_kinds(self) -> None:
        check_kind("workload", self.workload, (Workload, GlobalBatch), "a Workload or a GlobalBatch")
        check_kind("hardware", self.hardware, Hardware, "a Hardware, as load_hardware gives it")
        check_kind("calibration", self.calibration, (Calibration, NoneType), "a Calibration, or None")
        if self.calibration is not None:
            check_figures(self.calibration, self.hardware)
        check_kind("space", self.space, SearchSpace, "a SearchSpace")
        check_kind("step", self.step, Step, "a Step, as Step(micro_batches=2)")
        check_kind("effort", self.effort, Effort, "an Effort, as Effort(tolerance_frac=0.01)")
        check_kind("method", self.method, (Method, NoneType), "a Method, or None")
        if self.method is not None and self.method.policies.keeping != AS_PLANNED:
            raise PlanError(
                "method keeps more than plans say, as other systems do (Policies.keeping), and searches do not count "
                "that. Search without it, and ask simulate about the plan."
            )
        pairs = self.baselines if isinstance(self.baselines, tuple | list | NoneType) else (self.baselines,)
        for pair in pairs or ():
            named = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
            if not (isinstance(named[0], str) and isinstance(named[1], Plan)):
                raise wrong("baselines", self.baselines, 'pairs of a name and a Plan, as (("mine", plan),)')

    @property
    def world_ranks(self) -> int:
        """Ranks on the machine: those of the step, times the stages of the pipeline that the workload is one of."""
        num_stages = 1 if isinstance(self.workload, GlobalBatch) else self.workload.num_stages
        return self.step.num_ranks * num_stages

    @property
    def may_use_disk(self) -> bool:
        """Whether what the host cannot hold may lie on a disk: there is one, and nobody said how much lies there.

        One rank alone has chunks on a disk, of a host beside its device; those that look rows up are searched
        without.
        """
        is_one_memory = self.hardware.device.kind is DeviceKind.CPU and self.host_budget_bytes is None
        is_open = "n_disk_state" not in self.space.model_fields_set and not self.space.looks_up_rows
        return self.hardware.disk is not None and self.world_ranks == 1 and is_open and not is_one_memory

    @property
    def may_offload_inputs(self) -> bool:
        """Whether inputs of checkpointed blocks may go to the host: nobody said how many, nor what is checkpointed."""
        method = self.smallest_workload().method
        is_open = not self.space.model_fields_set & {"n_offload_input", "n_checkpoint"}
        return is_open and method_named(method, self.method).policies.sections.has_modes

    def with_offloaded_inputs(self) -> SearchRequest:
        """The same with inputs of checkpointed blocks on the host, as many as are sensible."""
        return replace(self, space=self.space.model_copy(update={"n_offload_input": None}))

    @property
    def tries(self) -> Iterator[SearchRequest]:
        """What is searched in turn until something fits: itself, and with what may lie elsewhere."""
        yield self
        has_disk = self.may_use_disk
        if self.may_offload_inputs:
            yield self.with_offloaded_inputs()
            if has_disk:
                yield self.with_disk()
                yield self.with_offloaded_inputs().with_disk()
        elif has_disk:
            yield self.with_disk()

    def with_disk(self) -> SearchRequest:
        """The same with what the host cannot hold on the machine's disk ([Note: Chunks on the disk])."""
        return replace(self, space=self.space.model_copy(update={"n_disk_state": None}))

    @property
    def uncertainty(self) -> Uncertainty:
        """By how much a plan must be faster than one of a simpler kind."""
        return self.effort.uncertainty or uncertainty_of(self.calibration)

    @property
    def segment_limit_bytes(self) -> int | None:
        """What the segments on one device may take; None where the device has none, or nobody asks."""
        if self.margin_frac is None:
            return None
        return segment_limit_bytes(
            self.hardware.device,
            beside_bytes=collective_bytes(self.hardware, self.world_ranks),
            margin_frac=self.margin_frac,
        )

    def method_of(self, workload: Workload) -> Method:
        """By which plans for ``workload`` are compiled and verified."""
        return method_named(workload.method, self.method)

    def micro_batches(self) -> Iterator[tuple[int, Workload, int]]:
        """Every micro-batch to search, smallest first: samples, workload, number per step and rank.

        Where ranks share sequences, the number is that of ``sequence_unit`` ranks (``micro_batches_of``).

        Raises PlanError as ``GlobalBatch.sizes``.
        """
        if isinstance(self.workload, Workload):
            yield self.workload.num_samples, self.workload, self.step.micro_batches
            return
        num_groups = self.step.num_ranks // self.sequence_unit
        of_one = self.workload.num_samples // num_groups
        for size in self.workload.sizes(num_groups):
            yield size, self.workload.workload_at(size), of_one // size

    @property
    def sequence_unit(self) -> int:
        """The largest number of ranks that divides every number that may share a sequence; 1 where none is named."""
        return gcd(*(self.space.sequence_ranks or (1,)))

    def micro_batches_of(self, sequence_ranks: int, micro_batches: int) -> int:
        """Micro-batches per step of ranks of which so many share each sequence ([Note: Equal steps])."""
        return micro_batches * sequence_ranks // self.sequence_unit

    def smallest_workload(self) -> Workload:
        """The workload of the smallest micro-batch.  Raises PlanError as ``GlobalBatch.sizes``."""
        return next(self.micro_batches())[1]

    def budgets_bytes(self, shard_ranks: int | None = None) -> tuple[int, int]:
        """Device and host memory of one rank: the request's budgets, else the rank's share of the machine.

        ``shard_ranks``: of a shard group, where ranks form some.  Of a device that has segments, no more is a
        budget than the margin leaves them.  Raises HardwareError if the machine has too few devices for the
        ranks.
        """
        device_bytes, host_bytes, num_ranks = self.device_budget_bytes, self.host_budget_bytes, self.world_ranks
        if device_bytes is None:
            device_bytes = rank_device_bytes(self.hardware, num_ranks, shard_ranks)
            limit_bytes = self.segment_limit_bytes
            if limit_bytes is not None:
                more_bytes = more_collective_bytes(self.hardware, num_ranks, shard_ranks)
                device_bytes = max(1, min(device_bytes, limit_bytes - more_bytes))
        if host_bytes is None:
            of_rank = self.hardware if num_ranks == 1 else machine_of_rank(self.hardware, num_ranks)
            host_bytes = default_host_budget_bytes(of_rank, device_bytes)
        return device_bytes, host_bytes


def _set(frozen: object, **fields: object) -> None:
    """Set fields of a frozen object while it is being made."""
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def check_possible(request: SearchRequest, workload: Workload, step: StepSpec) -> None:
    """Raise PlanError if no plan of the workload's method can be what the request asks for.

    WorkloadError if the workload is of no sensible size, was traced with kernels that the device does not have, or
    multiplies in float8 on a device that does not.
    """
    check_magnitude(workload)
    check_kernels(workload, request.hardware)
    check_lowering(workload, request.hardware)
    if workload.float8_gather is not None:
        raise PlanError(
            "a search has plans for protwin's own runtime, and of others FSDP2 alone gathers weights in float8: nobody "
            "knows what a plan with chunks elsewhere would gather so. Leave --float8-gather out, or ask about one plan "
            "(protwin simulate --as fsdp2)."
        )
    check_optimizer(step.optimizer, workload.parameters)
    check_host_gradients(step.host_gradients, workload.parameters)
    asked = Plan.model_construct(
        method=workload.method,
        parallel=step.parallel,
        micro_batches=step.micro_batches,
        projects_gradients_on=step.projects_gradients_on,
        n_disk_state=max(request.space.n_disk_state or (0,)),
        looks_up_rows=request.space.looks_up_rows,
        max_gradient_norm=step.max_gradient_norm,
        n_swap=0,
        n_checkpoint=0,
    )
    for why_not in (why_not_bypass, why_not_osft):
        if (reason := why_not(asked)) is not None:
            raise PlanError(f"{reason}.")
    if workload.num_stages > 1 and any(request.space.n_disk_state or ()):
        raise PlanError("a stage of a pipeline has no chunks on a disk. Leave out n_disk_state, n_disk and n_staging.")
    if workload.num_stages > 1 and request.workload is not workload:
        raise PlanError("stages of a pipeline are searched at one size of the micro-batch. Name it.")
