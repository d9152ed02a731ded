"""What other machines would change: a search for each changed part, and the largest batch with which a plan fits.

Every answer is a search of its own, certified like any other.  Of several ranks it is a search over all modes that are
allowed, and at a global batch over all sizes of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...shared.basics.errors import HardwareError, PlanError
from ...shared.basics.units import format_bytes
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware, Link
from ...shared.schema.plan import ParallelMode
from ...shared.schema.search_result import SearchResult, WhatIf
from ...shared.schema.workload import Workload
from ..memory.rank_memory import rank_device_bytes
from ..searching.batch_search import WorkloadAt, batch_sizes, search_batches
from ..searching.branch_and_bound import OnProgress
from ..searching.least_memory import least_device
from ..searching.problem import SearchProblem, default_host_budget_bytes, search_problem
from ..searching.rank_search import MODES, search_ranks
from ..searching.search import search
from ..space.space import SearchSpace
from ..space.step_spec import StepSpec

_MEMORY_STEP_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Question:
    """A machine as it might be."""

    change: str
    hardware: Hardware
    device_budget_bytes: int
    """Of one rank, like the host's."""
    host_budget_bytes: int
    num_ranks: int = 1


@dataclass(frozen=True)
class Batches:
    """A global batch, whose micro-batches may have several sizes."""

    workload_at: WorkloadAt
    global_batch: int
    micro_batch_sizes: tuple[int, ...] | None = None
    """Those to look through; None for all."""

    def check(self, num_ranks: int) -> None:
        """Raise PlanError unless so many ranks can share it evenly."""
        batch_sizes(self.global_batch, self.micro_batch_sizes, num_ranks)


@dataclass(frozen=True)
class Setting:
    """What is searched, whatever the machine."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration | None = None
    device_budget_bytes: int | None = None
    """Of one rank, like the host's."""
    host_budget_bytes: int | None = None
    space: SearchSpace | None = None
    rule: StepSpec = field(default_factory=StepSpec)
    """Of the best plan as things are."""
    tolerance_frac: float = 0.005
    modes: Sequence[ParallelMode] = MODES
    """What several ranks may do together."""
    batches: Batches | None = None
    """Where there is a global batch: several ranks may divide it in another way than the best plan does."""

    @property
    def num_ranks(self) -> int:
        """As things are."""
        return self.rule.num_ranks

    def problem(self, workload: Workload | None = None, rule: StepSpec | None = None) -> SearchProblem:
        """The search's tables; ``workload`` and ``rule``: instead of the setting's."""
        return search_problem(
            workload or self.workload,
            self.hardware,
            self.calibration,
            device_budget_bytes=self.device_budget_bytes,
            host_budget_bytes=self.host_budget_bytes,
            space=self.space,
            rule=rule or self.rule,
        )

    def budgets(self, hardware: Hardware, num_ranks: int) -> tuple[int, int]:
        """Device and host memory of each rank on a machine: what was asked for, else what it has."""
        device_bytes, host_bytes = self.device_budget_bytes, self.host_budget_bytes
        if device_bytes is None:
            device_bytes = rank_device_bytes(hardware, num_ranks)
        if host_bytes is None:
            of_rank = hardware if num_ranks == 1 else machine_of_rank(hardware, num_ranks)
            host_bytes = default_host_budget_bytes(of_rank, device_bytes)
        return device_bytes, host_bytes

    def question(self, change: str, hardware: Hardware, num_ranks: int | None = None) -> Question:
        """A question about so many ranks, as many as there are if None.  Raises HardwareError if they do not fit."""
        num_ranks = num_ranks or self.num_ranks
        return Question(change, hardware, *self.budgets(hardware, num_ranks), num_ranks)

    def iteration_s(self, question: Question) -> float:
        """Seconds of the best plan's iteration.  Raises InfeasibleError if none fits."""
        return self._search(question).prediction.iteration_s

    def num_times_samples(self, num_ranks: int) -> float:
        """How many times as many samples so many ranks get through in a step as those of now do."""
        return 1.0 if self.batches is not None else num_ranks / self.num_ranks

    def _search(self, question: Question) -> SearchResult:
        num_ranks, batches = question.num_ranks, self.batches
        asked: dict[str, Any] = {
            "device_budget_bytes": question.device_budget_bytes,
            "host_budget_bytes": question.host_budget_bytes,
            "space": self.space,
            "max_gradient_norm": self.rule.max_gradient_norm,
            "tolerance_frac": self.tolerance_frac,
        }
        if batches is not None and num_ranks > 1:
            from ..searching.rank_batches import search_rank_batches

            return search_rank_batches(
                batches.workload_at,
                batches.global_batch,
                question.hardware,
                self.calibration,
                num_ranks=num_ranks,
                parallel=self.modes,
                micro_batch_sizes=batches.micro_batch_sizes,
                **asked,
            ).result
        if batches is not None and self.num_ranks > 1:
            return search_batches(
                batches.workload_at,
                batches.global_batch,
                question.hardware,
                self.calibration,
                micro_batch_sizes=batches.micro_batch_sizes,
                **asked,
            ).result
        asked["micro_batches"] = self.rule.micro_batches
        if num_ranks > 1:
            machine = (question.hardware, self.calibration)
            return search_ranks(self.workload, *machine, num_ranks=num_ranks, parallel=self.modes, **asked)
        return search(self.workload, question.hardware, self.calibration, **asked)


def what_if(
    setting: Setting,
    iteration_s: float,
    asked: Sequence[Question] | None = None,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[WhatIf, ...]:
    """Answers to what is asked, or to the usual questions; ``iteration_s`` is that of the best plan as things are."""
    asked = list(questions(setting)) if asked is None else asked
    answers = []
    for number, question in enumerate(asked):
        on_progress(number, len(asked))
        try:
            found_s = setting.iteration_s(question)
            speedup = iteration_s / found_s * setting.num_times_samples(question.num_ranks)
            answers.append(WhatIf(change=question.change, iteration_s=found_s, speedup=speedup))
        except PlanError as error:
            answers.append(WhatIf(change=question.change, iteration_s=None, speedup=None, reason=str(error)))
    on_progress(len(asked), len(asked))
    return tuple(answers)


def questions(setting: Setting) -> Iterator[Question]:
    """Two GiB of device memory more and less, twice and half the host memory, and each part twice as fast.

    Of several ranks also what joins them, and how many they are.  A part whose speed cannot show is left out: that of
    the device where the workload's seconds were measured.
    """
    box, num_ranks = setting.hardware, setting.num_ranks
    device_bytes, host_bytes = setting.budgets(box, num_ranks)

    def asked(change: str, hardware: Hardware = box, more_device_bytes: int = 0, host: int = host_bytes) -> Question:
        return Question(change, hardware, device_bytes + more_device_bytes, host, num_ranks)

    step = format_bytes(_MEMORY_STEP_BYTES)
    yield asked(f"{step} more device memory", more_device_bytes=_MEMORY_STEP_BYTES)
    if device_bytes > _MEMORY_STEP_BYTES:
        yield asked(f"{step} less device memory", more_device_bytes=-_MEMORY_STEP_BYTES)
    yield asked("twice the host memory", host=2 * host_bytes)
    yield asked("half the host memory", host=host_bytes // 2)
    yield asked("links twice as fast" if num_ranks == 1 else "links to the host twice as fast", _faster_links(box))
    if num_ranks > 1:
        if box.node is not None and box.node.device_link is not None:
            yield asked("links between devices twice as fast", _with_node(box, device_link=box.node.device_link))
        if box.network is not None and num_ranks > box.devices_per_node:
            faster_network = box.network.model_copy(update={"link": _twice_as_fast(box.network.link)})
            yield asked("a network twice as fast", box.model_copy(update={"network": faster_network}))
    faster_host = box.host.model_copy(
        update={
            "num_cores": 2 * box.host.num_cores,
            "memory_bandwidth_bytes_per_s": 2 * box.host.memory_bandwidth_bytes_per_s,
            "adam_bytes_per_s": None if box.host.adam_bytes_per_s is None else 2 * box.host.adam_bytes_per_s,
        }
    )
    yield asked("twice the cores and host memory bandwidth", box.model_copy(update={"host": faster_host}))
    if setting.workload.measured_on != box.name:
        device = box.device
        faster_device = device.model_copy(
            update={
                "peak_flop_per_s": {dtype: 2 * peak for dtype, peak in device.peak_flop_per_s.items()},
                "vector_flop_per_s": 2 * device.vector_flop_per_s,
                "memory_bandwidth_bytes_per_s": 2 * device.memory_bandwidth_bytes_per_s,
            }
        )
        yield asked("a device twice as fast", box.model_copy(update={"device": faster_device}))
    if num_ranks > 1:
        yield from _other_ranks(setting)


def _other_ranks(setting: Setting) -> Iterator[Question]:
    """Twice and half as many ranks, where there are devices for them and the global batch can be shared."""
    num_ranks = setting.num_ranks
    wanted = [("twice the ranks", 2 * num_ranks)]
    if num_ranks % 2 == 0:
        wanted.append(("half the ranks", num_ranks // 2))
    for words, number in wanted:
        try:
            if setting.batches is not None:
                setting.batches.check(number)
            box = machine_with_room(setting.hardware, number)
            yield setting.question(f"{words}: {number:,}", box, number)
        except (HardwareError, PlanError):
            continue  # nobody has asked for a machine without room, or for a batch that cannot be shared


def machine_with_room(hardware: Hardware, num_ranks: int) -> Hardware:
    """The machine with as many more nodes as so many ranks need; as it is if they fit, or if no network joins nodes."""
    network = hardware.network
    if network is None or num_ranks <= hardware.num_devices:
        return hardware
    nodes = -(-num_ranks // hardware.devices_per_node)
    return hardware.model_copy(update={"network": network.model_copy(update={"num_nodes": nodes})})


def _faster_links(box: Hardware) -> Hardware:
    """Both ways to the host twice as fast, and what devices share of them."""
    links = {name: _twice_as_fast(getattr(box, name)) for name in ("host_to_device", "device_to_host")}
    faster = box.model_copy(update=links)
    if box.node is None:
        return faster
    root = box.node.root_bandwidth_bytes_per_s
    faster = faster.model_copy(
        update={"node": box.node.model_copy(update={"root_bandwidth_bytes_per_s": None if root is None else 2 * root})}
    )
    return faster if box.node.host_path is None else _with_node(faster, host_path=box.node.host_path)


def _with_node(box: Hardware, **links: Link) -> Hardware:
    """The machine with these links of its node twice as fast."""
    assert box.node is not None
    faster = {name: _twice_as_fast(link) for name, link in links.items()}
    return box.model_copy(update={"node": box.node.model_copy(update=faster)})


def _twice_as_fast(link: Link) -> Link:
    table = tuple(point.model_copy(update={"seconds": point.seconds / 2}) for point in link.table)
    return link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s, "table": table})


def largest_batch(setting: Setting, workload_at: Callable[[int], Workload]) -> int | None:
    """The largest batch below the setting's with which some plan fits, in samples; None if none does.

    ``workload_at``: the workload at a batch of so many samples.  By halving the range, one is found that fits while
    the next larger one does not.
    """
    fits, fails = 0, setting.workload.num_samples
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(setting.problem(workload_at(middle))) else (fits, middle)
    return fits or None


def fewest_ranks(setting: Setting) -> int | None:
    """How many more devices of the machine let some plan fit: the least of twice as many, and so on; None if none do.

    Each rank trains on as much as before.
    """
    num_ranks, num_devices = setting.num_ranks, setting.hardware.num_devices
    while num_ranks < num_devices:
        num_ranks = min(2 * num_ranks, num_devices)
        if _fits(setting.problem(rule=replace(setting.rule, num_ranks=num_ranks, parallel=MODES[-1]))):
            return num_ranks
    return None


def _fits(problem: SearchProblem) -> bool:
    least = least_device(problem, problem.host_budget_bytes)
    return least is not None and least.device_bytes <= problem.device_budget_bytes
