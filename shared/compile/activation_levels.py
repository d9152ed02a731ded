"""Device bytes of activations at every compute position, for every choice of activation modes at once.

A block's forward leaves its output and what it saves; what a forward frees that was there before, its input if nobody
saves that, is taken off its output.  Whatever a checkpointed forward leaves beside its output and the results that it
keeps (the random generator's state) goes with the output.  While a task runs, everything that the tasks before it left
is alive, and the task adds its own peak.  What backwards leave is the measured level, or what must still be alive if
that is more: the gradient that a backward hands on is the difference, and not below 0; a part of a gradient that
another section completes goes along with it.  What swaps, and inputs that are offloaded, are counted by those who know
when they travel; here they are only taken off what the phases leave.

Two things go before the backward of the section that made them.  Shared inputs that no block holds go with the forward
of the epilogue: they are taken off the prologue's output, not off what the epilogue saves.  What the model makes
between two blocks, the last norm of an encoder for one, is a part of the first one's forward and goes with the backward
of the second: it counts as output.  The levels tell how much that is where no block is checkpointed.  A mixture of
modes was never measured as a whole: there, all that a block saves is taken to stay until its own backward, an upper
bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from ..drafts.program import BoolArray, IntArray
from ..layout.looked_up import room_of_rows
from ..layout.uses import numbered_uses
from ..phases.shared_inputs import SharedInput
from ..schema.workload import Phase, Workload

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

    @classmethod
    def joined(cls, parts: Sequence[ActivationLevels]) -> Self:
        """The rows of several tables of the same micro-batches, as ``activation_levels`` makes them."""
        most = max(len(part.alive_bytes[0]) for part in parts)
        num_micro_batches = len(parts[0].kind)
        # From its last kind on, every micro-batch is like it.
        alive = [np.take(part.alive_bytes, np.minimum(np.arange(most), part.kind[-1]), axis=1) for part in parts]
        return cls(
            alive_bytes=np.concatenate(alive),
            peak_bytes=np.concatenate([part.peak_bytes for part in parts]),
            adding_bytes=np.concatenate([part.adding_bytes for part in parts]),
            kind=np.minimum(np.arange(num_micro_batches), most - 1),
            end_bytes=np.concatenate([part.end_bytes for part in parts]),
        )

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


@dataclass(frozen=True)
class _MicroBatch:
    """Shapes: K choices of modes, W positions, n blocks."""

    alive: IntArray
    """(K, W) levels."""
    handed: IntArray
    """(K, n + 2) what the backwards of the epilogue, of all blocks from the last on, and of the prologue hand on."""
    level: IntArray
    """(K,) what phases have left in the end by their net bytes, without gradients."""
    left: IntArray
    """(K,) what backwards have left beside gradients; it stays until the step."""


def activation_levels(
    workload: Workload, is_checkpoint: BoolArray, is_swap: BoolArray, input_bytes: IntArray, micro_batches: int
) -> ActivationLevels:
    """The levels of ``workload`` under every choice of modes: (K, n) blocks that are recomputed, and in mode SWAP.

    ``input_bytes``: (K, n) what each block moves of its input, in mode OFFLOAD_INPUT.
    """
    account = ActivationAccount(workload, is_checkpoint, is_swap, input_bytes)
    found, kind = account.micro_batches(micro_batches)
    return ActivationLevels(
        alive_bytes=np.stack([one.alive for one in found], axis=1),
        peak_bytes=account.peak_bytes(is_adding=False),
        adding_bytes=account.peak_bytes(is_adding=True),
        kind=kind,
        end_bytes=found[-1].left,
    )


class ActivationAccount:
    """What sections leave on the device for their backward.  Shapes: K choices of modes, n blocks."""

    def __init__(self, workload: Workload, is_checkpoint: BoolArray, is_swap: BoolArray, input_bytes: IntArray) -> None:
        self.workload = workload
        self.is_checkpoint = is_checkpoint
        self.shared = SharedBytes.of(workload.shared_inputs, is_checkpoint)
        profiles = self.profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
        output_bytes = np.array([profile.output_bytes for profile in profiles])
        forward_bytes = np.array([profile.forward.net_bytes for profile in profiles])
        checkpointed_bytes = np.array([profile.checkpoint_forward.net_bytes for profile in profiles])
        swappable_bytes = np.array([profile.swappable_bytes for profile in profiles])
        self.kept: IntArray = np.where(is_checkpoint, [profile.kept_bytes for profile in profiles], 0)
        """(K, n) results that checkpointed blocks keep, in mode SELECTIVE."""
        self.swapped: IntArray = np.where(is_swap, swappable_bytes, 0)
        self.travelling: IntArray = self.swapped
        """(K, n) what each block moves to the host and back; of inputs nothing, until ``outputs`` are known."""
        self.forward: IntArray = np.where(is_checkpoint, checkpointed_bytes, forward_bytes)
        self.forward += self.shared.let_go_later[:, :-1]
        left_bytes = np.maximum(self.forward - self.swapped, 0)
        self.kept = np.minimum(self.kept, left_bytes)
        self.outputs: IntArray = np.where(is_checkpoint, left_bytes - self.kept, np.minimum(output_bytes, left_bytes))
        """(K, n) outputs of blocks."""
        self.saved: IntArray = left_bytes - self.outputs
        """(K, n) what forwards save and keep on the device until their backward."""
        recompute_bytes = np.array([profile.recompute.net_bytes for profile in profiles])
        self.recomputed: IntArray = np.where(is_checkpoint, recompute_bytes, 0)
        prologue_bytes = max(0, workload.prologue_forward.net_bytes)
        self.passing: IntArray = np.minimum(self.shared.gone, prologue_bytes)
        """(K,) of what the prologue's forward leaves, the bytes that the epilogue's forward lets go of."""
        self.prologue_output: IntArray = prologue_bytes - self.passing
        """(K,) the rest."""
        self.passing_of_blocks: IntArray = np.where(is_checkpoint, np.minimum(self.shared.made, self.outputs), 0)
        """(K, n) the same of what forwards of checkpointed blocks leave; of other blocks it counts as output."""
        self.outputs -= self.passing_of_blocks
        between = self._between_blocks()
        self.outputs += between
        self.saved -= between
        self.travelling = self.swapped + input_bytes
        self.outputs[:, :-1] = np.maximum(self.outputs[:, :-1] - input_bytes[:, 1:], 0)

    @property
    def _left_by_blocks(self) -> IntArray:
        """(K, n) what forwards of blocks leave on the device."""
        left: IntArray = self.outputs + self.saved + self.passing_of_blocks
        return left

    def micro_batches(self, micro_batches: int, *, always_add: bool = False) -> tuple[list[_MicroBatch], IntArray]:
        """Every distinct micro-batch, and (M,) the number of each micro-batch among them.

        ``always_add``: whether the first one too adds its gradients to others.
        """
        nothing = np.zeros(len(self.is_checkpoint), dtype=np.int64)
        found: list[_MicroBatch] = []
        state = (nothing, nothing)
        for number in range(micro_batches):
            one = self._micro_batch(*state, is_later=number > 0 or always_add)
            found.append(one)
            # From the second micro-batch on, equal states give equal tables.
            if number > 0 and np.array_equal(state[0], one.level) and np.array_equal(state[1], one.left):
                break
            state = one.level, one.left
        return found, np.minimum(np.arange(micro_batches), len(found) - 1)

    @property
    def epilogue_forward(self) -> IntArray:
        """(K,) bytes that the epilogue's forward leaves, less those that it lets go of."""
        let_go: IntArray = self.shared.let_go_later[:, -1] - self.shared.made.sum(axis=1)
        return self.workload.epilogue_forward.net_bytes + let_go

    @property
    def all_passing(self) -> IntArray:
        """(K,) of what the forwards of the prologue and of blocks leave, the bytes that the epilogue's lets go of."""
        passing: IntArray = self.passing + self.passing_of_blocks.sum(axis=1)
        return passing

    @property
    def epilogue_saved(self) -> IntArray:
        """(K,) bytes that the epilogue's forward makes and leaves."""
        saved: IntArray = np.maximum(0, self.epilogue_forward + self.all_passing)
        return saved

    def _between_blocks(self) -> IntArray:
        """(K, n) of what blocks save, the bytes that are gone when the next section's backward has ended."""
        nothing = np.zeros(len(self.is_checkpoint), dtype=np.int64)
        early_bytes = (self._held(nothing) - self._levels(nothing, self.own_gradient_bytes(False)))[:, -2::-1]
        is_measured = ~self.is_checkpoint.any(axis=1, keepdims=True)
        between: IntArray = np.where(is_measured, np.clip(early_bytes, 0, self.saved), 0)
        return between

    def _held(self, left: IntArray) -> IntArray:
        """(K, n + 1) what forwards left that is there after the epilogue's and each block's backward, last block first.

        ``left``: (K,) what earlier micro-batches left.
        """
        made = left + self.prologue_output + (self.outputs + self.saved).sum(axis=1)
        consumed = self.saved.copy()
        consumed[:, 1:] += self.outputs[:, :-1]
        return _with_start(made - self.outputs[:, -1], -consumed)

    def _levels(self, level: IntArray, own: IntArray) -> IntArray:
        """(K, n + 1) the same by net bytes, with all that is alive but what has swapped and ``own``, (K, n + 2).

        ``level``: (K,) before the micro-batch.
        """
        workload = self.workload
        level = level + workload.prologue_forward.net_bytes + self.forward.sum(axis=1)
        level = level + self.epilogue_forward + workload.epilogue_backward.net_bytes - own[:, -1]
        left_behind = np.where(
            self.is_checkpoint,
            [p.checkpoint_backward.net_bytes for p in self.profiles],
            [p.backward.net_bytes for p in self.profiles],
        )
        left_behind = left_behind + self.shared.freed_later - self.shared.freed_now - own[:, 1:-1]
        away = _with_start(self.travelling.sum(axis=1), -self.travelling)
        return _with_start(level, self.recomputed + left_behind) - away

    def _micro_batch(self, level: IntArray, left: IntArray, *, is_later: bool) -> _MicroBatch:
        """``level`` and ``left``, (K,), are those before it."""
        workload, num_blocks = self.workload, self.workload.num_blocks
        alive = np.zeros((len(level), 3 * num_blocks + 4), dtype=np.int64)
        alive[:, 0] = left
        alive[:, 1] = left + self.prologue_output + self.passing
        alive[:, 2 : num_blocks + 2] = alive[:, 1:2] + self._left_by_blocks.cumsum(axis=1)
        alive[:, num_blocks + 2] = alive[:, num_blocks + 1] - self.all_passing + self.epilogue_saved
        own = self.own_gradient_bytes(is_later)
        held, levels = self._held(left), self._levels(level, own)
        after = np.maximum(held, levels)
        """(K, n + 1) alive after the epilogue and after each backward, last block first."""
        alive[:, num_blocks + 3 : -1 : 2] = after[:, :-1]
        alive[:, num_blocks + 4 : -1 : 2] = after[:, :-1] + np.maximum(self.recomputed, 0)[:, ::-1]
        alive[:, -1] = after[:, -1]
        last = workload.prologue_backward
        level = levels[:, -1] + last.net_bytes - own[:, 0]
        end = np.maximum(level - left, 0)
        return _MicroBatch(alive, np.concatenate([after - held, end[:, None]], axis=1), level, left + end)

    @cached_property
    def room_bytes(self) -> IntArray:
        """(n + 2,) room for gradients: of all trainable parameters that a section completes, with or without any."""
        num_blocks = self.workload.num_blocks
        sizes = [0] * (num_blocks + 2)
        for parameter in self.workload.parameters:
            if parameter.trainable:
                sizes[numbered_uses(parameter, num_blocks).gradient] += parameter.size_bytes
        for section, more_bytes in room_of_rows(self.workload):
            sizes[section] += more_bytes
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def stated_bytes(self) -> IntArray:
        """(K, n + 2) gradients that a first micro-batch's backward says it leaves; below 0 where it does not say."""
        kept, again = (
            [
                _stated_bytes(phase)
                for phase in (self.workload.prologue_backward, *blocks, self.workload.epilogue_backward)
            ]
            for blocks in (
                [p.backward for p in self.profiles],
                [p.checkpoint_backward for p in self.profiles],
            )
        )
        is_checkpoint = np.pad(self.is_checkpoint, ((0, 0), (1, 1)))
        return np.where(is_checkpoint, again, kept)

    def own_gradient_bytes(self, is_later: bool) -> IntArray:
        """(K, n + 2) gradients among what backwards leave that have buffers of their own, or were added to others.

        Parameters that nothing uses, or that a block under ``torch.no_grad()`` uses, have room but no gradient; a phase
        that does not say how much it leaves of gradients leaves all.
        """
        stated = self.stated_bytes if is_later else np.minimum(self.room_bytes, self.stated_bytes)
        own: IntArray = np.where(self.stated_bytes == _NOT_STATED, self.room_bytes, stated)
        return own

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
            held=self.shared.let_go_later[:, :-1],
        )
        epilogue_bytes = np.maximum(
            self.epilogue_forward, _highest(workload.epilogue_forward) + self.shared.let_go_later[:, -1]
        )
        peaks[:, num_blocks + 1] = np.maximum(0, epilogue_bytes)
        peaks[:, num_blocks + 2] = _peak_bytes(workload.epilogue_backward, is_adding)
        recompute = np.where(self.is_checkpoint, [p.recompute.peak_bytes for p in self.profiles], NO_TASK_BYTES)
        backward = by_mode(
            [p.backward for p in self.profiles],
            [p.checkpoint_backward for p in self.profiles],
            held=self.shared.freed_later,
            freed=self.shared.freed_now,
        )
        peaks[:, num_blocks + 3 : -1 : 2] = recompute[:, ::-1]
        peaks[:, num_blocks + 4 : -1 : 2] = backward[:, ::-1]
        peaks[:, -1] = _peak_bytes(workload.prologue_backward, is_adding)
        return peaks


def _with_start(start: IntArray, changes: IntArray) -> IntArray:
    """(K, n + 1) ``start`` (K,), and the sums after each of ``changes`` (K, n), last block first."""
    return np.concatenate([start[:, None], start[:, None] + changes[:, ::-1].cumsum(axis=1)], axis=1)


def _stated_bytes(phase: Phase) -> int:
    """``Phase.gradient_bytes`` as an array holds them."""
    return _NOT_STATED if phase.gradient_bytes is None else phase.gradient_bytes


def _peak_bytes(phase: Phase, is_adding: bool) -> int:
    return phase.adding.peak_bytes if is_adding else phase.peak_bytes


def _highest(phase: Phase) -> int:
    """The highest level of a phase's curve; below every other where it has none."""
    return max((level for _, level in phase.curve), default=NO_TASK_BYTES)


# -- shared inputs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SharedBytes:
    """What shared inputs change in the phases, by where they go.  Shapes: K choices of modes, n blocks.

    See [Note: Shared inputs] in ``shared/phases/shared_inputs.py``.
    """

    let_go_later: IntArray
    """(K, n + 1) bytes that each block's forward would let go of if no block held them; last the epilogue's."""
    freed_later: IntArray
    """(K, n) bytes that each block's backward counts off although they stay."""
    freed_now: IntArray
    """(K, n) bytes that go with it although it does not count them off."""
    gone: IntArray
    """(K,) bytes from before the blocks that no block holds, so that the epilogue's forward lets them go."""
    made: IntArray
    """(K, n) the same of what each block makes, which the epilogue's forward does not count off."""

    @classmethod
    def of(cls, inputs: Iterable[SharedInput], is_checkpoint: BoolArray) -> Self:
        """``is_checkpoint``: (K, n) blocks in mode CHECKPOINT; what swaps holds as what it keeps."""
        num_rows, num_blocks = is_checkpoint.shape
        let_go_later = np.zeros((num_rows, num_blocks + 1), dtype=np.int64)
        freed_later, freed_now = (np.zeros((num_rows, num_blocks), dtype=np.int64) for _ in range(2))
        gone = np.zeros(num_rows, dtype=np.int64)
        made = np.zeros((num_rows, num_blocks), dtype=np.int64)
        for shared in inputs:
            holds = _in_mode(shared.kept_by, shared.checkpointed_by, is_checkpoint)
            counts = _in_mode(shared.freed_in_kept, shared.freed_in_checkpointed, is_checkpoint)
            # It goes with the first block that holds it, whose backward is the last.
            rows = np.flatnonzero(holds.any(axis=1))
            goes = np.zeros_like(holds)
            goes[rows, holds[rows].argmax(axis=1)] = True
            if shared.made_by is not None:
                made[:, shared.made_by] += ~holds.any(axis=1) * shared.size_bytes
            else:
                if shared.let_go_by is None:
                    gone += ~holds.any(axis=1) * shared.size_bytes
                let_go_later[rows, num_blocks if shared.let_go_by is None else shared.let_go_by] += shared.size_bytes
            freed_later += (counts & ~goes) * shared.size_bytes
            freed_now += (goes & ~counts) * shared.size_bytes
        return cls(let_go_later, freed_later, freed_now, gone, made)


def _in_mode(kept: tuple[int, ...], checkpointed: tuple[int, ...], is_checkpoint: BoolArray) -> BoolArray:
    """(K, n) whether a block is among those that are named for its mode."""
    named = np.zeros((2, is_checkpoint.shape[1]), dtype=np.bool_)
    named[0, list(kept)] = True
    named[1, list(checkpointed)] = True
    in_mode: BoolArray = np.where(is_checkpoint, named[1], named[0])
    return in_mode
