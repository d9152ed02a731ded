"""Device bytes of activations at every compute position, for every choice of activation modes at once.

This follows the compiler's accounts (``shared/compile/activations.py``) in sums instead of buffers.  While a task runs,
everything that the tasks before it left is alive, and the task adds its own peak.  What backwards leave is the measured
level, or what must still be alive if that is more: the incoming gradient is the difference, and not below 0.  What
swaps is counted by those who know when it travels; here it is only taken off what the phases leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...shared.schema.workload import Phase, Workload
from .space import BoolArray, IntArray, ModeRows

NO_TASK_BYTES: Final = -(2**62)
"""The level at a position without a task: below everything that can be added to it."""
_NOT_STATED: Final = -1
"""Where a phase does not say how many bytes of gradients it leaves."""


@dataclass(frozen=True)
class ActivationLevels:
    """Shapes: K choices of modes, V kinds of micro-batches, W positions of a micro-batch, M micro-batches."""

    alive_bytes: IntArray
    """(K, V, W) device level of activations, outputs and incoming gradients before the task starts."""
    peak_bytes: IntArray
    """(K, W) the task's own peak above that, in the first micro-batch; ``NO_TASK_BYTES`` where there is no task."""
    adding_bytes: IntArray
    """(K, W) the same where the task adds all its gradients to those of an earlier micro-batch."""
    kind: IntArray
    """(M,) which of the V each micro-batch is."""
    end_bytes: IntArray
    """(K,) what is left for device Adam."""

    def task_peaks(self, kind: int, adds: BoolArray) -> IntArray:
        """(K, W) the peak of the tasks of micro-batches of ``kind``.

        ``adds``: (W,) whether a task adds all its gradients, if it comes in a later micro-batch.
        """
        return self.peak_bytes if kind == 0 else np.where(adds, self.adding_bytes, self.peak_bytes)

    def folded(self, num_left_out: int) -> ActivationLevels | None:
        """The levels of so many micro-batches more, without those before the last two; None if not all rise alike.

        From one micro-batch to the next each level rises by the same bytes, by what a backward leaves until the step or
        by none, so that no micro-batch that is left out is higher than both the one before them and the one after.
        """
        tables = self.alive_bytes[:, self.kind]  # (K, M, W)
        rises = np.diff(tables[:, 2:], axis=1)
        if not np.all(rises == rises[:, :1]):
            return None
        rise = rises[:, 0]
        after = (tables[:, -2:] + num_left_out * rise[:, None]) if rise.any() else tables[:, -2:]
        # Whatever a backward leaves until the step is there from the start of the next micro-batch on.
        return replace(
            self,
            alive_bytes=np.concatenate([tables[:, :-2], after], axis=1),
            kind=np.arange(len(self.kind)),
            end_bytes=self.end_bytes + num_left_out * rise[:, 0],
        )


def activation_levels(workload: Workload, modes: ModeRows, micro_batches: int) -> ActivationLevels:
    """The levels of ``workload`` under every choice of ``modes``."""
    books = _Books(workload, modes)
    nothing = np.zeros(len(modes.n_swap), dtype=np.int64)
    state = (nothing, nothing)
    tables: list[IntArray] = []
    kind: list[int] = []
    repeats = False
    for micro_batch in range(micro_batches):
        if not repeats:
            table, following = books.micro_batch(*state, is_later=micro_batch > 0)
            tables.append(table)
            # From the second micro-batch on, equal states give equal tables.
            repeats = micro_batch > 0 and all(np.array_equal(*pair) for pair in zip(state, following, strict=True))
            state = following
        kind.append(len(tables) - 1)
    return ActivationLevels(
        alive_bytes=np.stack(tables, axis=1),
        peak_bytes=books.peak_bytes(is_adding=False),
        adding_bytes=books.peak_bytes(is_adding=True),
        kind=np.array(kind),
        end_bytes=state[1],
    )


class _Books:
    """Shapes: K choices of modes, n blocks."""

    def __init__(self, workload: Workload, modes: ModeRows) -> None:
        self.workload = workload
        self.is_checkpoint = modes.is_checkpoint
        self.let_go_later, self.freed_later, self.freed_now = _shared_bytes(workload, modes.is_checkpoint)
        profiles = self.profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
        output_bytes = np.array([profile.output_bytes for profile in profiles])
        forward_bytes = np.array([profile.forward.net_bytes for profile in profiles])
        checkpointed_bytes = np.array([profile.checkpoint_forward.net_bytes for profile in profiles])
        swappable_bytes = np.array([profile.swappable_bytes for profile in profiles])
        is_checkpoint = self.is_checkpoint
        self.swapped: IntArray = np.where(modes.is_swap, swappable_bytes, 0)
        self.forward: IntArray = np.where(is_checkpoint, checkpointed_bytes, forward_bytes) + self.let_go_later[:, :-1]
        left_bytes = np.maximum(self.forward - self.swapped, 0)
        self.outputs: IntArray = np.where(is_checkpoint, left_bytes, np.minimum(output_bytes, left_bytes))
        self.saved: IntArray = left_bytes - self.outputs
        recompute_bytes = np.array([profile.recompute.net_bytes for profile in profiles])
        self.recomputed: IntArray = np.where(is_checkpoint, recompute_bytes, 0)

    @property
    def epilogue_forward(self) -> IntArray:
        """(K,) bytes that the epilogue's forward leaves."""
        return self.workload.epilogue_forward.net_bytes + self.let_go_later[:, -1]

    def micro_batch(
        self, level: IntArray, left: IntArray, *, is_later: bool
    ) -> tuple[IntArray, tuple[IntArray, IntArray]]:
        """(K, W) levels, and what comes after: the measured level, and gradients outside every block.

        ``level`` and ``left``, (K,), are those before it.
        """
        workload, num_blocks = self.workload, self.workload.num_blocks
        alive = np.zeros((len(level), 3 * num_blocks + 4), dtype=np.int64)
        alive[:, 0] = left
        handed_on = (left + max(0, workload.prologue_forward.net_bytes))[:, None]
        alive[:, 1] = handed_on[:, 0]
        alive[:, 2 : num_blocks + 2] = handed_on + (self.outputs + self.saved).cumsum(axis=1)
        # ``held``: outputs and saved activations that backward has yet to consume, and what earlier micro-batches left.
        forward_bytes, backward = self.epilogue_forward, workload.epilogue_backward
        before_epilogue = alive[:, num_blocks + 1]
        alive[:, num_blocks + 2] = before_epilogue + np.maximum(0, forward_bytes)
        level = level + workload.prologue_forward.net_bytes + self.forward.sum(axis=1)
        level = level + forward_bytes + backward.net_bytes - _added(backward, is_later)
        held = before_epilogue - self.outputs[:, -1]
        swapped = self.swapped.sum(axis=1)

        left_behind = np.where(
            self.is_checkpoint,
            [p.checkpoint_backward.net_bytes for p in self.profiles],
            [p.backward.net_bytes for p in self.profiles],
        )
        left_behind = left_behind + self.freed_later - self.freed_now - self._gradient_bytes(is_later)
        levels = _with_start(level, self.recomputed + left_behind)
        consumed = self.saved.copy()
        consumed[:, 1:] += self.outputs[:, :-1]
        others = _with_start(held, -consumed)
        away = _with_start(swapped, -self.swapped)
        after = np.maximum(others, levels - away)
        """(K, n + 1) alive after the epilogue and after each backward, last block first."""
        alive[:, num_blocks + 3 : -1 : 2] = after[:, :-1]
        alive[:, num_blocks + 4 : -1 : 2] = after[:, :-1] + np.maximum(self.recomputed, 0)[:, ::-1]
        alive[:, -1] = after[:, -1]
        last = workload.prologue_backward
        level = levels[:, -1] + last.net_bytes - _added(last, is_later)
        return alive, (level, left + np.maximum(level - left, 0))

    def _gradient_bytes(self, is_later: bool) -> IntArray:
        """(K, n) gradients in buffers of their own, or added to ones of an earlier micro-batch."""
        sizes = np.zeros(self.workload.num_blocks, dtype=np.int64)
        for parameter in self.workload.parameters:
            if parameter.block is not None and parameter.trainable:
                sizes[parameter.block] += parameter.size_bytes
        stated = np.where(
            self.is_checkpoint,
            [_stated_bytes(p.checkpoint_backward) for p in self.profiles],
            [_stated_bytes(p.backward) for p in self.profiles],
        )
        left: IntArray = np.where(stated == _NOT_STATED, sizes, stated if is_later else np.minimum(sizes, stated))
        return left

    def peak_bytes(self, *, is_adding: bool) -> IntArray:
        """(K, W) the tasks' own peaks; ``is_adding``: where all gradients are added to those of another one."""
        workload, num_blocks = self.workload, self.workload.num_blocks

        def by_mode(
            keep: list[Phase], checkpoint: list[Phase], *, held: IntArray | int = 0, freed: IntArray | int = 0
        ) -> IntArray:
            kept, again = ([phase.adding if is_adding else phase for phase in phases] for phases in (keep, checkpoint))
            level = np.where(self.is_checkpoint, [p.net_bytes for p in again], [p.net_bytes for p in kept])
            within = np.where(self.is_checkpoint, [_highest(p) for p in again], [_highest(p) for p in kept])
            found: IntArray = np.maximum(0, np.maximum(level + held - freed, within + held))
            return found

        peaks = np.zeros((len(self.is_checkpoint), 3 * num_blocks + 4), dtype=np.int64)
        peaks[:, 0] = workload.prologue_forward.peak_bytes
        peaks[:, 1 : num_blocks + 1] = by_mode(
            [p.forward for p in self.profiles],
            [p.checkpoint_forward for p in self.profiles],
            held=self.let_go_later[:, :-1],
        )
        epilogue_bytes = np.maximum(
            self.epilogue_forward, _highest(workload.epilogue_forward) + self.let_go_later[:, -1]
        )
        peaks[:, num_blocks + 1] = np.maximum(0, epilogue_bytes)
        peaks[:, num_blocks + 2] = _peak_bytes(workload.epilogue_backward, is_adding)
        recompute = np.where(self.is_checkpoint, [p.recompute.peak_bytes for p in self.profiles], NO_TASK_BYTES)
        backward = by_mode(
            [p.backward for p in self.profiles],
            [p.checkpoint_backward for p in self.profiles],
            held=self.freed_later,
            freed=self.freed_now,
        )
        peaks[:, num_blocks + 3 : -1 : 2] = recompute[:, ::-1]
        peaks[:, num_blocks + 4 : -1 : 2] = backward[:, ::-1]
        peaks[:, -1] = _peak_bytes(workload.prologue_backward, is_adding)
        return peaks


def _shared_bytes(workload: Workload, is_checkpoint: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """Shared inputs ([Note: Shared inputs] in ``shared/schema/shared_inputs.py``), by where they go.

    (K, n + 1) bytes that the forward of each block, the last column of the epilogue, does not let go of since a block
    holds them; (K, n) bytes that each block's backward counts off although they stay; (K, n) those that go with it
    although it does not count them off.
    """
    num_rows, num_blocks = is_checkpoint.shape
    let_go_later = np.zeros((num_rows, num_blocks + 1), dtype=np.int64)
    freed_later, freed_now = (np.zeros((num_rows, num_blocks), dtype=np.int64) for _ in range(2))
    for shared in workload.shared_inputs:
        of_mode = np.zeros((4, num_blocks), dtype=np.bool_)
        for row, blocks in enumerate(
            (shared.kept_by, shared.checkpointed_by, shared.freed_in_kept, shared.freed_in_checkpointed)
        ):
            of_mode[row, list(blocks)] = True
        holds = np.where(is_checkpoint, of_mode[1], of_mode[0])
        counts = np.where(is_checkpoint, of_mode[3], of_mode[2])
        rows = np.flatnonzero(holds.any(axis=1))
        goes = np.zeros_like(holds)
        goes[rows, holds[rows].argmax(axis=1)] = True
        let_go_later[rows, num_blocks if shared.let_go_by is None else shared.let_go_by] += shared.size_bytes
        freed_later += (counts & ~goes) * shared.size_bytes
        freed_now += (goes & ~counts) * shared.size_bytes
    return let_go_later, freed_later, freed_now


def _with_start(start: IntArray, changes: IntArray) -> IntArray:
    """(K, n + 1) ``start`` (K,), and the sums after each of ``changes`` (K, n), last block first."""
    return np.concatenate([start[:, None], start[:, None] + changes[:, ::-1].cumsum(axis=1)], axis=1)


def _added(phase: Phase, is_later: bool) -> int:
    return phase.stated_gradient_bytes if is_later else 0


def _stated_bytes(phase: Phase) -> int:
    """``Phase.gradient_bytes`` as an array holds them."""
    return _NOT_STATED if phase.gradient_bytes is None else phase.gradient_bytes


def _peak_bytes(phase: Phase, is_adding: bool) -> int:
    return phase.adding.peak_bytes if is_adding else phase.peak_bytes


def _highest(phase: Phase) -> int:
    """The highest level of a phase's curve; below every other where it has none."""
    return max((level for _, level in phase.curve), default=NO_TASK_BYTES)
