"""A family of plans as the search reads it: what its lanes run and for how long, and what lies on the device.

All of it comes from the compiler's arrays (``shared/compile/family.py``); seconds alone are added here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np

from ...shared.compile.activation_levels import ActivationLevels
from ...shared.compile.compile import FULL_TRAINING, Policies, drafted
from ...shared.compile.family import Family
from ...shared.compile.homes import static_bytes
from ...shared.drafts.lanes import DeviceBuffers, FamilyLanes, sequences_of_tasks, task_order
from ...shared.drafts.program import Draft, Part
from ...shared.layout.positions import Positions
from ...shared.schema.schedule import Lane, Memory, TaskKind, lanes_of
from .chunk_table import ChunkTable
from .compute_table import ComputeTable
from .lane_order import known_before
from .lane_programs import LanePrograms, LeftOut
from .prices import FloatArray, PriceList
from .space import BoolArray, IntArray, Trips

COMPUTE, H2D, D2H, CPU_OPTIM, COLLECTIVE = (
    tuple(Lane).index(lane) for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM, Lane.COLLECTIVE)
)

OfKinds = Callable[[Iterable[TaskKind]], Mapping[TaskKind, FloatArray]]
_OF_SECTIONS: Final = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)
"""Kinds whose seconds depend on the tiling."""
_REPEATS_FROM: Final = 2
"""The micro-batch that those that follow are like."""


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """Plans of one residency whose blocks send the same to the host.

    Shapes: D prefetch depths, K choices of activation modes, P positions and L tasks of compute, N tasks, T tasks of a
    lane.
    """

    family: Family
    levels: ActivationLevels
    """Of the same K choices."""
    prices: PriceList
    policies: Policies = FULL_TRAINING
    has_disk: bool = False
    """Whether there is the lane of a disk, with or without tasks."""
    tiling: IntArray | None = None
    """(K,) of every choice, one of T ([Note: Tilings] in ``tilings.py``); None where the family has one alone."""
    section_s: FloatArray | None = None
    """(T, 2, W) of ``ComputeTable``, where there is a ``tiling``."""

    @classmethod
    def of(
        cls,
        table: ChunkTable,
        compute: ComputeTable,
        *,
        prefix: int,
        n_buffer: int,
        trips: Trips,
        depths: IntArray,
        policies: Policies = FULL_TRAINING,
    ) -> Self:
        """The plans of one residency of a layout under all choices of modes of ``compute``.

        ``prefix``: the residencies of its chunks ([Note: Prefixes] in ``sim/space/placements.py``).
        """
        workload, on_disk = compute.workloads[trips.tiling], table.places.choice_of_disk(prefix)
        family = Family(
            workload=workload,
            facts=table.facts,
            residency=table.places.residency(prefix),
            n_buffer=n_buffer,
            is_swap=np.arange(workload.num_blocks) < trips.n_swap,
            offloads_input=np.isin(np.arange(workload.num_blocks), trips.inputs),
            is_checkpoint=compute.modes.is_checkpoint,
            depths=depths,
            num_disk_state=on_disk.n_disk_state,
            num_disk=on_disk.n_disk,
            num_staging=on_disk.n_staging,
        )
        tiling = compute.modes.tiling
        section_s = None if tiling is None else compute.section_s
        return cls(family, compute.levels, compute.prices, policies, table.has_disk, tiling, section_s)

    @property
    def num_lanes(self) -> int:
        """Lanes of every rank."""
        num_ranks = self.family.step.num_ranks * self.family.workload.num_stages
        return len(lanes_of(num_ranks, has_disk=self.has_disk))

    @cached_property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return self.policies.sections.positions_of(self.family.workload, self.family.step.micro_batches)

    @cached_property
    def draft(self) -> Draft:
        """What the compiler's policies say."""
        return drafted(self.family, self.policies)

    @cached_property
    def lanes(self) -> FamilyLanes:
        """What every lane runs, and what its tasks wait for."""
        return FamilyLanes.of(self.draft, self.num_lanes, len(self.family.depths))

    @cached_property
    def known(self) -> tuple[IntArray, ...]:
        """By lane, (D, lanes, T): tasks of every lane guaranteed to have ended before each task starts."""
        return _known(self.lanes, len(self.family.depths))

    @cached_property
    def _sequences(self) -> tuple[FamilyLanes, tuple[int, ...], tuple[IntArray, ...]]:
        """The lanes with those apart whose order is open, the lane of every sequence, and what tasks know by these."""
        num_depths = len(self.family.depths)
        sequence, lane_of = sequences_of_tasks(self.draft, self.num_lanes)
        if len(lane_of) == self.num_lanes:
            return self.lanes, lane_of, self.known
        lanes = FamilyLanes.of(self.draft, len(lane_of), num_depths, lane=sequence)
        return lanes, lane_of, _known(lanes, num_depths)

    @cached_property
    def buffers(self) -> DeviceBuffers:
        """What tasks make on the device and others free."""
        return DeviceBuffers.of(self.draft)

    @cached_property
    def static_bytes(self) -> int:
        """Device bytes that are there for good."""
        return static_bytes(self.family, Memory.DEVICE)

    @cached_property
    def adds(self) -> BoolArray:
        """(W,) whether the task at each position of a later micro-batch adds all its gradients to earlier ones."""
        adds = np.ones(self.positions.micro_length, dtype=np.bool_)
        adds[self.positions.backward(np.flatnonzero(self.family.has_new_gradients))] = False
        return adds

    @cached_property
    def place_at(self) -> IntArray:
        """(P,) the place in the lane of compute of the task at each position; methods may run others between them."""
        places = np.zeros(self.positions.length, dtype=np.int64)
        for ids, group in self.draft.groups:
            if group.part is Part.RUNS:
                places[group.position] = self.lanes.place[0, ids]
        return places

    def let_go(self) -> None:
        """Keep what replays read, and no more, since searches have many families.  All else is made again if needed."""
        if "lanes" not in vars(self):
            # Of sequences alone: none of its plans may win, so that hardly any is replayed.
            for name in ("draft", "_sequences", "_all_task_s"):
                vars(self).pop(name, None)
            return
        _ = self._task_s, self._compute_s, self._section_at, self.place_at, self._moded
        if len(self._moded):
            _ = self._moded_s, self._section_of_moded
        for name in ("draft", "buffers", "_sequences", "_all_task_s"):
            vars(self).pop(name, None)
        lanes = self.lanes
        vars(self)["known"] = _narrow(self.known)
        vars(self)["lanes"] = replace(lanes, place=_narrow((lanes.place,))[0], tasks=_narrow(lanes.tasks))

    # -- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def _moded(self) -> IntArray:
        """Tasks beside compute that take other seconds where their block is checkpointed."""
        found = [
            ids
            for ids, group in self.draft.groups
            if group.checkpointed is not None and group.kind.lane is not Lane.COMPUTE
        ]
        return np.concatenate([*found, np.zeros(0, dtype=np.int64)])

    def in_mode(self, mode: int) -> PlanFamily:
        """The family with what its lanes beside compute take under one choice of modes; itself where that is one.

        They take the least of all choices otherwise: bounds hold for all of them.
        """
        if not len(self._moded):
            return self
        key = self.family.is_checkpoint[mode].tobytes()
        if key not in self._in_modes:
            found = replace(self)
            # What does not depend on seconds is the same.
            vars(found).update({name: made for name, made in vars(self).items() if name != "_in_modes"})
            sections = self._section_of_moded
            again = np.append(np.append(False, self.family.is_checkpoint[mode]), (False, False))[sections]
            seconds = self._task_s.copy()
            seconds[:, self._moded] = np.where(again, self._moded_s[1], self._moded_s[0])
            vars(found)["_task_s"] = seconds
            self._in_modes[key] = found
        return self._in_modes[key]

    @cached_property
    def _in_modes(self) -> dict[bytes, PlanFamily]:
        return {}

    @cached_property
    def _section_of_moded(self) -> IntArray:
        """The numbers of their sections."""
        sections = np.zeros(self.draft.num_tasks, dtype=np.int64)
        for ids, group in self.draft.groups:
            sections[ids] = group.section
        return sections[self._moded]

    @cached_property
    def _moded_s(self) -> FloatArray:
        """(2, tasks) their seconds, and those where their blocks are checkpointed."""
        return self._all_task_s[:, self._moded]

    @cached_property
    def _task_s(self) -> FloatArray:
        """As ``_all_task_s``; of tasks beside compute what they take at the least in any mode (``in_mode``)."""
        seconds = self._all_task_s
        if len(self._moded):
            seconds = seconds.copy()
            seconds[:, self._moded] = self._moded_s.min(axis=0)
        return seconds

    @cached_property
    def _all_task_s(self) -> FloatArray:
        """(2, N) seconds of tasks alone on the machine, and those of tasks whose block is checkpointed."""
        seconds = np.empty((2, self.draft.num_tasks))
        for ids, group in self.draft.groups:
            here = slice(ids[0], ids[-1] + 1)
            of_rows = self.prices.seconds(group.kind, group.work)
            seconds[:, here] = of_rows[group.rows]
            if group.checkpointed is not None:
                seconds[1, here] = of_rows[group.checkpointed]
        for ids, group in self.draft.groups:
            if swap_s := self.prices.swap_s(group.kind):
                seconds[:, ids] += np.where(np.isin(group.section, self.family.swapped + 1), swap_s, 0.0)
        self._add_arrivals(seconds)
        return seconds

    def _add_arrivals(self, seconds: FloatArray) -> None:
        """Add what tasks pay for bytes that have just come; (2, N) as ``_task_s``."""
        rates = [self.prices.arrival_s_per_byte(group.kind) for _, group in self.draft.groups]
        if any(rates):
            arrived_bytes = self.draft.arrived_bytes()
            for rate, (ids, _) in zip(rates, self.draft.groups, strict=True):
                here = slice(ids[0], ids[-1] + 1)
                seconds[:, here] += rate * arrived_bytes[:, here]

    def seconds(self, lane: int, depth: int) -> FloatArray:
        """(T,) seconds of the tasks of a lane beside compute, alone on the machine, at the depth of this number."""
        seconds: FloatArray = self._task_s[0, self.lanes.tasks[lane][depth]]
        return seconds

    def drawn_s(
        self, mode: int, depth: int, of_work: OfKinds, of_overheads: OfKinds, of_arrivals: OfKinds
    ) -> list[tuple[FloatArray, ...]]:
        """By draw, (T,) seconds of every lane's tasks, with each kind's parts so many times as long.

        ``of_work``, ``of_overheads``, ``of_arrivals``: (draws,) of some kinds: for what tasks do, for what each costs
        alike, and for the bytes that come for them.
        """
        kinds = {group.kind for ids, group in self.draft.groups if len(ids)}
        drawn = of_work(kinds), of_overheads(kinds), of_arrivals(kinds)
        came_s = np.zeros((2, self.draft.num_tasks))
        self._add_arrivals(came_s)
        groups = [(len(ids), group.kind) for ids, group in self.draft.groups if len(ids)]
        does, alike, comes = (
            np.concatenate([np.broadcast_to(of[kind], (num, len(of[kind]))) for num, kind in groups]).T for of in drawn
        )
        alike_s = np.concatenate([np.full(num, self.prices.overhead_s(kind)) for num, kind in groups])
        tasks = [of_lane[min(depth, len(of_lane) - 1)] for of_lane in self.lanes.tasks]
        modes = np.array([mode])
        came = [came_s[self._is_again(modes)[0].astype(np.intp), tasks[COMPUTE]], *(came_s[0, t] for t in tasks[1:])]
        own = [self.compute_s(modes)[0], *(self._task_s[0, t] for t in tasks[1:])]
        of_lanes = [
            does[:, t] * (own_s - of_came - same_s) + alike[:, t] * same_s + comes[:, t] * of_came
            for t, own_s, of_came in zip(tasks, own, came, strict=True)
            # A task that some plans do not have takes nothing in them.
            for same_s in [np.minimum(alike_s[t], own_s - of_came)]
        ]
        return list(zip(*of_lanes, strict=True))

    @cached_property
    def _section_at(self) -> IntArray:
        """(L,) the section of each task of compute, by number."""
        sections = np.zeros(self.draft.num_tasks, dtype=np.int64)
        for ids, group in self.draft.groups:
            sections[ids[0] : ids[-1] + 1] = group.section
        found: IntArray = sections[self._compute_tasks]
        return found

    @cached_property
    def _compute_tasks(self) -> IntArray:
        """(L,) the tasks of compute in order: all depths have one program."""
        lanes = self.lanes if "lanes" in vars(self) else self._sequences[0]
        found: IntArray = lanes.tasks[COMPUTE][0]
        return found

    def compute_s(self, modes: IntArray) -> FloatArray:
        """(K, L) seconds of compute under these choices of modes, alone on the machine; all depths have one program."""
        rows = slice(1) if self.tiling is None else self.tiling[modes]
        found: FloatArray = np.where(self._is_again(modes), self._compute_s[rows, 1], self._compute_s[rows, 0])
        return found

    @cached_property
    def _compute_s(self) -> FloatArray:
        """(T, 2, L) seconds of compute in every tiling, and those of tasks whose block is checkpointed."""
        tasks = self._compute_tasks
        if self.section_s is None:
            return self._task_s[None, :, tasks]
        seconds = np.repeat(self._task_s[None], len(self.section_s), axis=0)
        came_s = np.zeros_like(self._task_s)
        self._add_arrivals(came_s)
        for ids, group in self.draft.groups:
            if group.kind in _OF_SECTIONS:
                swap_s = np.where(np.isin(group.section, self.family.swapped + 1), self.prices.swap_s(group.kind), 0.0)
                own_s = self.section_s[:, :, group.position % self.positions.micro_length]
                seconds[:, :, ids] = own_s + swap_s + came_s[:, ids]
        return seconds[:, :, tasks]

    def _is_again(self, modes: IntArray) -> BoolArray:
        """(K, L) whether each task of compute is of a checkpointed block."""
        is_checkpoint = self.family.is_checkpoint[modes]
        # Neither the parts outside the blocks nor what has no section, the last number, has a mode.
        outside = np.zeros((len(is_checkpoint), 1), dtype=np.bool_)
        found: BoolArray = np.concatenate([outside, is_checkpoint, outside, outside], axis=1)[:, self._section_at]
        return found

    @cached_property
    def slowest_compute_s(self) -> FloatArray:
        """(L,) the most seconds that each task of compute takes, whichever modes are chosen."""
        most: FloatArray = self._compute_s.max(axis=(0, 1))
        return most

    def programs(self, modes: IntArray, *, num_left_out: int = 0) -> LanePrograms:
        """What the lanes do at every depth under these choices of modes.

        ``num_left_out``: micro-batches that they stand for beyond their own.
        """
        num_depths = len(self.family.depths)
        lanes, lane_of, known = self._sequences
        left_out: tuple[LeftOut | None, ...] = (None,) * num_depths
        if num_left_out:
            begin, num_tasks = zip(*self._places_of(lanes, self.positions.micro_batches - 3), strict=True)
            left_out = tuple(
                LeftOut(num_left_out, begin, num_tasks, tuple(early), tuple(late))
                for early, late in zip(*self._ends_of_cut(lanes), strict=True)
            )
        compute_s = self.compute_s(modes)
        return LanePrograms(
            lengths=np.broadcast_to(np.array(lanes.lengths), (num_depths, len(lane_of))),
            waits=dict(lanes.waits),
            known=known,
            compute_s=np.broadcast_to(compute_s, (num_depths, *compute_s.shape)),
            seconds=tuple(self._task_s[0, tasks] for tasks in lanes.tasks[COMPUTE + 1 :]),
            left_out=left_out,
            lane_of=lane_of,
        )

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch_places(self, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """By lane, the place about which a middle micro-batch begins, and how many tasks it has.

        Lanes run ahead and behind: tasks of neighbours may lie on either side.
        """
        return self._places_of(self.lanes, micro_batch)

    def _places_of(self, lanes: FamilyLanes, micro_batch: int) -> tuple[tuple[int, int], ...]:
        before, within = (np.zeros(len(lanes.lengths), dtype=np.int64) for _ in range(2))
        for ids, group in self.draft.groups:
            of_task = np.broadcast_to(group.micro_batch, ids.shape)
            # What follows the last section belongs to no micro-batch.
            is_within = np.atleast_2d(group.position)[0] < self.positions.prologue_backward
            lane = lanes.lane[ids[0]]
            before[lane] += np.count_nonzero(is_within & (of_task < micro_batch))
            within[lane] += np.count_nonzero(is_within & (of_task == micro_batch))
        return tuple(zip(before.tolist(), within.tolist(), strict=True))

    def _ends_of_cut(self, lanes: FamilyLanes) -> tuple[list[list[int]], list[list[int]]]:
        """(D, lanes) tasks that stand before everything of the last micro-batch, and up to the end of the second one.

        Both by the order of all tasks, in which whatever is waited for comes first.
        """
        num_depths, draft = len(self.family.depths), self.draft
        is_last, is_first = (np.zeros(draft.num_tasks, dtype=np.bool_) for _ in range(2))
        for ids, group in draft.groups:
            here, of_task = slice(ids[0], ids[-1] + 1), np.broadcast_to(group.micro_batch, ids.shape)
            # What follows the last section belongs to no micro-batch.
            is_behind = np.atleast_2d(group.position)[0] >= self.positions.prologue_backward
            is_last[here] = is_behind | (of_task == self.positions.micro_batches - 1)
            is_first[here] = ~is_behind & (of_task < _REPEATS_FROM)
        order = np.broadcast_to(task_order(draft), (num_depths, draft.num_tasks))
        early, late = [], []
        for in_order in order:
            before = in_order[: is_last[in_order].argmax()]
            until = in_order[: draft.num_tasks - is_first[in_order][::-1].argmax()]
            early.append(np.bincount(lanes.lane[before], minlength=len(lanes.lengths)).tolist())
            late.append(np.bincount(lanes.lane[until], minlength=len(lanes.lengths)).tolist())
        return early, late


def _known(lanes: FamilyLanes, num_depths: int) -> tuple[IntArray, ...]:
    waits: list[dict[int, IntArray]] = [{} for _ in lanes.lengths]
    for (lane, other), found in lanes.waits.items():
        waits[lane][other] = found
    return known_before(waits, lanes.lengths, num_depths)


def _narrow(counts: tuple[IntArray, ...]) -> tuple[Any, ...]:
    """The same numbers of tasks in half the room."""
    return tuple(of_lane.astype(np.int32) for of_lane in counts)
