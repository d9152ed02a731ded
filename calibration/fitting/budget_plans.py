"""Plans to fit a calibration to that all fit a budget of device memory, and between them do whatever such a plan can.

Each of a few wishes names kinds of tasks and, from the one that does most of them to the least one, plans that have
them.  The first one that fits is taken; where none fits, no plan within the budget has such tasks, or hardly any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout, largest_block_bytes, layout_of
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule, TaskKind
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak

_EACH_BY_ITSELF: Final = 1
"""Bytes of a chunk, below those of any parameter."""
_SMALL: Final = 0.3
"""Of the largest block."""
_NORM: Final = 1.0
_TRAVEL: Final = frozenset({TaskKind.GATHER})


def plans_within(
    workload: Workload, budget_bytes: int, *, optimizer: Optimizer = Optimizer.ADAMW, has_disk: bool = False
) -> tuple[Plan, ...]:
    """Up to five plans of one rank whose device memory never exceeds ``budget_bytes``; ``has_disk``: up to six.

    As much on the device as fits, about half of that, nothing with all blocks checkpointed, swapped blocks, and two
    micro-batches under a limit of the norm with chunks that the host steps and the device keeps.  Empty if the budget
    is below what any plan needs.
    """
    made = _Wishes(workload, budget_bytes, optimizer)
    most = made.first(made.most_on_device(), {TaskKind.DEVICE_ADAM})
    wishes: list[Plan | None] = [
        most,
        made.first(made.half_on_device(0 if most is None else most.n_persist), _TRAVEL),
        made.first(made.nothing_on_device(), frozenset()),
        made.first(made.swapped(), {TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH}),
        made.first(made.in_micro_batches(), {TaskKind.GRADIENT_ACCUMULATE, TaskKind.GRADIENT_NORM}),
    ]
    if has_disk:
        wishes.append(made.first(made.on_disk(), {TaskKind.DISK_READ, TaskKind.DISK_WRITE}))
    return tuple(dict.fromkeys(plan for plan in wishes if plan is not None))


def working_kinds(schedule: Schedule) -> frozenset[TaskKind]:
    """The kinds of its tasks that have something to do: a step on the device may have nothing to step."""
    return frozenset(
        task.kind for task in schedule.tasks if task.kind is not TaskKind.DEVICE_ADAM or task.num_stepped > 0
    )


@dataclass(frozen=True)
class _Wishes:
    """Plans for one workload, most wanted first."""

    workload: Workload
    budget_bytes: int
    optimizer: Optimizer

    def first(self, plans: Iterable[Plan], wanted: Iterable[TaskKind]) -> Plan | None:
        """The first of ``plans`` that fits and has tasks of all kinds that are ``wanted``."""
        for plan in plans:
            schedule = compile_schedule(plan, self.workload)
            if working_kinds(schedule) >= frozenset(wanted) and self._is_within(schedule):
                return plan
        return None

    def _is_within(self, schedule: Schedule) -> bool:
        return guaranteed_device_peak(schedule).size_bytes <= self.budget_bytes

    @property
    def _sizes(self) -> list[int]:
        largest = largest_block_bytes(self.workload)
        return list(dict.fromkeys((largest, max(1, round(_SMALL * largest)), _EACH_BY_ITSELF)))

    @property
    def _checkpointed(self) -> list[int]:
        blocks = self.workload.num_blocks
        return list(dict.fromkeys((0, blocks // 2, blocks)))

    def most_on_device(self) -> Iterator[Plan]:
        """As many chunks as fit, with few blocks checkpointed or with more."""
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            for checkpointed in self._checkpointed:
                kept = self._most_kept(layout, checkpointed)
                if kept:
                    yield self._plan(layout, kept, n_checkpoint=checkpointed)

    def _most_kept(self, layout: Layout, checkpointed: int) -> int:
        """The most chunks on the device with which such a plan fits, by halving; 0 if it does with none."""

        def fits(kept: int) -> bool:
            plan = self._plan(layout, kept, n_checkpoint=checkpointed)
            return self._is_within(compile_schedule(plan, self.workload))

        fewest, most = 0, len(layout.chunks)
        if fits(most):
            return most
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fewest, most = (middle, most) if fits(middle) else (fewest, middle)
        return fewest

    def half_on_device(self, most: int) -> Iterator[Plan]:
        """About half of them, with half of the blocks checkpointed or with all."""
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            for checkpointed in self._checkpointed[1:]:
                for kept in dict.fromkeys((min(most, len(layout.chunks)) // 2, 0)):
                    for more in (1, 0):
                        yield self._plan(layout, kept, more, n_checkpoint=checkpointed)

    def nothing_on_device(self) -> Iterator[Plan]:
        """No chunk, all blocks checkpointed, gathered as far ahead as fits."""
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            for prefetch_depth, more in ((2, 1), (1, 1), (1, 0)):
                yield self._plan(layout, 0, more, n_checkpoint=self.workload.num_blocks, prefetch_depth=prefetch_depth)

    def swapped(self) -> Iterator[Plan]:
        """Half of the blocks swap, or one; the others keep what they save, or are checkpointed."""
        blocks = self.workload.num_blocks
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            for n_swap in dict.fromkeys((max(1, blocks // 2), 1)):
                for checkpointed in dict.fromkeys((0, (blocks - n_swap) // 2, blocks - n_swap)):
                    for more in (1, 0):
                        yield self._plan(layout, 0, more, n_swap=n_swap, n_checkpoint=checkpointed)

    def in_micro_batches(self) -> Iterator[Plan]:
        """Two of them, and a limit of the norm; some chunks stay on the device and are stepped on the host."""
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            for n_host_stepped in dict.fromkeys((len(layout.chunks) // 3, 1, 0)):
                for checkpointed in self._checkpointed:
                    yield self._plan(
                        layout,
                        0,
                        n_host_stepped=n_host_stepped,
                        n_checkpoint=checkpointed,
                        micro_batches=2,
                        max_gradient_norm=_NORM,
                    )

    def on_disk(self) -> Iterator[Plan]:
        """Half of the chunks have their optimizer's state on the disk, and half of these their parameters."""
        for size in self._sizes:
            layout = layout_of(self.workload, size)
            state = max(1, len(layout.chunks) // 2)
            on_disk = {"n_disk_state": state, "n_disk": state - state // 2, "n_staging": 2}
            for checkpointed in self._checkpointed:
                yield self._plan(layout, 0, n_checkpoint=checkpointed, **on_disk)

    def _plan(self, layout: Layout, n_persist: int, more_buffers: int = 0, **knobs: Any) -> Plan:
        kept = n_persist + knobs.get("n_host_stepped", 0)
        fewest, offloaded = layout.min_buffers(kept), len(layout.chunks) - kept
        return Plan(
            workload_id=self.workload.identity,
            method=self.workload.method,
            chunk_bytes=layout.chunk_bytes,
            n_persist=n_persist,
            n_buffer=min(fewest + more_buffers, offloaded) if fewest else 0,
            optimizer=self.optimizer,
            **knobs,
        )
