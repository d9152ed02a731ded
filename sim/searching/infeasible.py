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
from math import gcd, inf
from typing import Final

from ...shared.basics.errors import InfeasibleError
from ...shared.basics.units import format_bytes, format_enough_bytes, parse_bytes
from ...shared.catalogue.models import known_model, model_configuration
from ...shared.catalogue.parts import disk_names, disk_part
from ...shared.compile.compile import compile_schedule
from ...shared.phases.operations import OperationClass
from ...shared.phases.sequence_sharing import why_not_shared
from ...shared.phases.tiling import LossHead
from ...shared.records.question import sequence_length_of
from ...shared.schema.hardware import DeviceKind, Disk
from ...shared.schema.plan import Plan, TrainingMethod, mode_words
from ...shared.tables.memory import stays_sentence
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..memory.host import default_host_budget_bytes, memory_with_room
from .least_memory import Need, least_device, least_disk, least_host, some_plan_fits
from .problem import SearchProblem, search_problem
from .request import SearchRequest

_ATTENTION: Final = OperationClass.ATTENTION
_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of models with the loss of causal language."""
_ROOMY: Final = Disk(name="any", capacity_bytes=2**60, read_bytes_per_s=1e9, write_bytes_per_s=1e9)


def explain_infeasible(
    problem: SearchProblem, changes: Changes | None = None, modes: Sequence[str] = ()
) -> InfeasibleError:
    """The error that says why no plan of the space fits.

    ``changes``: what to do, other than the space's own; ``modes``: all that were searched, that of ``problem`` first.
    """
    changes = changes or smallest_changes(problem)
    where, who = "", problem.workload.model_name
    if modes:
        where = f" on {problem.step.num_ranks:,} ranks in mode{'s'[: len(modes) - 1]} {_either(sorted(modes))}"
        who = f"{f'in mode {modes[0]}, which lacks the least, ' if len(modes) > 1 else ''}each rank of {who}"
    words = f"no plan fits{where}{_why(problem, who)} {changes.sentence(problem)}{_others(problem)}"
    return InfeasibleError(words)


def shortage(problem: SearchProblem) -> str:
    """In a clause, what even the leanest plans lack; empty where some plan fits."""
    lacking = [] if some_plan_fits(problem) else _lacking(problem)
    return ", and ".join(
        f"needs at least {format_bytes(one.need_bytes)} of {one.memory} memory, {format_bytes(one.short_bytes)} more "
        f"than the budget of {format_bytes(one.budget_bytes)}"
        for one in lacking
    )


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
    others = [mode for mode in changes if mode != _mode_of(least)]
    return explain_infeasible(least, least_of(changes.values()), [_mode_of(least), *others])


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


@dataclass(frozen=True)
class _Lack:
    """A memory that is too small for every plan."""

    memory: str
    need_bytes: int
    budget_bytes: int
    owner: str
    plan: Plan
    """One that needs no more."""

    @property
    def short_bytes(self) -> int:
        """How much more is needed than there is."""
        return self.need_bytes - self.budget_bytes

    @property
    def words(self) -> str:
        """What is needed, and by how much that is too much."""
        return (
            f"{format_bytes(self.need_bytes)} of {self.memory} memory but the budget of {self.owner} is "
            f"{format_bytes(self.budget_bytes)}, {format_bytes(self.short_bytes)} too little"
        )


def _lacking(problem: SearchProblem) -> list[_Lack]:
    """The memories that are too small where no plan fits, the host's first."""
    host, device = problem.host_budget_bytes, problem.device_budget_bytes
    closest, smallest = _closest(problem), least_device(problem)
    assert smallest is not None
    within = least_host(problem) if closest is None else least_host(problem, max(device, smallest.device_bytes))
    assert within is not None
    found = []
    if closest is None or closest.device_bytes != smallest.device_bytes:
        found.append(_Lack("host", within.host_bytes, host, f"host {problem.hardware.host.name}", within.plan))
    if smallest.device_bytes > device:
        found.append(_Lack("device", smallest.device_bytes, device, problem.hardware.device.name, smallest.plan))
    return found


def _why(problem: SearchProblem, who: str) -> str:
    """Facts, on the first line which memory is too small and by how much, the host's first; then the closest plans."""
    lacking = _lacking(problem)
    memories = [one.memory for one in lacking]
    words = f", for {' and '.join(memories)} memory {'is' if len(memories) == 1 else 'are'} too small: "
    words += f"{who} needs {', and '.join(one.words for one in lacking)} ({_knobs(lacking[0].plan)})."
    if "host" in memories:
        words += " The host would hold offloaded parameters, gradients and optimizer state."
    if "device" in memories:
        words += f" {_what_stays(problem, lacking[-1].plan)}"
    closest = _closest(problem)
    if "host" in memories and closest is not None:
        words += (
            f" Within the host's budget the closest plan needs {format_bytes(closest.device_bytes)} of device memory, "
            f"{format_bytes(closest.device_bytes - problem.device_budget_bytes)} more than the budget of "
            f"{format_bytes(problem.device_budget_bytes)} ({_knobs(closest.plan)})."
        )
    return words


def _what_stays(problem: SearchProblem, plan: Plan) -> str:
    """What of the least peak cannot leave the device, by name: what any two micro-batches work on is that of all."""
    few = plan.model_copy(update={"micro_batches": min(2, plan.micro_batches)})
    schedule = compile_schedule(few, problem.workload, policies=problem.method.policies)
    return stays_sentence(schedule, guaranteed_device_peak(schedule))


def _others(problem: SearchProblem) -> str:
    """What else may help: less activations, where the rest fits, and more of the space."""
    ways = []
    if _rest_bytes(problem) < problem.device_budget_bytes:
        ways += ["a smaller batch", "a shorter sequence"]
        if (number := _ranks_that_may_share(problem)) is not None:
            ways.append(
                f"sequences that ranks share, for which the model is traced (--sequence-ranks {number}; in Python "
                f'sequence_ranks=({number},) of trace(), knobs={{"sequence_ranks": {number}}} of train())'
            )
    if problem.is_restricted:
        ways.append("more of the space than was allowed")
    return f"; {_either(ways)} may fit too." if ways else "."


def _either(words: Sequence[str]) -> str:
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def _ranks_that_may_share(problem: SearchProblem) -> int | None:
    """The most ranks that might share each sequence, if the workload knows nothing of that; None where none can.

    They divide tokens and query heads.  What else a model must have for it, a trace finds out; of
    models of the catalogue the kind is known.
    """
    workload, num_ranks = problem.workload, problem.step.num_ranks
    is_plain = workload.method is TrainingMethod.FULL and workload.packing is None and workload.compiled is None
    length = sequence_length_of(workload)
    if workload.sequence_sharings or not is_plain or length is None or workload.loss_head is not LossHead.EAGER:
        return None
    known = known_model(workload.model_name)
    if known is not None and not model_configuration(known).config["architectures"][0].endswith(_CAUSAL):
        return None
    operations = [one for profile in workload.profiles for one in profile.forward.operations]
    heads = [one.shape[0] // workload.num_samples for one in operations if one.operation_class is _ATTENTION]
    divided = gcd(length, num_ranks, *heads)
    allowed = [n for n in range(2, divided + 1) if divided % n == 0 and why_not_shared(n, num_ranks) is None]
    return max(allowed, default=None) if heads else None


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
