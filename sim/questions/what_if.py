"""What other machines would change: a search for each changed part, and the largest batch with which a plan fits.

Every answer is a search of its own, certified like any other.  Of several ranks it is a search over all modes that are
allowed, and at a global batch over all sizes of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...shared.answers.search_result import WhatIf
from ...shared.basics.errors import HardwareError, PlanError
from ...shared.basics.units import format_bytes
from ...shared.schema.hardware import Hardware
from ...shared.schema.workload import Workload
from ..searching.branch_and_bound import OnProgress
from ..searching.least_memory import some_plan_fits
from ..searching.problem import search_problem
from ..searching.request import GlobalBatch, SearchRequest
from ..searching.search import search
from ..space.step_spec import SEVERAL
from .faster_parts import faster_device, faster_device_links, faster_host, faster_links, faster_network
from .what_if_methods import tokens_per_step

USUAL: Final = "usual"
"""Names the usual questions where a question is asked for by name."""
_MEMORY_STEP_BYTES: Final = 2 * 2**30


@dataclass(frozen=True)
class Question:
    """A machine as it might be."""

    change: str
    """In words: ``"2 GiB more device memory"``."""
    request: SearchRequest
    """The search on that machine, with both budgets."""


def ask(
    request: SearchRequest,
    change: str,
    hardware: Hardware,
    *,
    num_ranks: int | None = None,
    more_device_bytes: int = 0,
    host_bytes: int | None = None,
) -> Question:
    """The question of ``request`` on another machine, with the request's budgets or else what a rank has there.

    Args:
        request: The search as things are.
        change: The difference, in words.
        hardware: The machine as it might be.
        num_ranks: Ranks then; as many as now if None.
        more_device_bytes: Added to the device's memory and to the device budget.
        host_bytes: Takes the place of the host budget.

    Raises HardwareError if the ranks do not fit the machine.
    """
    step = request.step if num_ranks is None else replace(request.step, num_ranks=num_ranks)
    if more_device_bytes:
        memory_bytes = max(1, hardware.device.memory_bytes + more_device_bytes)
        device = hardware.device.model_copy(update={"memory_bytes": memory_bytes})
        hardware = hardware.model_copy(update={"device": device})
    changed = replace(request, hardware=hardware, step=step)
    device_bytes, own_host_bytes = changed.budgets_bytes()
    changed = replace(
        changed,
        device_budget_bytes=device_bytes + (more_device_bytes if request.device_budget_bytes is not None else 0),
        host_budget_bytes=own_host_bytes if host_bytes is None else host_bytes,
    )
    return Question(change, changed)


def what_if(
    request: SearchRequest,
    iteration_s: float,
    asked: Sequence[Question] | None = None,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[WhatIf, ...]:
    """Answers to ``asked``, or to the usual questions about ``request``.

    ``iteration_s``: seconds of the best plan's iteration as things are.
    """
    asked = list(questions(request)) if asked is None else asked
    tokens_now = tokens_per_step(request) if asked else 0.0
    answers = []
    for number, question in enumerate(asked):
        on_progress(number, len(asked))
        try:
            # An answer of one figure: nothing stands beside it.
            found = search(replace(question.request, baselines=None)).prediction
            speedup = iteration_s / found.iteration_s * (tokens_per_step(question.request) / tokens_now)
            answers.append(
                WhatIf(
                    change=question.change,
                    iteration_s=found.iteration_s,
                    iteration_interval_s=found.iteration_interval_s,
                    speedup=speedup,
                )
            )
        except PlanError as error:
            answers.append(WhatIf(change=question.change, iteration_s=None, speedup=None, reason=str(error)))
    on_progress(len(asked), len(asked))
    return tuple(answers)


def questions(request: SearchRequest) -> Iterator[Question]:
    """Two GiB of device memory more and less, twice and half the host memory, and each part twice as fast.

    Of several ranks also the links that join them, and their number.  A part whose speed cannot show is left out: the
    device's where the workload's seconds were measured.
    """
    device_bytes, host_bytes = request.budgets_bytes()
    as_now = replace(request, device_budget_bytes=device_bytes, host_budget_bytes=host_bytes)
    yield from _other_memory(as_now)
    yield from _faster_parts(as_now)
    if request.step.num_ranks > 1:
        yield from _other_ranks(request)


def _faster_parts(request: SearchRequest) -> Iterator[Question]:
    box, num_ranks = request.hardware, request.step.num_ranks
    yield ask(
        request, "links twice as fast" if num_ranks == 1 else "links to the host twice as fast", faster_links(box)
    )
    if num_ranks > 1:
        if box.node is not None and box.node.device_link is not None:
            yield ask(request, "links between devices twice as fast", faster_device_links(box))
        if box.network is not None and num_ranks > box.devices_per_node:
            yield ask(request, "a network twice as fast", faster_network(box))
    yield ask(request, "twice the cores and host memory bandwidth", faster_host(box))
    if request.smallest_workload().measured_on != box.name:
        yield ask(request, "a device twice as fast", faster_device(box))


def _other_memory(request: SearchRequest) -> Iterator[Question]:
    box, size_bytes = request.hardware, _MEMORY_STEP_BYTES
    device_bytes, host_bytes = request.budgets_bytes()
    yield ask(request, f"{format_bytes(size_bytes)} more device memory", box, more_device_bytes=size_bytes)
    if device_bytes > size_bytes:
        yield ask(request, f"{format_bytes(size_bytes)} less device memory", box, more_device_bytes=-size_bytes)
    yield ask(request, "twice the host memory", box, host_bytes=2 * host_bytes)
    yield ask(request, "half the host memory", box, host_bytes=host_bytes // 2)


def _other_ranks(request: SearchRequest) -> Iterator[Question]:
    """Twice and half as many ranks, where there are devices for them and the global batch can be shared."""
    num_ranks = request.step.num_ranks
    wanted = [("twice the ranks", 2 * num_ranks)]
    if num_ranks % 2 == 0:
        wanted.append(("half the ranks", num_ranks // 2))
    for words, number in wanted:
        try:
            check_batch_of(request, number)
            box = machine_with_room(request.hardware, number)
            yield ask(request, f"{words}: {number:,}", box, num_ranks=number)
        except (HardwareError, PlanError):
            continue  # nobody has asked for a machine without room, or for a batch that cannot be shared


def check_batch_of(request: SearchRequest, num_ranks: int) -> None:
    """Raise PlanError if the request has a global batch that so many ranks cannot share evenly."""
    if isinstance(request.workload, GlobalBatch):
        request.workload.sizes(num_ranks)


def machine_with_room(hardware: Hardware, num_ranks: int) -> Hardware:
    """The machine with as many more nodes as so many ranks need; as it is if they fit, or if no network joins nodes."""
    network = hardware.network
    if network is None or num_ranks <= hardware.num_devices:
        return hardware
    nodes = -(-num_ranks // hardware.devices_per_node)
    return hardware.model_copy(update={"network": network.model_copy(update={"num_nodes": nodes})})


def largest_batch(
    request: SearchRequest,
    workload_at: Callable[[int], Workload],
    untraced_at: Callable[[int], Workload | None] = lambda size: None,
) -> int | None:
    """The largest batch below the request's with which some plan fits, in samples; None if none does.

    By halving the range, one is found that fits while the next larger one does not.  Where not even a single sample
    fits, no batch is asked about beside it.

    Args:
        request: In which no plan fits.
        workload_at: The workload at a batch of this number of samples.
        untraced_at: The same as far as it is known without a trace, which may know fewer tiles, or None.  Where some
            plan of it fits, ``workload_at`` is not asked.
    """

    def fits(size: int) -> bool:
        known = untraced_at(size)
        if known is not None and _fits(request, known):
            return True
        workload = workload_at(size)
        return workload != known and _fits(request, workload)

    lower, upper = 0, request.smallest_workload().num_samples
    if upper > 1 and not fits(1):
        return None
    lower = 1
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle)
    return lower if lower < upper else None


def fewest_ranks(request: SearchRequest) -> int | None:
    """How many more devices of the machine let some plan fit: the least of twice as many, and so on; None if none do.

    Each rank trains on as much as before.
    """
    num_ranks, num_devices = request.step.num_ranks, request.hardware.num_devices
    while num_ranks < num_devices:
        num_ranks = min(2 * num_ranks, num_devices)
        step = replace(request.step, num_ranks=num_ranks, modes=SEVERAL)
        if _fits(replace(request, step=step)):
            return num_ranks
    return None


def _fits(request: SearchRequest, workload: Workload | None = None) -> bool:
    """Whether some plan fits in one of all that a search tries in turn; ``workload``: the request's if None."""
    return any(some_plan_fits(search_problem(asked, workload)) for asked in request.tries)
