"""Where the tasks of full training stand in the program of the compute lane.

[Note: Positions]
The program of the compute lane has a place for every recomputation, whether a plan has it or not.  For n blocks, each
micro-batch has 3n + 4 positions:

    0              forward of the prologue
    1 + b          forward of block b
    n + 1, n + 2   forward and backward of the epilogue
    n + 3 + 2s     recomputation of block n - 1 - s (of no length where the block keeps its activations)
    n + 4 + 2s     backward of block n - 1 - s
    3n + 3         backward of the prologue

and the last position of the iteration is device Adam.  So plans that differ in activation modes alone have their tasks
at the same positions, and one numpy axis holds them.  A step (see [Note: Steps] in ``compile.py``) is one forward
position, or a recomputation and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .program import IntArray


@dataclass(frozen=True)
class Positions:
    """Where tasks stand in the program of the compute lane; see [Note: Positions]."""

    num_blocks: int
    micro_batches: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of one iteration."""
        return 2 * self.num_blocks * self.micro_batches

    @property
    def micro_length(self) -> int:
        """Positions of one micro-batch."""
        return 3 * self.num_blocks + 4

    @property
    def length(self) -> int:
        """Positions of one iteration."""
        return self.micro_length * self.micro_batches + 1

    @property
    def device_adam(self) -> int:
        """The last position."""
        return self.length - 1

    @property
    def prologue_backward(self) -> int:
        """The position of the prologue's last backward, behind which no other section runs."""
        return self.length - 2

    @cached_property
    def step_block(self) -> IntArray:
        """(S,) the block of each step."""
        blocks = np.arange(self.num_blocks)
        return np.tile(np.concatenate([blocks, blocks[::-1]]), self.micro_batches)

    def forward(self, block: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The forward of each block."""
        return self.micro_length * micro_batch + 1 + block

    def backward(self, block: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The backward of each block."""
        return self.micro_length * micro_batch + self.num_blocks + 4 + 2 * (self.num_blocks - 1 - block)

    def last_backward(self, block: IntArray) -> IntArray:
        """The backward of each block in the last micro-batch."""
        return self.backward(block, self.micro_batches - 1)

    def step_begin(self, step: IntArray) -> IntArray:
        """The first position of each step of the iteration."""
        found: IntArray = self._begins[step]
        return found

    def step_end(self, step: IntArray) -> IntArray:
        """The last position of each step of the iteration."""
        found: IntArray = self._ends[step]
        return found

    @cached_property
    def _begins(self) -> IntArray:
        return self._position(3)

    @cached_property
    def _ends(self) -> IntArray:
        return self._position(4)

    def _position(self, offset: int) -> IntArray:
        """(S,) compute positions of steps, those of a backward shifted by ``offset``."""
        micro_batch, within = np.divmod(np.arange(self.num_steps), 2 * self.num_blocks)
        place = np.where(within < self.num_blocks, 1 + within, offset - self.num_blocks + 2 * within)
        return self.micro_length * micro_batch + place
