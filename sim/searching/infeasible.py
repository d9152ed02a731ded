"""Why no plan fits: which limit binds, by how much, which plan comes closest, and the smallest change that fits.

[Note: Smallest changes]
Device memory and host memory take each other's place: what is offloaded is on the host.  So there are up to three
smallest changes: the device's budget alone, the host's alone, and where even the smallest plan exceeds the device's,
both: the device's to what that plan needs, then the host's to the least with which a plan stays within it.  A plan
fits with each, and none does with a byte less.

Where the CPU is the device and no budget of the host was given, both lie in one memory, and a byte more for the device
is one less for the host; a host budget then comes about by a host with more memory.

Whether a disk of any size would hold what the host cannot is found by trying one: the rates of a disk change nothing of
which plans fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ...shared.basics.errors import InfeasibleError
from ...shared.basics.units import format_bytes, format_enough_bytes, parse_bytes
from ...shared.catalogue.parts import disk_names, disk_part
from ...shared.compile.compile import compile_schedule
from ...shared.schema.hardware import DeviceKind, Disk
from ...shared.schema.plan import Plan, TrainingMethod, mode_words
from ...shared.tables.memory import stays_sentence
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..memory.host import default_host_budget_bytes, memory_with_room
from .least_memory import Need, least_device, least_disk, least_host
from .problem import SearchProblem, search_problem
from .request import SearchRequest

_ROOMY: Final = Disk(name="any", capacity_bytes=2**60, read_bytes_per_s=1e9, write_bytes_per_s=1e9)


def explain_infeasible(problem: SearchProblem, changes: Changes | None = None) -> InfeasibleError:
    """The error that says why no plan of the space fits; ``changes``: what to do, other than the space's own."""
    changes = changes or smallest_changes(problem)
    return InfeasibleError(f"no plan fits{_why(problem)} {changes.sentence(problem)}{_others(problem)}")


def nothing_fits(problems: Sequence[SearchProblem]) -> InfeasibleError:
    """Why no plan fits in any of the modes that ``problems`` are about.

    Tells about the mode that asks for the least, and the smallest changes with which a plan of any mode fits.
    """
    if problems[0].step.num_ranks == 1:
        return explain_infeasible(problems[0])
    changes = {_mode_of(problem): smallest_changes(problem) for problem in problems}

    def need(problem: SearchProblem) -> tuple[float, tuple[int, int]]:
        change = changes[_mode_of(problem)]
        return (inf if change.device_bytes is None else change.device_bytes), change.both_bytes

    least = min(reversed(problems), key=need)
    reason = explain_infeasible(least, least_of(changes.values()))
    others = " or ".join(mode for mode in changes if mode != _mode_of(least))
    return InfeasibleError(
        f"in mode {_mode_of(least)} on each of {least.step.num_ranks} ranks"
        f"{f', nor in {others}' if others else ''}: {reason}"
    )


def _mode_of(problem: SearchProblem) -> str:
    return mode_words(problem.step.parallel, problem.step.shard_ranks)


@dataclass(frozen=True)
class Changes:
    """The smallest changes of the budgets with which a plan fits; see [Note: Smallest changes]."""

    device_bytes: int | None
    """The device's budget, if that alone is enough."""
    host_bytes: int | None
    """The host's, if that alone is enough."""
    both_bytes: tuple[int, int]
    """The device's and the host's; the device's is at least what it is."""

    def sentence(self, problem: SearchProblem) -> str:
        """What to do, in words."""
        device, host = self.both_bytes
        ways = []
        if self.host_bytes is not None:
            ways.append(f"the host budget to {_enough(self.host_bytes)}{_as_memory(problem, self.host_bytes)}")
        elif device != self.device_bytes:
            ways.append(
                f"the device budget to {_enough(device)} and the host budget to {_enough(host)}"
                f"{_as_memory(problem, host, device)}"
            )
        if self.device_bytes is not None:
            alone = " alone" if ways and self.host_bytes is None else ""
            ways.append(f"the device budget{alone} to {_enough(self.device_bytes)}")
        is_more = self.device_bytes is None or self.device_bytes > problem.device_budget_bytes
        return f"{'Raise' if is_more else 'Set'} {', or '.join(ways)}"


def least_of(found: Iterable[Changes]) -> Changes:
    """The smallest changes with which a plan of any of several spaces fits."""
    found = list(found)
    return Changes(
        min((one.device_bytes for one in found if one.device_bytes is not None), default=None),
        min((one.host_bytes for one in found if one.host_bytes is not None), default=None),
        min(one.both_bytes for one in found),
    )


def smallest_changes(problem: SearchProblem) -> Changes:
    """What makes some plan fit where none does."""
    smallest = least_device(problem)
    assert smallest is not None, "a space holds a plan"
    device_bytes = max(problem.device_budget_bytes, smallest.device_bytes)
    alone = _device_alone(problem, smallest.device_bytes) if _is_one_memory(problem) else _closest(problem)
    within = least_host(problem, device_bytes)
    assert within is not None, "the smallest plan is within this"
    is_host_enough = device_bytes == problem.device_budget_bytes and not problem.is_shared
    host_alone = within.host_bytes if is_host_enough else None
    device_alone = None if alone is None else alone.device_bytes
    return Changes(device_alone, host_alone, (device_bytes, within.host_bytes))


def _closest(problem: SearchProblem) -> Need | None:
    return least_device(problem, problem.host_budget_bytes)


def _is_one_memory(problem: SearchProblem) -> bool:
    return problem.hardware.device.kind is DeviceKind.CPU and not problem.is_host_budget_given


def _device_alone(problem: SearchProblem, least_bytes: int) -> Need | None:
    """The plan of the smallest device budget that fits beside what is then left of the one memory for the host.

    What plans need of the device grows as the host's share shrinks, so that the first budget which its own need does
    not exceed is the smallest.
    """
    budget_bytes = least_bytes
    while True:
        left_bytes = default_host_budget_bytes(problem.hardware, budget_bytes)
        need = least_device(problem, left_bytes)
        if need is None or need.device_bytes <= budget_bytes:
            return need
        budget_bytes = need.device_bytes


# -- words -----------------------------------------------------------------------------------------------------------


def _why(problem: SearchProblem) -> str:
    """Facts, on the first line which memory is too small and by how much, the host's first; then the closest plans."""
    host, device = problem.host_budget_bytes, problem.device_budget_bytes
    closest, smallest = _closest(problem), least_device(problem)
    assert smallest is not None
    within = least_host(problem) if closest is None else least_host(problem, max(device, smallest.device_bytes))
    assert within is not None
    is_host_short = closest is None or closest.device_bytes != smallest.device_bytes
    is_device_short = smallest.device_bytes > device
    lacks, memories = [], []
    if is_host_short:
        memories.append("host")
        lacks.append(_lack("host memory", within.host_bytes, host, f"host {problem.hardware.host.name}"))
    if is_device_short:
        memories.append("device")
        lacks.append(_lack("device memory", smallest.device_bytes, device, problem.hardware.device.name))
    nearest = within if is_host_short else smallest
    words = f", for {' and '.join(memories)} memory {'is' if len(memories) == 1 else 'are'} too small: "
    words += f"{problem.workload.model_name} needs {', and '.join(lacks)} ({_knobs(nearest.plan)})."
    if is_host_short:
        words += " The host would hold offloaded parameters, gradients and optimizer state."
    if is_device_short:
        words += f" {_what_stays(problem, smallest.plan)}"
    if is_host_short and closest is not None:
        words += (
            f" Within the host's budget the closest plan needs {format_bytes(closest.device_bytes)} of device memory, "
            f"{format_bytes(closest.device_bytes - device)} more than the budget of {format_bytes(device)} "
            f"({_knobs(closest.plan)})."
        )
    return words


def _lack(memory: str, need_bytes: int, budget_bytes: int, owner: str) -> str:
    return (
        f"{format_bytes(need_bytes)} of {memory} but the budget of {owner} is {format_bytes(budget_bytes)}, "
        f"{format_bytes(need_bytes - budget_bytes)} too little"
    )


def _what_stays(problem: SearchProblem, plan: Plan) -> str:
    """What of the least peak cannot leave the device, by name: what any two micro-batches work on is that of all."""
    few = plan.model_copy(update={"micro_batches": min(2, plan.micro_batches)})
    schedule = compile_schedule(few, problem.workload, policies=problem.method.policies)
    return stays_sentence(schedule, guaranteed_device_peak(schedule))


def _others(problem: SearchProblem) -> str:
    """What else may help: less activations, where the rest fits, and more of the space."""
    ways = []
    if _rest_bytes(problem) < problem.device_budget_bytes:
        ways.append("a smaller batch or a shorter sequence")
    if problem.is_restricted:
        ways.append("more of the space than was allowed")
    return f"; {' or '.join(ways)} may fit too." if ways else "."


def _rest_bytes(problem: SearchProblem) -> int:
    """The least that plans within the host's budget hold of the device besides activations; the budget without any."""
    needs = (
        int(layout.table.static_device_bytes(layout.prefixes, problem.workload.resident_bytes)[is_within].min())
        for index, layout in enumerate(problem.layouts)
        for trips, _ in layout.grid.modes.groups
        if (is_within := problem.host_bytes(index, layout.prefixes, trips) <= problem.host_budget_bytes).any()
    )
    return min(needs, default=problem.device_budget_bytes)


def _knobs(plan: Plan) -> str:
    size = format_bytes(plan.chunk_bytes).replace(" ", "")
    shown = size if parse_bytes(size) == plan.chunk_bytes else str(plan.chunk_bytes)
    return (
        f"chunk_bytes = {shown}, n_persist = {plan.n_persist}, "
        f"{f'n_host_stepped = {plan.n_host_stepped}, ' if plan.n_host_stepped else ''}"
        f"{f'n_shard = {plan.n_shard}, ' if plan.n_shard else ''}{_knobs_of_disk(plan)}n_buffer = {plan.n_buffer}, "
        f"prefetch_depth = {plan.prefetch_depth}"
        f"{f', n_checkpoint = {plan.n_checkpoint}' if plan.method is not TrainingMethod.BYPASS else ''}"
        f"{f', n_swap = {plan.n_swap}' if plan.n_swap else ''}"
        f"{f', n_offload_input = {plan.n_offload_input}' if plan.n_offload_input else ''}"
        f"{f', mlp_tiles = {plan.mlp_tiles}' if plan.mlp_tiles > 1 else ''}"
        f"{f', loss_tiles = {plan.loss_tiles}' if plan.loss_tiles > 1 else ''}"
    )


def _knobs_of_disk(plan: Plan) -> str:
    knobs = {"n_disk_state": plan.n_disk_state, "n_disk": plan.n_disk, "n_staging": plan.n_staging}
    return "".join(f"{knob} = {number}, " for knob, number in knobs.items() if number)


def _enough(size_bytes: int) -> str:
    return f"{format_enough_bytes(size_bytes)} ({size_bytes} bytes)"


def _as_memory(problem: SearchProblem, host_bytes: int, device_bytes: int | None = None) -> str:
    """The memory of a host that has such a budget by itself, where no budget was given; of all ranks that share it."""
    if problem.is_host_budget_given:
        return ""
    kind = problem.hardware.device.kind
    if kind is DeviceKind.CPU:
        host_bytes += problem.device_budget_bytes if device_bytes is None else device_bytes
    num_sharing = round(problem.together.host.memory_bytes / problem.hardware.host.memory_bytes)
    for_all = f" for {num_sharing} ranks" if num_sharing > 1 else ""
    return f", which a host with {_enough(num_sharing * memory_with_room(host_bytes, kind))} of memory{for_all} has"


# -- a disk ----------------------------------------------------------------------------------------------------------


def need_of_disk(request: SearchRequest) -> Need | None:
    """The plan of one rank that has the least on a disk, of those within both budgets, whatever room the disk has.

    Without the margin, which a search falls back on.  None if no disk is enough, or none may be used.
    """
    disk = request.hardware.disk
    roomy = _ROOMY if disk is None else disk.model_copy(update={"capacity_bytes": _ROOMY.capacity_bytes})
    asked = replace(request, hardware=request.hardware.model_copy(update={"disk": roomy}))
    if request.margin_frac and request.device_budget_bytes is None:
        asked = replace(asked, margin_frac=0.0)
    asked = asked.with_disk() if asked.may_use_disk else asked
    return None if asked.space.names_disk else least_disk(search_problem(asked))


def with_advice_on_disk(error: InfeasibleError, request: SearchRequest) -> InfeasibleError:
    """``error``, why no plan of ``request`` fits, with the disk that would help, if one would."""
    need = need_of_disk(request)
    if need is None:
        return error
    disk = request.hardware.disk
    enough = format_enough_bytes(need.disk_bytes)
    if disk is None:
        large = [one for one in map(disk_part, disk_names()) if one.capacity_bytes >= need.disk_bytes]
        least = min(large, key=lambda one: (one.capacity_bytes, one.name), default=None)
        how = "--set disk=NAME" if least is None else f"such as --set disk={least.name}"
        return InfeasibleError(
            f"{error} Or keep {enough} on a disk, which the machine lacks: a plan fits then ({how})."
        )
    return InfeasibleError(
        f"{error} Or keep {enough} on the disk {disk.name}, which has {format_bytes(disk.capacity_bytes)} for files: a "
        f"plan fits then (--set disk.capacity_bytes={need.disk_bytes})."
    )
