"""Which machine to rent: one search over batch sizes per machine, many at once, resumable, ranked.

Or the longest sequence that trains on each, in micro-batches of one sample.

Machines with several devices are asked about as a whole, in every parallel mode, and as one of their devices alone.
Every search ends after so much work that a sweep over the catalogue takes minutes; the answer says how much faster than
its plan any other one could be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from ...shared.answers.advice import Advice, AdviceState, MachineAdvice
from ...shared.answers.search_result import BatchSearchResult, Goal
from ...shared.basics.errors import FileError, HardwareError, InfeasibleError, PlanError, ProtwinError
from ...shared.basics.progress import OnProgress
from ...shared.catalogue.models import known_model
from ...shared.catalogue.rank_share import rent_of_ranks
from ...shared.optimizers.check import check_host_gradients, check_optimizer
from ...shared.phases.operations import lowering_notes
from ...shared.records.question import sequence_length_of
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import TrainingMethod
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.students.student import Student
from ...shared.workloads.check import check_method
from ...shared.workloads.source import (
    WorkloadRequest,
    is_saved_workload,
    resolve_workload,
    saved_sizes,
    untraced_workload,
    usual_shape,
)
from ..searching.confidence import DEFAULT_MARGIN_FRAC
from ..searching.request import Effort, GlobalBatch, SearchRequest, Step
from ..searching.search import search_batches
from ..space.space import SearchSpace
from ..space.step_spec import StepSpec
from ..space.tilings import tile_counts
from .goals import SEQUENCE_STEP, Shapes, search_goal
from .in_tiles import AskedTiles, Tiles
from .processes import interruptions_held, searching_processes

_SECONDS_PER_HOUR: Final = 3600
_MOST_WORK: Final = 8_000
"""Plans that a search looks at closely times the micro-batches of one sample that a device goes through."""
SearchOne = Callable[["AdviceRequest", "Offer"], MachineAdvice]


@dataclass(frozen=True)
class AdviceRequest:
    """What is to be trained; everything that decides an answer besides the machine."""

    model: str
    sequence_length: int | None
    dtype: str | None
    global_batch: int
    max_gradient_norm: float | None
    fingerprint: str
    """Of what ``model`` stands for and of the software, so that answers of another are not taken for its own."""
    options: TrainingOptions = FULL_TRAINING
    """What of the model is trained, and how."""
    device_budget_bytes: int | None = None
    """Device memory of one rank that plans may fill; None for all that each machine has."""
    margin_frac: float = DEFAULT_MARGIN_FRAC
    """As of ``SearchRequest``."""
    calibrations: tuple[Calibration, ...] = ()
    """Factors for the machines that they were measured on."""
    num_tokens: int | None = None
    """Tokens whose time, energy and cost are asked for."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What steps the weights."""
    host_gradients: HostGradients = HostGradients.PARAMETERS
    """In which element type the hosts add up gradients."""
    student: Student | None = None
    """What learns from the model, block by block; None: the model itself is trained."""
    goal: Goal = Goal.FASTEST
    """Or LONGEST_SEQUENCE, which has no ``sequence_length``."""
    packed_lengths: str | None = None
    """Samples in each row, end to end; None: each row is one."""
    tiles: AskedTiles = field(default_factory=AskedTiles)
    """Numbers of tiles that plans may have."""
    product_stride: tuple[int, ...] | None = (0,)
    """What checkpointed blocks may keep, as of ``SearchSpace``."""

    @property
    def identity(self) -> str:
        """Hash of all of it."""
        told = vars(self) | {
            "options": self.options.model_dump(mode="json"),
            "calibrations": [calibration.model_dump(mode="json") for calibration in self.calibrations],
            "student": None if self.student is None else self.student.model_dump(mode="json"),
            "tiles": asdict(self.tiles),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def space(self) -> SearchSpace:
        """Plans to search."""
        return self.tiles.space.model_copy(update={"product_stride": self.product_stride})

    def calibration_of(self, hardware: Hardware) -> Calibration | None:
        """The factors that were measured on the machine, if there are any."""
        return next((one for one in self.calibrations if one.hardware_name == hardware.name), None)

    def workload_at(self, size: int, cache: Path | None, device: Device | None = None) -> Workload:
        """The workload of a micro-batch of ``size`` samples as ``resolve_workload`` gives it, with tiles."""

        def asked(mlp_tiles: Tiles, loss_tiles: Tiles) -> WorkloadRequest:
            return WorkloadRequest(
                self.model,
                batch_size=size,
                sequence_length=self.sequence_length,
                dtype=self.dtype,
                options=self.options,
                device=device,
                student=self.student,
                packed_lengths=self.packed_lengths,
                mlp_tiles=mlp_tiles,
                loss_tiles=loss_tiles,
            )

        def resolved(mlp_tiles: Tiles, loss_tiles: Tiles) -> Workload:
            return resolve_workload(asked(mlp_tiles, loss_tiles), cache=cache)

        def untraced(mlp_tiles: Tiles, loss_tiles: Tiles) -> Workload | None:
            return untraced_workload(asked(mlp_tiles, loss_tiles))

        if self.student is not None or is_saved_workload(self.model):
            return resolved(self.tiles.mlp or (), self.tiles.loss or ())
        return self.tiles.workload(size, self.sequence_length, resolved, untraced)

    @property
    def least_samples(self) -> int:
        """Samples of the smallest micro-batch.  Raises WorkloadError if a saved one's do not divide the batch."""
        sizes = saved_sizes(self.model, self.global_batch)
        return sizes[0] if sizes else 1

    def smallest_workload(self, cache: Path | None) -> Workload:
        """That of the smallest micro-batch, of the shortest sequences where the longest ones are asked for."""
        is_longest = self.goal is Goal.LONGEST_SEQUENCE
        asked = replace(self, sequence_length=SEQUENCE_STEP) if is_longest else self
        return asked.workload_at(self.least_samples, cache)


@dataclass(frozen=True)
class Offer:
    """Devices of a machine that train together."""

    hardware: Hardware
    num_ranks: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of the machines that the ranks are in, which are rented whole."""
        per_node = self.hardware.devices_per_node
        return -(-self.num_ranks // per_node) * per_node

    @property
    def key(self) -> str:
        """Hash of the machine's description, with the number of ranks."""
        return f"{machine_key(self.hardware)}-{self.num_ranks}"

    @property
    def same_search(self) -> str:
        """What is equal where the searches of a model of the catalogue are.

        Names and prices are no part of it, nor is what one device alone has no use of.
        """
        update: dict[str, object] = {"name": "machine", "price_usd_per_hour": None, "overrides": ()}
        if self.num_ranks == 1:
            update |= {"node": None, "network": None}
        return f"{machine_key(self.hardware.model_copy(update=update))}-{self.num_ranks}"

    def priced(self, found: MachineAdvice) -> MachineAdvice:
        """``found``, which may be of an equal machine, with this one's name and price."""
        price, rate, run = rent_of_ranks(self.hardware, self.num_ranks), found.tokens_per_s, found.run
        if run is not None:
            cost_usd = None if price is None else price * run.time_s / _SECONDS_PER_HOUR
            run = run.model_copy(update={"cost_usd": cost_usd})
        return found.model_copy(
            update={
                "hardware_name": self.hardware.name,
                "question": found.question and found.question.model_copy(update={"hardware_name": self.hardware.name}),
                "num_ranks": self.num_ranks,
                "num_devices": self.num_devices,
                "price_usd_per_hour": price,
                "run": run,
                "usd_per_step": None
                if price is None or found.iteration_s is None
                else price / _SECONDS_PER_HOUR * found.iteration_s,
                "usd_per_million_tokens": None
                if price is None or rate is None
                else price / _SECONDS_PER_HOUR / rate * 10**6,
            }
        )


def whole_machines(machines: Sequence[Hardware], num_parts: int) -> list[Offer]:
    """Every machine with all devices that can share ``num_parts`` parts evenly, and with one of them alone."""
    together = []
    for hardware in machines:
        most = min(hardware.num_devices, num_parts)
        num_ranks = next(number for number in range(most, 0, -1) if num_parts % number == 0)
        if num_ranks > 1:
            together.append(Offer(hardware, num_ranks))
    return [*together, *(Offer(hardware) for hardware in machines)]


def machines_with(machines: Sequence[Hardware], ranks: Sequence[int]) -> list[Offer]:
    """Those that have as many devices, for each number of ``ranks``.  Raises HardwareError if a number is too large."""
    asked = []
    for num_ranks in ranks:
        found = [Offer(hardware, num_ranks) for hardware in machines if hardware.num_devices >= num_ranks]
        if not found:
            largest = max(machines, key=lambda hardware: hardware.num_devices)
            raise HardwareError(
                f"--ranks {num_ranks}: no machine that is asked about has so many devices; {largest.name} has "
                f"{largest.num_devices:,}. Ask about fewer ranks, or name a machine with --hardware."
            )
        asked += found
    return asked


def advise(
    request: AdviceRequest,
    asked: Sequence[Offer],
    *,
    search_one: SearchOne,
    num_processes: int,
    state: Path | None = None,
    ranks: Sequence[int] = (),
    on_progress: OnProgress,
    keep_interrupted: bool = False,
) -> Advice:
    """The machines ranked by time, and by cost per token where prices are given.

    Args:
        request: The model, the batch and the step.
        asked: Devices of machines to search.
        search_one: Answers for one of them, in other processes (spawned).
        num_processes: Searches at once.
        state: Every answer is written here as it comes, and read from here when the same is asked again.
        ranks: Numbers of devices that the user named, if any: ``asked`` came from them.
        on_progress: Told how many of ``asked`` are answered.
        keep_interrupted: Ctrl-C ends the sweep with the answers so far, if there are any.

    Raises FileError if ``state`` belongs to another request or is damaged, or cannot be written, and ProtwinError if a
    process was ended from outside.
    """
    known = _known(request, state)
    found = {one.key: known[one.key] for one in asked if one.key in known}
    missing = [one for one in asked if one.key not in found]
    # Seconds of other models, and factors, may be those of a machine of some name.
    is_known = known_model(request.model) is not None and not request.calibrations
    alike: dict[str, list[Offer]] = {}
    for one in missing:
        alike.setdefault(one.same_search if is_known else one.key, []).append(one)
    on_progress(len(found), len(asked))
    try:
        for first, answer in _answers(request, [ones[0] for ones in alike.values()], search_one, num_processes):
            for one in next(ones for ones in alike.values() if ones[0] is first):
                found[one.key] = known[one.key] = one.priced(answer)
            if state is not None:
                AdviceState(request=request.identity, answers=known).save(state)
            on_progress(len(found), len(asked))
    except KeyboardInterrupt:
        if not keep_interrupted or not found:
            raise
    return Advice(
        model=request.model,
        sequence_length=request.sequence_length,
        global_batch_size=request.global_batch,
        goal=request.goal,
        ranks=tuple(ranks),
        machines=tuple(sorted(found.values(), key=MachineAdvice.rank)),
        emulated=lowering_notes(request.options.compiled, request.options.float8),
        unanswered=tuple(dict.fromkeys(one.hardware.name for one in asked if one.key not in found)),
    )


def machine_key(hardware: Hardware) -> str:
    """Hash of a machine's description."""
    return hashlib.sha256(hardware.to_json().encode()).hexdigest()[:32]


def _known(request: AdviceRequest, state: Path | None) -> dict[str, MachineAdvice]:
    if state is None or not state.exists():
        return {}
    saved = AdviceState.load(state)
    if saved.request != request.identity:
        raise FileError(
            f"{state} holds answers to another question: another model, shape, global batch or release. "
            f"Name another file, or remove it to begin anew."
        )
    return dict(saved.answers)


def _answers(
    request: AdviceRequest, asked: Sequence[Offer], search_one: SearchOne, num_processes: int
) -> Iterator[tuple[Offer, MachineAdvice]]:
    """Answers as they come.  Ctrl-C ends all processes."""
    if not asked:
        return
    num_processes = min(num_processes, len(asked))
    if num_processes == 1:
        for one in asked:
            yield one, search_one(request, one)
        return
    with searching_processes(num_processes, advice=", and --state FILE to keep what is known") as pool:
        with interruptions_held():
            futures: dict[Future[MachineAdvice], Offer] = {pool.submit(search_one, request, one): one for one in asked}
        for future in as_completed(futures):
            yield futures[future], future.result()


def check_request(request: AdviceRequest, cache: Path | None, method: TrainingMethod | None = None) -> int:
    """Into how many micro-batches of the least size the global batch can be cut; ``cache``: as of ``search_machine``.

    ``method``: what the user calls it, None if nothing.  Raises ProtwinError if no machine could answer: the model is
    unknown, its shape missing, an option impossible, or the method another one.
    """
    StepSpec(max_gradient_norm=request.max_gradient_norm)
    if request.goal is Goal.LONGEST_SEQUENCE:
        if is_saved_workload(request.model):
            raise PlanError(
                f"{request.model} is a saved workload, whose sequences have one length. Name the model itself for the "
                f"longest ones."
            )
        if usual_shape(request.model)[1] is None:
            raise PlanError(f"{request.model} is trained on samples without tokens, of which none is the longest.")
    workload = check_method(request.smallest_workload(cache), request.model, method)
    check_optimizer(request.optimizer, workload.parameters)
    check_host_gradients(request.host_gradients, workload.parameters)
    tile_counts(request.space, workload)
    if request.num_tokens is not None and sequence_length_of(workload) is None:
        raise PlanError(f"{request.model} is trained on samples without tokens. Leave out the number of tokens.")
    return request.global_batch // request.least_samples


def search_machine(request: AdviceRequest, offer: Offer, *, cache: Path | None = None) -> MachineAdvice:
    """The best plan on some devices of a machine, or why there is none.

    The workload comes without torch where the model's family is shipped, and from ``cache`` otherwise, the folder of
    traced workloads; None: trace anew.
    """
    nothing = MachineAdvice(hardware_name=offer.hardware.name, price_usd_per_hour=None)
    try:
        found = _search(request, offer, cache)
    except ProtwinError as error:
        return offer.priced(nothing.model_copy(update={"reason": str(error)}))
    prediction = found.result.prediction
    bounds_s = [choice.shortest_possible_s for choice in found.choices if choice.shortest_possible_s is not None]
    best = {
        "tokens_per_s": prediction.num_tokens / prediction.iteration_s,
        "plan": found.result.plan,
        "question": prediction.question,
        "plan_kind": found.result.plan_kind,
        "survives": found.result.survives,
        "run": None if request.num_tokens is None else prediction.for_tokens(request.num_tokens).run,
        "factorisation": prediction.factorisation,
        "micro_batch_size": found.micro_batch_size,
        "iteration_s": prediction.iteration_s,
        "iteration_interval_s": prediction.iteration_interval_s,
        "num_tokens": prediction.num_tokens,
        "guaranteed_peak_device_bytes": prediction.guaranteed_peak_device_bytes,
        "is_certified": found.result.certificate.is_certified,
        "gap_frac": max(0.0, 1 - min(bounds_s) / prediction.iteration_s) if bounds_s else None,
    }
    if request.goal is Goal.LONGEST_SEQUENCE:
        length = None if prediction.question is None else prediction.question.sequence_length
        best |= {"longest_sequence": length, "limit": found.result.goal_words.partition("; ")[2]}
    return offer.priced(nothing.model_copy(update=best))


def _search(request: AdviceRequest, offer: Offer, cache: Path | None) -> BatchSearchResult:
    hardware, num_ranks = offer.hardware, offer.num_ranks
    is_longest = request.goal is Goal.LONGEST_SEQUENCE
    micro_batches = request.global_batch // num_ranks

    def at_length(length: int) -> Workload:
        tiles = replace(request.tiles, at_any_length=True)
        return replace(request, sequence_length=length, tiles=tiles).workload_at(1, cache, hardware.device)

    asked = SearchRequest(
        workload=at_length(SEQUENCE_STEP)
        if is_longest
        else GlobalBatch(
            num_samples=request.global_batch,
            workload_at=lambda size: request.workload_at(size, cache, hardware.device),
            micro_batch_sizes=saved_sizes(request.model, request.global_batch, num_ranks),
        ),
        hardware=hardware,
        calibration=request.calibration_of(hardware),
        space=request.space,
        device_budget_bytes=request.device_budget_bytes,
        margin_frac=request.margin_frac,
        step=Step(
            micro_batches=micro_batches if is_longest else 1,
            max_gradient_norm=request.max_gradient_norm,
            num_ranks=num_ranks,
            optimizer=request.optimizer,
            host_gradients=request.host_gradients,
        ),
        effort=Effort(max_replays=max(1, _MOST_WORK // micro_batches)),
    )
    if not is_longest:
        try:
            return search_batches(asked)
        except InfeasibleError:
            needed = replace(request, tiles=request.tiles.needed)
            tiled = None
            with suppress(ModuleNotFoundError):  # without torch nobody knows more tiles
                tiled = request.tiles.search_in_tiles(
                    asked, lambda size: needed.workload_at(size, cache, hardware.device)
                )
            if tiled is None:
                raise
            return search_batches(tiled)
    return search_goal(Goal.LONGEST_SEQUENCE, asked, Shapes(lambda size: request.workload_at(size, cache), at_length))
