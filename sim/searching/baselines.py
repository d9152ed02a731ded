"""What people do without a search, as plans: plain training, FSDP2 and DeepSpeed, simulated on the same machine.

[Note: Other systems as plans]
A unit of FSDP2 is a block: every block a chunk, the next one gathered while one runs, so that two have buffers.  ZeRO-3
has windows in parameters: 10**9 that live at a time, and 5 * 10**7 that are fetched ahead (DeepSpeed, zero/config.py:
stage3_max_live_parameters, stage3_prefetch_bucket_size).  Both step after backward has ended: a limit of the gradients'
norm has CPU Adam wait for it here too, and where the request has none, theirs is 1.0.  Copies around collectives
and Python in hooks are counted (the notes in ``sim/costs/runtimes.py``), other costs of their own (allocations,
synchronisation) are not.  So these baselines are at least as fast as the systems are.  ZeRO-2 with offload
keeps parameters on the device and steps them on the host, for which there is no plan yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...shared.answers.search_result import Baseline, Lack
from ...shared.basics.errors import PlanError
from ...shared.basics.units import counted
from ...shared.layout.kinds import kind_of
from ...shared.layout.layout import largest_block_bytes, largest_block_elements, layout_of
from ...shared.methods.runtime_profile import Runtime, RuntimeProfile
from ...shared.order.happens_before import HappensBefore
from ...shared.schema.plan import ParallelMode, Plan, TrainingMethod, why_not_parallel
from ...shared.schema.schedule import Memory
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..costs.runtimes import RuntimeCosts
from ..engine.kept_schedule import memory_schedule
from ..engine.simulator import simulate_plan
from ..memory.host import planned_host_bytes
from ..memory.reserved import expected_segments_bytes
from ..memory.segments import segments_of
from .problem import SearchProblem
from .survival import SegmentRoom

NORM_LIMIT: Final = 1.0
"""DeepSpeed's gradient_clipping, and what recipes give to torch.nn.utils.clip_grad_norm_."""
MAX_LIVE_PARAMETERS: Final = 10**9
PREFETCH_PARAMETERS: Final = 5 * 10**7


@dataclass(frozen=True)
class System:
    """One way to train that needs no search."""

    name: str
    how: str
    is_offloaded: bool = False
    is_sharded: bool = False
    is_hybrid: bool = False
    """Whether the ranks of one node share chunks, with replicas across nodes."""
    has_windows: bool = False
    """Whether it fetches by numbers of parameters, as ZeRO-3 does, and not a block ahead."""
    n_checkpoint: tuple[bool, ...] = (False, True)
    """Whether blocks are checkpointed: the first that fits counts."""
    runtime: Runtime = Runtime.OURS
    """Whose copies around collectives are counted."""

    @property
    def is_plain(self) -> bool:
        """Whether everything stays on the device, and is kept."""
        return not self.is_offloaded and not self.is_sharded and self.n_checkpoint == (False,)


def systems(num_ranks: int, per_node: int | None = None) -> tuple[System, ...]:
    """What one device, or several ranks, would be used with; ``per_node``: of these a node has, if there are several.

    FSDP2 shards over the inner axis of a mesh of two and replicates over the outer one where it is given such a mesh.
    """
    step = "stepped after backward"
    zero = System(
        "DeepSpeed ZeRO-3, offloaded",
        f"every block a chunk on the hosts, a window of 1e9 parameters, {step}",
        is_offloaded=True,
        has_windows=True,
        runtime=Runtime.DEEPSPEED_ZERO3,
    )
    fsdp = System(
        "FSDP2, offloaded",
        f"every block a chunk on the hosts, the next one gathered, {step}",
        is_offloaded=True,
        runtime=Runtime.FSDP2,
    )
    if num_ranks == 1:
        plain = "everything on the device"
        return (
            System("plain training", plain, n_checkpoint=(False,)),
            System("plain, checkpointed", f"{plain}, every block recomputed", n_checkpoint=(True,)),
            fsdp,
            zero,
        )
    hybrid = System(
        "FSDP2, hybrid",
        "every block a chunk in parts on the devices of a node, replicas across nodes, the next one gathered",
        is_sharded=True,
        is_hybrid=True,
        runtime=Runtime.FSDP2,
    )
    has_nodes = per_node is not None and 1 < per_node < num_ranks and num_ranks % per_node == 0
    return (
        System("DDP", "everything on every device", n_checkpoint=(False,), runtime=Runtime.DDP),
        System(
            "DDP, checkpointed",
            "everything on every device, every block recomputed",
            n_checkpoint=(True,),
            runtime=Runtime.DDP,
        ),
        System(
            "FSDP2",
            "every block a chunk in parts on all devices, the next one gathered",
            is_sharded=True,
            runtime=Runtime.FSDP2,
        ),
        *([hybrid] if has_nodes else []),
        fsdp,
        zero,
    )


def system_name(system: System, *, is_checkpointed: bool) -> str:
    """The system's name, with what was chosen for it."""
    return f"{system.name}, checkpointed" if is_checkpointed and len(system.n_checkpoint) > 1 else system.name


def system_plan(system: System, problem: SearchProblem, like: Plan, *, is_checkpointed: bool) -> Plan:
    """The plan of ``system`` for the micro-batches of ``problem`` and the ranks of ``like``."""
    workload = problem.workload
    layout = layout_of(workload, largest_block_bytes(workload))
    moves = system.is_offloaded or system.is_sharded
    n_buffer, prefetch_depth = 0, 1
    if moves:
        fewest, num_chunks = layout.min_buffers(0), len(layout.chunks)
        n_buffer = min(2 * fewest, num_chunks)
        if system.has_windows:
            largest = largest_block_elements(workload)
            n_buffer = min(max(fewest, MAX_LIVE_PARAMETERS // largest), num_chunks)
            prefetch_depth = min(max(1, -(-PREFETCH_PARAMETERS // largest)), workload.num_blocks)
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=layout.chunk_bytes,
        n_persist=0 if moves else len(layout.chunks),
        n_shard=len(layout.chunks) if system.is_sharded else 0,
        n_buffer=n_buffer,
        prefetch_depth=prefetch_depth,
        n_checkpoint=workload.num_blocks if is_checkpointed else 0,
        micro_batches=problem.step.micro_batches,
        max_gradient_norm=(like.max_gradient_norm or NORM_LIMIT) if moves else like.max_gradient_norm,
        optimizer=like.optimizer,
        host_gradients=like.host_gradients,
        parallel=_mode_of(system, like.num_ranks),
        num_ranks=like.num_ranks,
        sequence_ranks=like.sequence_ranks,
        shard_ranks=problem.together.devices_per_node if system.is_hybrid else None,
    )


def _mode_of(system: System, num_ranks: int) -> ParallelMode:
    if num_ranks == 1:
        return ParallelMode.SINGLE
    return ParallelMode.SHARDED if system.is_offloaded or system.is_sharded else ParallelMode.DDP


def baselines(
    problems: Mapping[int, SearchProblem],
    room: SegmentRoom | None,
    like: Plan,
    *,
    own: Sequence[tuple[str, Plan]] = (),
) -> tuple[Baseline, ...]:
    """The outcome of every system and of the user's own plans, on the machine of ``problems``.

    Args:
        problems: By the samples of a micro-batch.  Of each system the largest micro-batch that fits counts, and the
            smallest where none does.
        room: What segments may take; None where the device has none.
        like: The recommended plan: its ranks, and its limit of the gradients' norm.
        own: Plans with their names, for the machine's ranks and the smallest of the micro-batches.

    Raises PlanError if one of ``own`` is no plan for the workload, or for other ranks.
    """
    sizes = sorted(problems, reverse=True)
    found = []
    for system in systems(like.num_ranks, problems[sizes[0]].together.devices_per_node):
        if why_not_parallel(like.optimizer, _mode_of(system, like.num_ranks)) is not None:
            continue  # the system shards what this optimizer needs whole
        if like.method is not TrainingMethod.FULL and not system.is_plain:
            continue  # nobody else's program is of this method
        tries = (
            _Need(system_name(system, is_checkpointed=ticked), system.how, plan, problems[size], room, system.runtime)
            for size in sizes
            for ticked in _tried(system, problems[size])
            for plan in [system_plan(system, problems[size], like, is_checkpointed=ticked)]
        )
        found.append(_first_that_fits(tries).baseline())
    for name, plan in own:
        if plan.num_ranks != like.num_ranks:
            raise PlanError(
                f"the baseline {name} is for {counted(plan.num_ranks, 'rank')} but the search is about "
                f"{like.num_ranks}. Ask with --ranks {plan.num_ranks}."
            )
        found.append(_Need(name, "a plan of your own", plan, problems[sizes[-1]], room).baseline())
    return tuple(found)


def _tried(system: System, problem: SearchProblem) -> tuple[bool, ...]:
    """Whether blocks are checkpointed, for every try: what cannot fit without is not tried where there is another."""
    if len(system.n_checkpoint) == 1:
        return system.n_checkpoint
    layout = problem.layouts[0]
    modes = layout.grid.modes
    keeps = np.flatnonzero((modes.n_swap == 0) & (modes.n_checkpoint == 0))
    # Whatever chunks hold comes to that.
    needed = problem.workload.resident_bytes + layout.memory.activation_bytes[keeps]
    return (True,) if (needed > problem.device_budget_bytes).any() else system.n_checkpoint


def _first_that_fits(tries: Iterable[_Need]) -> _Need:
    """The first of ``tries`` that fits, and the last of them if none does."""
    last: _Need | None = None
    for last in tries:
        if not last.lacking:
            return last
    assert last is not None, "every system has a plan"
    return last


class _Need:
    """What a plan needs of every memory."""

    def __init__(
        self,
        name: str,
        how: str,
        plan: Plan,
        problem: SearchProblem,
        room: SegmentRoom | None,
        runtime: Runtime = Runtime.OURS,
    ) -> None:
        self._name, self._how, self._plan, self._problem = name, how, plan, problem
        self._runtime = RuntimeProfile(runtime)
        self._method = self._runtime.method(problem.method)
        workload = problem.workload
        self._layout = layout_of(workload, plan.chunk_bytes)
        self._schedule = memory_schedule(plan, workload, self._layout, policies=self._method.policies)
        order = HappensBefore(self._schedule, _ITERATIONS)
        self._peak_bytes = guaranteed_device_peak(self._schedule, order).size_bytes
        self._pinned_bytes = self._schedule.static_bytes(Memory.PINNED_HOST)
        host_bytes = planned_host_bytes(self._schedule, workload.parameters, self._layout, widens=plan.widens_on_host)
        self._pageable_bytes = host_bytes - self._pinned_bytes
        lacking = [
            ("device memory", self._peak_bytes - problem.device_budget_bytes),
            ("host memory", host_bytes - problem.host_budget_bytes),
        ]
        self._segments_bytes: int | None = None
        if room is not None and not any(size > 0 for _, size in lacking):
            segments = segments_of(self._runtime, plan, workload)
            self._segments_bytes = expected_segments_bytes(
                self._schedule, workload, self._layout, room.device, order=order, segments=segments
            )
            lacking.append((SEGMENTS, self._segments_bytes - room.limit_bytes))
        self.lacking = tuple(Lack(memory=memory, size_bytes=size) for memory, size in lacking if size > 0)

    def baseline(self) -> Baseline:
        """The plan, simulated."""
        problem, plan, workload = self._problem, self._plan, self._problem.workload
        whole = self._schedule if self._schedule.plan_id == plan.identity else None  # not of few micro-batches
        _, timing = simulate_plan(
            plan,
            workload,
            RuntimeCosts.like(problem.costs, self._runtime, workload),
            problem.contention,
            layout=self._layout,
            schedule=whole,
            method=self._method,
        )
        return Baseline(
            name=self._name,
            how=self._how,
            plan=plan,
            plan_kind=kind_of(plan, self._layout, workload),
            num_samples=workload.num_samples * plan.num_batches,
            num_tokens=workload.num_tokens * plan.num_batches,
            iteration_s=timing.iteration_s,
            guaranteed_peak_device_bytes=self._peak_bytes,
            expected_segments_bytes=self._segments_bytes,
            pinned_host_bytes=self._pinned_bytes,
            host_bytes=self._pageable_bytes,
            lacking=self.lacking,
        )


SEGMENTS: Final = "device memory for the allocator's segments"
"""What a baseline lacks whose segments leave no margin (``Lack.memory``)."""
_ITERATIONS: Final = 3
"""Over which the happens-before relation is known: what memory accounts need."""
