"""What a search is for: the fastest plan, or the cheapest, the longest sequence, the largest batch, the least memory.

Every goal is answered by ordinary searches, each with its own certificate: the goal says which of them is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ...shared.answers.search_result import BatchSearchResult, Goal
from ...shared.basics.errors import HardwareError, InfeasibleError, PlanError, ProtwinError
from ...shared.basics.units import format_bytes
from ...shared.catalogue.list_prices import with_list_prices
from ...shared.catalogue.rank_share import rent_of_ranks
from ...shared.schema.plan import TrainingMethod
from ...shared.schema.workload import Workload
from ..searching.baselines import baselines
from ..searching.branch_and_bound import OnProgress
from ..searching.least_memory import least_device, some_plan_fits
from ..searching.problem import search_problem
from ..searching.request import GlobalBatch, SearchRequest
from ..searching.search import problems, search_batches
from ..searching.survival import SegmentRoom
from ..space.step_spec import SEVERAL
from ..space.tilings import WHOLE

SEQUENCE_STEP: Final = 128
"""Tokens by which sequences grow beyond their first 128: what kernels are tuned for."""
MOST_TOKENS: Final = 2**24
"""Longer sequences, and larger batches, are not looked at."""


@dataclass(frozen=True)
class Shapes:
    """The workloads of one model at other shapes; raises ProtwinError where the model has none."""

    at_batch: Callable[[int], Workload]
    at_length: Callable[[int], Workload]


def search_goal(
    goal: Goal,
    request: SearchRequest,
    shapes: Shapes | None = None,
    *,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
) -> BatchSearchResult:
    """The answer of ``request`` to ``goal``; errors as of ``search``.

    ``shapes``: for the longest sequence and the largest batch, in the place of the request's workload.  Raises
    PlanError if a goal lacks what it needs, HardwareError if there is no price to be cheapest by: neither the machine's
    own nor one of a public list.
    """
    if goal is Goal.FASTEST:
        return search_batches(request, on_progress=on_progress, keep_interrupted=keep_interrupted)
    if goal is Goal.CHEAPEST:
        return _cheapest(request, on_progress)
    if goal is Goal.LEAST_MEMORY:
        return _least_memory(request, on_progress)
    if shapes is None:
        raise PlanError(f"the goal {goal} asks about other shapes than that of a saved workload. Name a model instead.")
    if isinstance(request.workload, GlobalBatch):
        raise PlanError(f"the goal {goal} does not go with a global batch. Leave one of the two out.")
    if goal is Goal.LARGEST_BATCH:
        return _largest(goal, request, shapes.at_batch, 1, "samples per micro-batch", on_progress)
    return _largest(goal, request, shapes.at_length, SEQUENCE_STEP, "tokens per sample", on_progress)


def _said(found: BatchSearchResult, goal: Goal, words: str) -> BatchSearchResult:
    result = found.result.model_copy(update={"goal": goal, "goal_words": words})
    return found.model_copy(update={"result": result})


def _cheapest(request: SearchRequest, on_progress: OnProgress | None) -> BatchSearchResult:
    """Over numbers of ranks: all of the machine's, halved as often as possible; and one alone.

    Machines are rented whole: a device that idles is paid for as well.  One without a price costs what a public list
    said, if it is on one.
    """
    (hardware,), listed = with_list_prices([request.hardware])
    if hardware.price_usd_per_hour is None:
        raise HardwareError(
            f"{hardware.name} has no price, and no list that is known here has one for its devices, so nothing is "
            f"cheapest. Give one in US dollars an hour: --price {hardware.name}=2.50."
        )
    request = replace(request, hardware=hardware)
    wanted = request.step.num_ranks
    numbers = {1, hardware.num_devices, wanted}
    half = hardware.num_devices
    while half % 2 == 0:
        half //= 2
        numbers.add(half)
    found: dict[float, tuple[int, BatchSearchResult]] = {}
    reasons: list[ProtwinError] = []
    for num_ranks in sorted(numbers):
        asked = replace(request, step=replace(request.step, num_ranks=num_ranks, modes=SEVERAL))
        try:
            answer = search_batches(asked, on_progress=on_progress)
        except (PlanError, HardwareError) as error:
            reasons.append(error)
            continue
        rent = rent_of_ranks(hardware, num_ranks)
        assert rent is not None, "the machine has a price"
        found.setdefault(rent / answer.result.prediction.tokens_per_s, (num_ranks, answer))
    if not found:
        raise reasons[-1]
    num_ranks, answer = found[min(found)]
    others = ", ".join(f"{number:,}" for number, _ in (found[cost] for cost in sorted(found)[1:]))
    words = f"tokens cost least on {num_ranks:,} of {hardware.num_devices:,} devices"
    if listed:
        price = listed[0]
        words += f", at {price.usd_per_hour:.2f} USD an hour ({price.kind.words}, {price.words}; --price states yours)"
        answer = answer.model_copy(update={"result": answer.result.model_copy(update={"list_price": price})})
    return _said(answer, Goal.CHEAPEST, f"{words}; {others} cost more" if others else words)


def _least_memory(request: SearchRequest, on_progress: OnProgress | None) -> BatchSearchResult:
    """The fastest of the plans with the smallest guaranteed peak of all, also of those whose blocks' inputs travel."""
    request = _widest(request)
    least: int | None = None
    is_tiled = False
    for problem in problems(request):
        is_tiled |= problem.tiles != (WHOLE,)
        need = least_device(problem, problem.host_budget_bytes)
        if need is not None and (least is None or need.device_bytes < least):
            least = need.device_bytes
    if least is None or least > request.budgets_bytes()[0]:
        return search_batches(request, on_progress=on_progress)  # which says why nothing fits
    asked = replace(request, device_budget_bytes=least, baselines=None)
    answer = _beside_others(search_batches(asked, on_progress=on_progress), request)
    # Of blocks that learn from a teacher's nothing runs in tiles.
    is_whole = not is_tiled and answer.result.plan.method is not TrainingMethod.BYPASS
    which = " that runs MLPs and the loss whole" if is_whole else ""
    return _said(answer, Goal.LEAST_MEMORY, f"no plan{which} has a guaranteed device peak below {format_bytes(least)}")


def _beside_others(answer: BatchSearchResult, request: SearchRequest) -> BatchSearchResult:
    """``answer`` with the budgets and baselines of ``request``: a goal's own limit is no limit of the machine."""
    result = answer.result
    device_bytes, _ = request.budgets_bytes()
    told: dict[str, object] = {
        "device_budget_bytes": device_bytes,
        "prediction": result.prediction.asking(device_budget_bytes=device_bytes),
    }
    if request.baselines is not None:
        alike = {
            size: search_problem(
                request,
                workload,
                request.step.spec(
                    result.plan.parallel,
                    micro_batches,
                    result.plan.shard_ranks,
                    place=result.plan.projects_gradients_on,
                ),
                tiles=(WHOLE,),
            )
            for size, workload, micro_batches in request.micro_batches()
        }
        told["baselines"] = baselines(alike, SegmentRoom.of(request), result.plan, own=request.baselines)
    return answer.model_copy(update={"result": result.model_copy(update=told)})


def _largest(
    goal: Goal,
    request: SearchRequest,
    workload_at: Callable[[int], Workload],
    step: int,
    unit: str,
    on_progress: OnProgress | None,
) -> BatchSearchResult:
    """The largest multiple of ``step`` at which a plan fits and survives: doubled until none does, then halved."""
    reasons: dict[int, str] = {}

    def fits(size: int) -> bool:
        if size * step > MOST_TOKENS:
            reasons[size] = f"{MOST_TOKENS:,} are the most that are looked at"
            return False
        try:
            asked = replace(request, workload=workload_at(size * step))
            if _surviving_bytes(asked) is not None:
                return True
            reasons[size] = "no plan fits"
        except ProtwinError as error:
            reasons[size] = str(error)
        return False

    def answer_at(size: int) -> BatchSearchResult:
        return search_batches(replace(request, workload=workload_at(size * step)), on_progress=on_progress)

    if not fits(1):
        return answer_at(1)  # which says why
    largest = _last(fits, 1)
    answer = answer_at(largest)
    if answer.result.survives is False:
        answer = _leanest(replace(request, workload=workload_at(largest * step)), on_progress) or answer
    if answer.result.survives is False:
        found: dict[int, BatchSearchResult] = {}

        def survives(size: int) -> bool:
            found[size] = answer_at(size)
            return found[size].result.survives is not False

        low, high = 0, largest
        while high - low > max(1, largest // 64):
            middle = (low + high) // 2
            low, high = (middle, high) if survives(middle) else (low, middle)
        if low == 0:
            raise InfeasibleError(
                f"no plan for {step} {unit} survives the allocator's default settings. Lower --margin."
            )
        reasons[high], largest, answer = "none survives the allocator's default settings", low, found[low]
    following = min((size for size in reasons if size > largest), default=None)
    words = f"{largest * step:,} {unit}"
    if following is not None:
        words += f"; at {following * step:,}: {reasons[following]}"
    return _said(answer, goal, words)


def _surviving_bytes(request: SearchRequest) -> int | None:
    """The guaranteed peak of the leanest plan of some space that fits and survives; None if none does.

    Nobody has to search for that.
    """
    room = SegmentRoom.of(request)
    for problem in sorted(problems(_widest(request)), key=lambda one: one.least_activation_bytes):
        if not some_plan_fits(problem):
            continue
        need = least_device(problem, problem.host_budget_bytes)
        if need is not None and (room is None or room.holds(need.plan, problem)):
            return need.device_bytes
    return None


def _widest(request: SearchRequest) -> SearchRequest:
    return request.with_offloaded_inputs() if request.may_offload_inputs else request


def _leanest(request: SearchRequest, on_progress: OnProgress | None) -> BatchSearchResult | None:
    """The fastest plan that needs no more than the leanest that survives; None if there is none."""
    least_bytes = _surviving_bytes(request)
    if least_bytes is None:
        return None
    asked = replace(_widest(request), device_budget_bytes=least_bytes, baselines=None)
    return _beside_others(search_batches(asked, on_progress=on_progress), request)


def _last(fits: Callable[[int], bool], first: int) -> int:
    """The largest number for which ``fits`` holds, which it does for ``first``: at the next one it does not."""
    low, high = first, 2 * first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
